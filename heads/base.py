"""The contract of a draft head. Nothing outside `heads/` knows which family it is dealing with.

A head has two faces that must agree to rounding:

* the training face sees all positions of a batch at once and yields, for each draft step, the
  hidden rows of the anchors (`unroll`); `objective` turns them into sums and counts;
* the drafting face reads verified positions into the head's own cache (`extend`) and guesses one
  depth of the tree at a time (`expand`).

B batch, T length, n new rows, m frontier nodes, R anchors, K steps, H hidden, A auxiliary width,
V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from spectrain.core.batch import Batch, Features
from spectrain.core.errors import SpectrainError
from spectrain.core.readout import Readout
from spectrain.heads import vocab
from spectrain.heads.tree import TreeDefaults
from spectrain.heads.work import Shape, Work


class TargetFacts(BaseModel):
    """The target a head was trained for; another one is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    fingerprint: str
    hidden_size: int
    num_layers: int
    vocab_size: int

    @classmethod
    def of(cls, target: Any) -> TargetFacts:
        """The facts of a core.target.Target."""
        names = ("name", "fingerprint", "hidden_size", "num_layers", "vocab_size")
        return cls(**{name: getattr(target, name) for name in names})


class HeadConfig(BaseModel):
    """What every head's config.json holds; families add their own fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    family: str
    steps: int = Field(ge=1, description="draft steps K the head is trained for")
    vocab_size: int = Field(ge=1, description="V, rows of the target's lm_head")
    draft_vocab_size: int = Field(ge=1, description="D, tokens the head can guess")
    target: TargetFacts


@dataclass(frozen=True)
class Needs:
    """Target features a head reads: what has to be captured and handed to `extend`.

    aux_layers: outputs of these decoder layers at every position, () for none
    last_everywhere: the last state at every position is an input (EAGLE-1, MTP)
    Teacher rows (the last state wherever the next token lies in a reply) are always captured.
    """

    aux_layers: tuple[int, ...] = ()
    last_everywhere: bool = False


@dataclass
class Unrolled:
    """One step of the training face.

    hidden [R, H'] the rows that `logits(hidden, step)` takes
    anchors [R] flat indices b·T + t, the same at each step; a row whose anchor does not count at
    this step holds a value that nobody may read
    """

    step: int
    hidden: Tensor
    anchors: Tensor


@dataclass
class Objective:
    """Sums over one micro-batch; each vector has one entry per term (usually per draft step).

    loss  [K] Σ per-token loss over the supervised rows (not yet weighted or divided)
    count [K] supervised rows: the denominators, known without a forward (`DraftHead.counts`)
    hits  [K] rows where the head's first choice is the target's argmax
    seen  [K] rows that count at this step; those whose argmax the head cannot guess are in `seen`
          and not in `count`, so they enter every metric as rejections
    total Σ_k scale_k · loss_k, to go backward from, where `scale` was told (`DraftHead.forward`);
          then `loss` itself may have no gradient
    """

    loss: Tensor
    count: Tensor
    hits: Tensor
    seen: Tensor
    total: Tensor | None = None


class DraftHead(nn.Module, ABC):
    """Base of every family. Subclasses set `family` and `Config` and fill in the two faces."""

    family: ClassVar[str]
    Config: ClassVar[type[HeadConfig]]
    Options: ClassVar[type[BaseModel]]
    # What `needs` of such a head will be, told before there is one.
    reads_aux: ClassVar[bool] = False
    reads_last_everywhere: ClassVar[bool] = False

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self._shared: list[Readout] = []  # a list, so that the target never becomes our submodule
        self.reduced = config.draft_vocab_size < config.vocab_size
        if self.reduced:
            first = torch.arange(config.draft_vocab_size)
            d2t, t2d = vocab.maps(first, config.vocab_size)
            self.register_buffer("d2t", d2t)
            self.register_buffer("t2d", t2d)

    # ── making one ───────────────────────────────────────────────────────────

    @classmethod
    @abstractmethod
    def create(cls, options: Any, target: Any, token_counts: Tensor) -> DraftHead:
        """A new head for `target` (core.target.Target, weights not packed), bound to it.

        options: the family's own settings (`Options`); token_counts [V]: how often each token is
        supervised, for the draft vocabulary.
        """

    @classmethod
    @abstractmethod
    def configure(cls, options: Any, target: Any) -> HeadConfig:
        """The config of a new head for `target`, of which nothing but shapes is looked at."""

    @classmethod
    def outline(cls, options: Any, target: Any) -> DraftHead:
        """A new head without values, on the meta device: its parameters can be counted."""
        config = cls.configure(options, target)
        with torch.device("meta"):
            return cls(config).bind(target.readout)

    def starts(self, **own: Any) -> list[BaseModel]:
        """Options of new heads of this one's shape, one for each way a new one can start; none
        where what it started from is not told by its config.

        own: options that the config does not spell as they are given. Raises
        pydantic.ValidationError for a head that could not be made anew.
        """
        if self.native:  # it came with its target, and needs no training
            return []
        known = {
            name: getattr(self.config, name)
            for name in self.Options.model_fields
            if name in type(self.config).model_fields
        } | own
        init = self.Options.model_fields.get("init")
        ways = [{"init": way} for way in get_args(init.annotation)] if init else [{}]
        return [self.Options(**known, **way) for way in ways]

    def bind(self, readout: Readout) -> DraftHead:
        """Share the target's embedding and output layer."""
        if readout.vocab_size != self.config.vocab_size:
            raise SpectrainError(
                f"the head expects a vocabulary of {self.config.vocab_size}, "
                f"the target has {readout.vocab_size}",
                fix="use the target the head was trained for",
            )
        self._shared[:] = [readout]
        return self

    def check_target(self, target: Any, where: str) -> None:
        """Refuse a target (core.target.Target) that this head cannot draft for; `where` names the
        head's folder in the message."""
        facts = self.config.target
        if facts.fingerprint != target.fingerprint:
            raise SpectrainError(
                f"the head was trained for {facts.name} ({facts.fingerprint}), "
                f"this target is {target.name} ({target.fingerprint})",
                where=where,
                fix=f"use --target {facts.name} or a head of this target",
            )

    @property
    def readout(self) -> Readout:
        if not self._shared:
            raise RuntimeError("bind(readout) comes before any forward")
        return self._shared[0]

    @property
    def needs(self) -> Needs:
        """What it reads; a family with `reads_aux` tells its layers."""
        return Needs(last_everywhere=self.reads_last_everywhere)

    @property
    def longest_draft(self) -> int:
        """Positions the head can draft; a recurrent head goes on beyond the steps it learnt."""
        return self.config.steps

    @property
    def positions(self) -> int | None:
        """Positions the head was made for; further ones are drafted all the same, and worse.
        None: as many as its target."""
        return None

    @property
    def native(self) -> bool:
        """Whether the head is a part of its target's checkpoint (native MTP layers)."""
        return False

    def put_back(self, checkpoint: Path, out: Path) -> None:
        """Write a copy of the target's checkpoint with this head in the place of its own part."""
        raise SpectrainError(
            f"a head of family {self.family} is no part of its target's checkpoint",
            where="put_back",
            fix="only MTP layers that came with the target (head.native=true) can be put back",
        )

    @property
    def tree(self) -> TreeDefaults | None:
        """The draft tree the family was published with; None: the generator's own."""
        return None

    # ── training face ────────────────────────────────────────────────────────

    @abstractmethod
    def unroll(self, batch: Batch, steps: int) -> Iterator[Unrolled]:
        """Yield steps k = 0 … steps−1 (≤ longest_draft); every step is fed the true tokens."""

    @abstractmethod
    def logits(self, hidden: Tensor, step: int) -> Tensor:
        """[..., H'] → [..., D]"""

    @abstractmethod
    def counts(self, batch: Batch) -> Tensor:
        """The denominators [K] of `objective` for this micro-batch, from tokens, reply and argmax
        alone: called on batches whose features may be None."""

    @abstractmethod
    def objective(self, batch: Batch) -> Objective:
        """Loss sums of a micro-batch."""

    @abstractmethod
    def work(self, shape: Shape) -> Work:
        """What a forward and backward of a micro-batch asks for; nothing but shapes is looked at,
        so that it can be asked of an `outline`."""

    @abstractmethod
    def weights(self, progress: float) -> list[float]:
        """Weight of each term of `objective`; progress runs from 0 to 1 over the training."""

    def forward(self, batch: Batch, scale: Tensor | None = None) -> Objective:
        """The objective, as a module call, so that data-parallel wrappers see it.

        scale [K]: what the caller will weigh each term by; with it comes `total`. A head that knows
        it before its forward can take its gradient in parts, and keep none of what led to it.
        """
        objective = self.objective(batch)
        if scale is None:
            return objective
        return replace(objective, total=(scale * objective.loss).sum())

    # ── drafting face ────────────────────────────────────────────────────────

    @abstractmethod
    def start(self, rows: int, slots: int) -> Any:
        """An empty drafting state for `rows` sequences of at most `slots` positions."""

    def begin(self, state: Any, tokens: Tensor, features: Features, counts: Tensor) -> Tensor:
        """Read a prompt: tokens [B, n+1] = x[0 … n], features of positions 0 … n−1.

        Heads that work on features start at x[1]; a head that is a language model itself overrides
        this to read x[0] as well. Returns what `extend` returns.
        """
        return self.extend(state, tokens[:, 1:], features, counts)

    @abstractmethod
    def extend(
        self, state: Any, tokens: Tensor, features: Features, counts: Tensor, view: int = 0
    ) -> Tensor:
        """Read verified positions and return the logits of the first guess, [B, D].

        Row i of `features` [B, n, …] belongs to position p+i, tokens [B, n] to x[p+i+1]; only the
        first counts[b] rows are real (0: the sequence has ended, its result is not used).
        Everything drafted before is forgotten. `view` bounds the cache slots looked at (longest
        sequence plus what will be drafted; 0 = all).
        """

    @abstractmethod
    def expand(self, state: Any, tokens: Tensor, parents: Tensor) -> Tensor:
        """Go one level deeper: nodes [B, m] with their tokens; logits of their children [B, m, D].

        parents [B, m] index the previous level (the first level has one parent, 0).
        """

    def adopt(self, state: Any, rows: Tensor, other: Any, chosen: Tensor | None = None) -> None:
        """Put sequences `chosen` [A] of another state (None: all) into `rows` [A] of `state`, in
        place of what was there: all that their next `extend` goes on from. What was drafted in
        either state is forgotten."""
        state.cache.adopt(rows, other.cache, chosen)

    # ── vocabulary ───────────────────────────────────────────────────────────

    def use_vocabulary(self, ids: Tensor) -> None:
        """Let the head guess the target tokens `ids` [D], ascending (a new head's map)."""
        if self.reduced:
            self.d2t, self.t2d = vocab.maps(ids, self.config.vocab_size)

    def to_target(self, ids: Tensor) -> Tensor:
        """Draft ids → target ids, any shape."""
        return ids + self.d2t[ids] if self.reduced else ids

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, ascending: [D]."""
        device = self.d2t.device if self.reduced else self.readout.weight.device
        return self.to_target(torch.arange(self.config.draft_vocab_size, device=device))

    def guessable(self, ids: Tensor) -> Tensor:
        """Whether target ids [...] are in the draft vocabulary; −1 is not."""
        known = (ids >= 0) & (ids < self.config.vocab_size)
        return known & self.t2d[ids.clamp(min=0)] if self.reduced else known

    def to_draft(self, ids: Tensor) -> Tensor:
        """Target ids [...] → draft ids; only for those that are `guessable`."""
        return torch.searchsorted(self.draft_ids, ids) if self.reduced else ids

    def check_vocabulary(self, where: str) -> None:
        """Called after loading: raise SpectrainError if the vocabulary map cannot be right."""
        if self.reduced:
            vocab.check_maps(self.d2t, self.t2d, where)

    def spread(self, probabilities: Tensor) -> Tensor:
        """Probabilities over the draft vocabulary [..., D] → over the target's [..., V]."""
        ids = self.to_target(
            torch.arange(self.config.draft_vocab_size, device=probabilities.device)
        )
        full = probabilities.new_zeros(*probabilities.shape[:-1], self.config.vocab_size)
        return full.index_copy_(-1, ids, probabilities)

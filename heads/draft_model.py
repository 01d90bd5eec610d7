"""A small causal language model as a draft (Leviathan arXiv 2211.17192, Chen arXiv 2302.01318).

Any model of `transformers` with the target's tokenizer: a checkpoint of its own, or a few layers of
the target. It reads tokens alone, so its own prediction of x[t+2+k] is its row t+1+k::

    row        0    1    …  t+1       t+2       …
    reads    x[0] x[1]    x[t+1]    x[t+2]
    guesses  x[1] x[2]    x[t+2]    x[t+3]         step 0 of anchor t, step 1 of anchor t, …

Step k of anchor t is step 0 of anchor t+k: in training each position is taught once.

B batch, T length, n rows, m nodes, R anchors, H hidden size of the draft, V target vocabulary,
D tokens of the shared tokenizer (draft vocabulary), W rows of the draft's own tables (≥ D).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.core.attention import Plan
from spectrain.core.batch import Batch, Features, counted
from spectrain.core.cache import KVCache, visible_slots
from spectrain.core.errors import SpectrainError
from spectrain.core.fast_linear import Linear, fast_linear
from spectrain.core.outline import outline
from spectrain.core.readout import Readout
from spectrain.heads import draft_init, scoring, vocab
from spectrain.heads.base import DraftHead, HeadConfig, Objective, TargetFacts, Unrolled
from spectrain.heads.draft_config import (
    CHUNK,
    DEFAULT_LAYERS,
    DEFAULT_STEPS,
    LONGEST_DRAFT,
    DraftConfig,
    DraftOptions,
)
from spectrain.heads.draft_work import draft_work
from spectrain.heads.tokenizers import require_same
from spectrain.heads.work import Shape, Work


@dataclass
class DraftState:
    """Drafting state: verified tokens in the cache, drafted nodes behind them."""

    cache: KVCache
    view: int
    ancestors: Tensor | None = None  # [B, m, U] of the last level among the U drafted nodes
    level: int = 0


class DraftModelHead(DraftHead):
    """A decoder with its own embedding and output layer."""

    family: ClassVar[str] = "draft"
    Config: ClassVar[type[HeadConfig]] = DraftConfig
    Options: ClassVar[type[BaseModel]] = DraftOptions
    config: DraftConfig

    def __init__(self, config: DraftConfig, model: nn.Module | None = None) -> None:
        """model: the causal LM that `config.model` describes; None: one with random weights."""
        super().__init__(config)
        model = draft_init.build(config.model) if model is None else model
        self.decoder = model.get_decoder()
        table, output = self.decoder.get_input_embeddings(), model.get_output_embeddings()
        # A tied output layer is the embedding: one tensor, one name in the file.
        self.lm_head = None if output.weight is table.weight else output
        self.rows = len(output.weight)
        self._softcap = getattr(self.decoder.config, "final_logit_softcapping", None)
        self._origin: Any = None  # tokenizer of a model that was not trained for one target
        learned = any(isinstance(m, nn.Embedding) and m is not table for m in self.modules())
        # Rotary positions go on beyond what was trained. A table of positions ends: further tokens
        # are read as if they were its last, and guesses there are worth little.
        self._longest = self.decoder.config.max_position_embeddings if learned else None
        for module in self.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear  # the same layer by the faster product
        self.requires_grad_(True)
        for part in (table, self.lm_head):
            if part is not None:
                part.requires_grad_(config.train_embeddings)

    # ── making one ───────────────────────────────────────────────────────────

    @classmethod
    def create(cls, options: DraftOptions, target: Any, token_counts: Tensor) -> DraftModelHead:
        if options.model is None:
            model = draft_init.layers_of(target, options.layers or DEFAULT_LAYERS)
        else:
            source = draft_init.load(options.model, "head.model")
            require_same(source.tokenizer, target.tokenizer, options.model)
            model = source.model
        return cls(_config(options, target, model), model).to(target.device).bind(target.readout)

    @classmethod
    def configure(cls, options: DraftOptions, target: Any) -> DraftConfig:
        if options.model is None:
            content = draft_init.description_of_layers(target, options.layers or DEFAULT_LAYERS)
            with torch.device("meta"):
                model = draft_init.build(content)
        else:
            model = outline(options.model).model
        return _config(options, target, model)

    @classmethod
    def load(cls, name: str, where: str) -> DraftModelHead:
        """An untrained draft: the model `name` (folder, embedded name, hub id) as it is.

        Which target it is for is decided by `check_target`.
        """
        source = draft_init.load(name, where)
        config = DraftConfig(
            steps=DEFAULT_STEPS,
            vocab_size=source.vocab_size,
            draft_vocab_size=source.readout.usable,
            target=TargetFacts.of(source),
            model=draft_init.description(source.model),
            tokens=len(source.tokenizer),
        )
        head = cls(config, source.model)
        head._origin = source.tokenizer
        return head.eval()

    def check_target(self, target: Any, where: str) -> None:
        if self._origin is None:
            super().check_target(target, where)
            return
        require_same(self._origin, target.tokenizer, where)
        self.config = self.config.model_copy(update={"target": TargetFacts.of(target)})

    def starts(self, **own: Any) -> list[BaseModel]:
        """Only layers of the target: a checkpoint that it may have started from is not known."""
        return super().starts(model=None, layers=self.decoder.config.num_hidden_layers, **own)

    def bind(self, readout: Readout) -> DraftModelHead:
        """Tables may have more rows than there are tokens, each model as many as it likes."""
        if readout.usable != min(self.config.tokens, readout.vocab_size):
            raise SpectrainError(
                f"the draft has a vocabulary of {self.config.tokens} tokens, "
                f"the target one of {readout.usable}",
                fix="use a draft with the target's tokenizer",
            )
        size, usable = readout.vocab_size, min(readout.usable, self.rows)
        if (size, usable) != (self.config.vocab_size, self.config.draft_vocab_size):
            sizes = {"vocab_size": size, "draft_vocab_size": usable}
            self.config = self.config.model_copy(update=sizes)
            self.reduced = usable < size
            for name in {"d2t", "t2d"} & self._buffers.keys():
                delattr(self, name)
            if self.reduced:
                maps = vocab.maps(torch.arange(usable), size)
                for name, value in zip(("d2t", "t2d"), maps, strict=True):
                    self.register_buffer(name, value.to(readout.weight.device))
        return super().bind(readout)

    def train(self, mode: bool = True) -> DraftModelHead:
        """The model never drops out: a run is repeatable, and the teacher does not either."""
        super().train(mode)
        self.decoder.eval()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> DraftModelHead:
        """Rotary frequencies stay float32 when the weights change type, as in the library."""
        tables = [
            (module, name, table)
            for module in self.modules()
            for name, table in module.named_buffers(recurse=False)
            if name.endswith("inv_freq")
        ]
        super()._apply(fn, recurse)
        for module, name, table in tables:
            setattr(module, name, table.to(getattr(module, name).device))
        return self

    @property
    def longest_draft(self) -> int:
        return LONGEST_DRAFT

    @property
    def positions(self) -> int:
        return self.decoder.config.max_position_embeddings

    # ── training face ────────────────────────────────────────────────────────

    def unroll(self, batch: Batch, steps: int) -> Iterator[Unrolled]:
        positions = batch.positions
        if self._longest is not None:
            self._require_room(int(positions.max()) + 1)
        hidden = self._run(batch.tokens, Plan(positions, starts=batch.starts)).flatten(0, 1)
        anchors = counted(batch.reply, 0).flatten().nonzero().flatten()
        for step in range(steps):
            rows = (anchors + 1 + step).clamp(max=len(hidden) - 1)
            yield Unrolled(step, hidden[rows], anchors)

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        if self.lm_head is None:
            weight = self.decoder.get_input_embeddings().weight
            logits = fast_linear(hidden, weight[: self.config.draft_vocab_size])
        else:
            logits = self.lm_head(hidden)[..., : self.config.draft_vocab_size]
        if self._softcap is None:
            return logits
        return torch.tanh(logits / self._softcap) * self._softcap

    def work(self, shape: Shape) -> Work:
        return draft_work(self, shape)

    def counts(self, batch: Batch) -> Tensor:
        return scoring.taught_counts(self, batch, 1)

    def objective(self, batch: Batch) -> Objective:
        parts = scoring.Sums(self, batch)
        (unrolled,) = self.unroll(batch, 1)
        step = parts.step(unrolled)
        last = batch.last.flatten(0, 1)[step.rows]  # [R, Ht]
        size = max(1, CHUNK // self.config.draft_vocab_size)
        pieces = list(
            zip(*(t.split(size) for t in (unrolled.hidden, last, step.taught)), strict=True)
        )
        losses, choices = [], []
        for piece in pieces:
            if len(pieces) == 1:
                loss, choice = self._distil(*piece)
            else:  # only the hidden rows are kept; the logits are computed again on the way back
                loss, choice = checkpoint(self._distil, *piece, use_reentrant=False)
            losses.append(loss)
            choices.append(choice)
        parts.add_choice(step, torch.stack(losses).sum(), self.to_target(torch.cat(choices)))
        return parts.objective()

    def _distil(self, hidden: Tensor, last: Tensor, taught: Tensor) -> tuple[Tensor, Tensor]:
        """Draft rows [R, H], the target's last states [R, Ht], taught [R] → loss, choices [R]."""
        readout, size = self.readout, self.config.draft_vocab_size
        with torch.no_grad():
            bias = None if readout.bias is None else readout.bias[:size]
            log_p = fast_linear(last.to(readout.weight.dtype), readout.weight[:size], bias)
            log_p = readout.cap(log_p).float().log_softmax(-1)
        logits = self.logits(hidden, 0)
        log_q = logits.float().log_softmax(-1)
        if self.config.loss == "kl":
            loss = (log_p.exp() * (log_p - log_q)).sum(-1)
        else:
            loss = (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
        return (loss * taught).sum(), logits.detach().argmax(-1)

    def weights(self, progress: float) -> list[float]:
        return [1.0]

    # ── drafting face ────────────────────────────────────────────────────────

    def start(self, rows: int, slots: int) -> DraftState:
        slots += 1  # it has read one token more than there are rows with features
        device = self.decoder.get_input_embeddings().weight.device
        return DraftState(KVCache(rows, slots, device), slots)

    def begin(
        self, state: DraftState, tokens: Tensor, features: Features, counts: Tensor
    ) -> Tensor:
        state.view = state.cache.slots
        return self._read(state, tokens, counts + 1, tokens.shape[1])

    def extend(
        self,
        state: DraftState,
        tokens: Tensor,
        features: Features,
        counts: Tensor,
        view: int = 0,
    ) -> Tensor:
        state.view = min(view + 1, state.cache.slots) if view else state.cache.slots
        return self._read(state, tokens, counts, state.view)

    def expand(self, state: DraftState, tokens: Tensor, parents: Tensor) -> Tensor:
        cache = state.cache
        batch, width = tokens.shape
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        if state.ancestors is not None:
            index = parents[..., None].expand(-1, -1, state.ancestors.shape[-1])
            own = torch.cat([state.ancestors.gather(1, index), own], dim=-1)
        state.ancestors = own
        used = own.shape[-1] - width
        slots = cache.lengths[:, None] + used + torch.arange(width, device=tokens.device)
        positions = (cache.lengths + state.level)[:, None].expand(batch, width)
        visible = visible_slots(cache.lengths, width, state.view, own)
        state.level += 1
        return self.logits(self._run(tokens, Plan(positions, cache, slots, visible)), state.level)

    def _read(self, state: DraftState, tokens: Tensor, counts: Tensor, view: int) -> Tensor:
        """Read the tokens behind x[0 … p−1] and keep counts[b] of them → logits of the next."""
        cache, width = state.cache, tokens.shape[1]
        slots = cache.lengths[:, None] + torch.arange(width, device=tokens.device)
        visible = visible_slots(cache.lengths, width, view, None)
        hidden = self._run(tokens, Plan(slots, cache, slots, visible))
        cache.commit(counts)
        state.level, state.ancestors = 0, None
        last = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
        return self.logits(hidden.gather(1, last)[:, 0], 0)

    def _require_room(self, length: int) -> None:
        if self._longest is not None and length > self._longest:
            raise SpectrainError(
                f"the draft model has {self._longest} positions, {length} are needed",
                fix="train on shorter conversations, or another draft",
            )

    def _run(self, tokens: Tensor, plan: Plan) -> Tensor:
        """tokens [B, n] → what the output layer reads, [B, n, H]"""
        positions = plan.positions
        if plan.cache is not None:
            plan.cache.place(plan.slots, positions)
        if self._longest is not None:
            positions = positions.clamp(max=self._longest - 1)
        return self.decoder(
            # A target may emit one of its rows beyond the tokenizer, which we need not have.
            input_ids=tokens.clamp(max=self.rows - 1),
            position_ids=positions,
            # Four-dimensional, so that the library takes it as it is and builds no mask.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device),
            use_cache=False,
            plan=plan,
        ).last_hidden_state


def _config(options: DraftOptions, target: Any, model: nn.Module) -> DraftConfig:
    """Of a draft for `target` that starts as `model`."""
    return DraftConfig(
        steps=options.steps,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(target.readout.usable, len(model.get_output_embeddings().weight)),
        target=TargetFacts.of(target),
        model=draft_init.description(model),
        tokens=len(target.tokenizer),
        loss=options.loss,
        train_embeddings=options.train_embeddings,
    )

"""EAGLE-1 (arXiv 2401.15077): one decoder layer that regresses the target's last state.

Row t reads fc(cat[e(x[t+1]), f[t]]) and says f̂[t+1], a guess of f[t+1]; the target's own lm_head
makes of it the logits for x[t+2]. Steps and keys as in `recurrent.py`: the loss of step k compares
f̂ of anchor t with the target's state at the teacher row u = t+1+k::

    regression_weight · SmoothL1(f̂, f[u])  +  classification_weight · CE(lm_head(f[u]) ‖ lm_head(f̂))

The published recipe trains one step; more steps train on the head's own outputs as EAGLE-3 does.

B batch, T length, R anchors, H hidden, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from spectrain.core.batch import Batch, Features
from spectrain.core.fast_linear import Linear, fast_linear
from spectrain.core.readout import Readout
from spectrain.heads import eagle1_init, scoring, vocab
from spectrain.heads.base import HeadConfig, Objective, TargetFacts
from spectrain.heads.eagle_layer import EagleConfig, EntryLayer, sizes_of
from spectrain.heads.eagle_work import eagle1_work
from spectrain.heads.linear_loss import linear_cross_entropy
from spectrain.heads.noise import document_lengths, document_noise
from spectrain.heads.recurrent import RecurrentHead
from spectrain.heads.work import Shape, Work

_NOISE_LENGTH = 512  # published: noise is scaled by 512 / length of the row


class Eagle1Options(BaseModel):
    """What a user may choose when a head is made (`head:` in a config, `--set head.steps=2`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: int = Field(1, ge=1, le=16, description="draft steps K unrolled in training")
    step_decay: float = Field(0.8, gt=0, le=1, description="weight of step k is step_decay**k")
    draft_vocab_size: int | None = Field(
        None, ge=1, description="tokens the head can guess; default: all there are"
    )
    init: Literal["target", "random"] = Field(
        "random",
        description="start at random, or from the target's last layer (a better first guess at "
        "once, worse later ones)",
    )
    fc_bias: bool = Field(
        False,
        description="bias of fc: the published weights have one, vLLM refuses it, and without one "
        "a file serves every engine (zeros can be written where it is asked for)",
    )
    regression_weight: float = Field(1.0, ge=0, description="weight of the smooth L1 distance")
    classification_weight: float = Field(0.1, ge=0, description="weight of the cross-entropy")
    noise: float = Field(
        0.2,
        ge=0,
        description="noise on the features in training: uniform, this wide times 512 / length",
    )


class Eagle1Config(EagleConfig):
    """The head's config.json."""

    family: Literal["eagle1"] = "eagle1"
    fc_bias: bool
    regression_weight: float
    classification_weight: float
    noise: float


class Eagle1Head(RecurrentHead):
    """`fc`, one decoder layer without an input norm, and the target's lm_head."""

    family: ClassVar[str] = "eagle1"
    Config: ClassVar[type[HeadConfig]] = Eagle1Config
    Options: ClassVar[type[BaseModel]] = Eagle1Options
    reads_last_everywhere: ClassVar[bool] = True
    config: Eagle1Config

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config)
        width = config.hidden_size + config.target.hidden_size
        self.fc = Linear(width, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([EntryLayer(config)])
        self._output: tuple[Tensor, Tensor | None] | None = None
        self._first_rows = False

    @classmethod
    def create(cls, options: Any, target: Any, token_counts: Tensor) -> Self:
        config = cls.configure(options, target)
        ids = vocab.choose(config.draft_vocab_size, target, token_counts)
        head = cls(config)
        head.use_vocabulary(ids)
        eagle1_init.initialise(head, target, from_layer=options.init == "target")
        return head.to(target.device).bind(target.readout)

    @classmethod
    def configure(cls, options: Any, target: Any) -> Any:
        return cls.Config(
            **options.model_dump(exclude={"init", "draft_vocab_size"}),
            **sizes_of(target),
            vocab_size=target.vocab_size,
            draft_vocab_size=vocab.size_of(options.draft_vocab_size, target),
            target=TargetFacts.of(target),
        )

    @property
    def stack(self) -> list[EntryLayer]:
        return list(self.layers)

    # ── what goes in ─────────────────────────────────────────────────────────

    def read(self, features: Features) -> Tensor:
        return features.last.to(self.dtype)

    def disturb(self, features: Features, batch: Batch) -> Features:
        """As published: the noise of a conversation is the smaller the longer it is."""
        if not self.config.noise:
            return features
        length = document_lengths(batch).clamp(min=1)
        width = 0.5 * self.config.noise * _NOISE_LENGTH / length
        noise = document_noise(batch, features.last) * width[..., None].to(features.last.dtype)
        return Features(features.last + noise, None)

    def enter(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        merged = self.fc(torch.cat([embedding, hidden], dim=-1))
        return merged, merged

    # ── what comes out ───────────────────────────────────────────────────────

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        weight, bias = self._rows()
        hidden = hidden.to(weight.dtype)
        if self._first_rows and not (self.training or torch.is_grad_enabled()):
            # The target's own layer may be laid out for the CPU's kernels.
            return self.readout.logits(hidden)[..., : len(weight)]
        return self.readout.cap(fast_linear(hidden, weight, bias))

    def work(self, shape: Shape) -> Work:
        return eagle1_work(self, shape)

    def counts(self, batch: Batch) -> Tensor:
        return scoring.taught_counts(self, batch, self.config.steps)

    def objective(self, batch: Batch) -> Objective:
        """One term per step, the weighted sum of both losses over the rows that are taught."""
        parts = scoring.Sums(self, batch)
        last = batch.last.flatten(0, 1).detach()  # a target to hit: it must not come to meet us
        weight, bias = self._rows()
        cap = self.readout.softcap
        for unrolled in self.unroll(batch, self.config.steps):
            step = parts.step(unrolled)
            live = step.live.nonzero().squeeze(1)
            step = scoring.StepRows(step.live[live], step.rows[live], step.taught[live])
            guess, truth = unrolled.hidden[live], last[step.rows]
            distance = F.smooth_l1_loss(guess.float(), truth.float(), reduction="none").mean(-1)
            teacher = partial(self._teacher, truth, unrolled.step)
            entropy, choice = linear_cross_entropy(
                guess, weight, bias, teacher, step.taught, softcap=cap
            )
            loss = (
                self.config.regression_weight * (distance * step.taught).sum()
                + self.config.classification_weight * entropy
            )
            parts.add_choice(step, loss, self.to_target(choice))
        return parts.objective()

    @torch.no_grad()
    def _teacher(self, truth: Tensor, step: int, start: int, stop: int) -> Tensor:
        """The target's distributions at some of its states `truth` [R, H] → [r, D]."""
        return self.logits(truth[start:stop], step).float().softmax(-1)

    # ── the target's lm_head over the draft vocabulary ───────────────────────

    def bind(self, readout: Readout) -> Self:
        self._output = None
        return super().bind(readout)

    def use_vocabulary(self, ids: Tensor) -> None:
        self._output = None
        super().use_vocabulary(ids)

    def _rows(self) -> tuple[Tensor, Tensor | None]:
        """weight [D, H] and bias [D]: views where the draft vocabulary is the first D tokens, else
        copied once and kept."""
        if self._output is None:
            with torch.inference_mode(False):  # what is made while drafting may serve training
                ids = self.draft_ids
                size = len(ids)
                self._first_rows = bool((ids == torch.arange(size, device=ids.device)).all())
                if self._first_rows:
                    weight, bias = self.readout.weight, self.readout.bias
                    self._output = weight[:size], None if bias is None else bias[:size]
                else:
                    self._output = self.readout.rows(ids)
        return self._output

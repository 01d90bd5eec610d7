"""EAGLE-3 (arXiv 2503.01840): decoder layers over fused target features, training-time test.

Row t reads g[t] = fc(a[t]) and the embedding of x[t+1]; steps and keys as in `recurrent.py`.

B batch, n rows, H hidden, A = auxiliary layers · H, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from spectrain.core.batch import Batch, Features
from spectrain.core.fast_linear import Linear
from spectrain.heads import eagle3_init, scoring, vocab
from spectrain.heads.base import HeadConfig, Needs, Objective, TargetFacts
from spectrain.heads.eagle_layer import (
    EagleConfig,
    EntryLayer,
    FurtherLayer,
    PairLayer,
    sizes_of,
)
from spectrain.heads.eagle_work import eagle3_work
from spectrain.heads.in_parts import total_in_parts
from spectrain.heads.layers import RMSNorm
from spectrain.heads.linear_loss import linear_cross_entropy, linear_row_loss
from spectrain.heads.losses import ROW_LOSSES, RowLoss
from spectrain.heads.noise import document_noise
from spectrain.heads.recurrent import RecurrentHead
from spectrain.heads.unrolled_loss import UnrolledLoss
from spectrain.heads.work import Shape, Work

AuxLayers = tuple[int, ...]


class Eagle3Options(BaseModel):
    """What a user may choose when a head is made (`head:` in a config, `--set head.steps=5`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: int = Field(7, ge=1, le=16, description="draft steps K unrolled in training")
    step_decay: float = Field(0.8, gt=0, le=1, description="weight of step k is step_decay**k")
    draft_vocab_size: int | None = Field(
        None, ge=1, description="tokens the head can guess; default: 32000, or all there are"
    )
    init: Literal["target", "random"] = Field(
        "target", description="start from the target's last layers, or at random"
    )
    train_lm_head: bool = Field(True, description="false keeps the target's rows as they are")
    aux_layers: AuxLayers | None = Field(
        None,
        min_length=1,
        description="decoder layers whose outputs are read, from 0; default 1, N/2-1, N-4",
    )
    layers: int = Field(1, ge=1, le=8, description="decoder layers of the head")
    embeddings: Literal["target", "own"] = Field(
        "target", description="the target's frozen embedding, or a copy of it that is trained"
    )
    loss: RowLoss = Field(
        "soft_ce",
        description="soft_ce, lk_alpha (-log acceptance), lk_lambda (KL that turns into TV), tv or "
        "reverse_kl",
    )
    feature_noise: float = Field(
        0.0,
        ge=0,
        description="uniform noise on the features in training, in parts of their own size",
    )


class Eagle3Config(EagleConfig):
    """The head's config.json."""

    family: Literal["eagle3"] = "eagle3"
    aux_layers: AuxLayers
    train_lm_head: bool
    layers: int = 1
    embeddings: Literal["target", "own"] = "target"
    loss: RowLoss = "soft_ce"
    feature_noise: float = 0.0


class Eagle3Head(RecurrentHead):
    """Decoder layers with their own lm_head over the draft vocabulary."""

    family: ClassVar[str] = "eagle3"
    Config: ClassVar[type[HeadConfig]] = Eagle3Config
    Options: ClassVar[type[BaseModel]] = Eagle3Options
    reads_aux: ClassVar[bool] = True
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.fc = Linear(len(config.aux_layers) * config.target.hidden_size, hidden, bias=False)
        self.midlayer = PairLayer(config)
        # By their numbers, so that a head of one layer has no other names than the engines know.
        further = {str(i): FurtherLayer(config) for i in range(1, config.layers)}
        self.layers = nn.ModuleDict(further)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = Linear(hidden, config.draft_vocab_size, bias=False)
        self.lm_head.requires_grad_(config.train_lm_head)
        if config.embeddings == "own":
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)

    @classmethod
    def create(cls, options: Eagle3Options, target: Any, token_counts: Tensor) -> Eagle3Head:
        config = cls.configure(options, target)
        ids = vocab.choose(config.draft_vocab_size, target, token_counts)
        head = cls(config)
        head.use_vocabulary(ids)
        eagle3_init.initialise(head, target, ids, from_layer=options.init == "target")
        return head.to(target.device).bind(target.readout)

    @classmethod
    def configure(cls, options: Eagle3Options, target: Any) -> Eagle3Config:
        return Eagle3Config(
            **options.model_dump(exclude={"init", "draft_vocab_size", "aux_layers"}),
            **sizes_of(target),
            vocab_size=target.vocab_size,
            draft_vocab_size=vocab.size_of(
                options.draft_vocab_size or min(vocab.DEFAULT_SIZE, target.readout.usable), target
            ),
            aux_layers=eagle3_init.aux_layers(options.aux_layers, target),
            target=TargetFacts.of(target),
        )

    @property
    def needs(self) -> Needs:
        return Needs(aux_layers=self.config.aux_layers)

    @property
    def stack(self) -> list[EntryLayer]:
        return [self.midlayer, *self.layers.values()]

    def read(self, features: Features) -> Tensor:
        return self.fc(features.aux.to(self.dtype))

    def disturb(self, features: Features, batch: Batch) -> Features:
        if not self.config.feature_noise:
            return features
        # The layers' outputs differ in size, so each gets noise of its own.
        parts = features.aux.unflatten(-1, (len(self.config.aux_layers), -1))
        size = parts.pow(2).mean(-1, keepdim=True).sqrt() * self.config.feature_noise
        noise = document_noise(batch, features.aux).view_as(parts) * size
        return Features(features.last, (parts + noise).flatten(-2))

    def enter(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, self.midlayer.merge(embedding, hidden)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids) if self.config.embeddings == "own" else super().embed(ids)

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def work(self, shape: Shape) -> Work:
        return eagle3_work(self, shape)

    def counts(self, batch: Batch) -> Tensor:
        return scoring.taught_counts(self, batch, self.config.steps)

    def objective(self, batch: Batch) -> Objective:
        teacher = scoring.Teacher.of(self, batch)
        parts = scoring.Sums(self, batch)
        for unrolled in self.unroll(batch, self.config.steps):
            step = parts.step(unrolled)
            parts.add_choice(step, *self._loss(unrolled.hidden, teacher, step))
        return parts.objective()

    def forward(self, batch: Batch, scale: Tensor | None = None) -> Objective:
        if scale is None or not torch.is_grad_enabled():
            return super().forward(batch, scale)
        loss = UnrolledLoss(self, batch, scale, self.lm_head.weight, self.config.loss)
        total = total_in_parts(self, self.prefix(batch), batch.tokens, loss, self.norm)
        return loss.objective(total)

    def _loss(
        self, hidden: Tensor, teacher: scoring.Teacher, step: scoring.StepRows
    ) -> tuple[Tensor, Tensor]:
        """The loss summed over the taught rows, and the first choices [R]."""
        rows = self.norm(hidden), self.lm_head.weight
        taught, loss = teacher.of_rows(step.rows), self.config.loss
        if loss == "soft_ce":  # the quickest: its gradient is written down
            total, choice = linear_cross_entropy(*rows, None, taught, step.taught)
        else:
            total, choice = linear_row_loss(*rows, taught, step.taught, ROW_LOSSES[loss])
        return total, self.to_target(choice)

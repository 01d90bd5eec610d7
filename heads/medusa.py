"""Medusa (arXiv 2401.10774): K independent heads on the target's last state.

Head k reads f[t] alone, whatever has been drafted since, and guesses x[t+2+k]::

    head k    x ← x + SiLU(W x + b), L times; then a linear layer over the draft vocabulary
    start     W = b = 0 and the linear layer a copy of lm_head: every head says what the target says

Trained on a frozen target this is Medusa-1; together with the target (trainer/trunk.py), Medusa-2.

B batch, T length, n rows, m nodes, R anchors, K heads, L layers, H hidden, V vocabulary, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from spectrain.core.batch import Batch, Features, counted
from spectrain.core.fast_linear import Linear
from spectrain.heads import scoring, vocab
from spectrain.heads.base import DraftHead, HeadConfig, Objective, TargetFacts, Unrolled
from spectrain.heads.linear_loss import linear_cross_entropy
from spectrain.heads.loss_work import row_loss_work
from spectrain.heads.work import Product, Shape, Work


class MedusaOptions(BaseModel):
    """What a user may choose when a head is made (`head:` in a config, `--set head.steps=3`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: int = Field(5, ge=1, le=16, description="heads K, one for each draft position")
    layers: int = Field(1, ge=0, le=8, description="residual blocks L of each head")
    step_decay: float = Field(0.8, gt=0, le=1, description="weight of head k is step_decay**k")
    draft_vocab_size: int | None = Field(
        None, ge=1, description="tokens the heads can guess; default: all of the target's"
    )
    loss: Literal["ce", "soft"] = Field(
        "ce", description="taught by the text (ce, as published) or the target's distribution"
    )


class MedusaConfig(HeadConfig):
    """The head's config.json."""

    family: Literal["medusa"] = "medusa"
    hidden_size: int
    layers: int
    output_bias: bool
    step_decay: float
    loss: Literal["ce", "soft"]


class ResBlock(nn.Module):
    """x + SiLU(W x + b), the identity at the start."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


@dataclass
class MedusaState:
    """Drafting state: the last verified state [B, H], and how deep the draft is."""

    last: Tensor | None = None
    level: int = 0


class MedusaHead(DraftHead):
    """K heads; `heads.{k}.{l}` are the blocks of head k, `heads.{k}.{L}` its output layer."""

    family: ClassVar[str] = "medusa"
    Config: ClassVar[type[HeadConfig]] = MedusaConfig
    Options: ClassVar[type[BaseModel]] = MedusaOptions
    joint_weight: ClassVar[float] = 0.2  # λ0 of Medusa-2: the heads' weight beside the target's
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        hidden, size = config.hidden_size, config.draft_vocab_size
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(ResBlock(hidden) for _ in range(config.layers)),
                Linear(hidden, size, bias=config.output_bias),
            )
            for _ in range(config.steps)
        )
        # The type that the head computes in; its layers lose their weights when they are packed.
        self.register_buffer("_like", torch.empty(0), persistent=False)

    # ── making one ───────────────────────────────────────────────────────────

    @classmethod
    def create(cls, options: MedusaOptions, target: Any, token_counts: Tensor) -> MedusaHead:
        readout, config = target.readout, cls.configure(options, target)
        ids = vocab.choose(config.draft_vocab_size, target, token_counts)
        weight, bias = readout.rows(ids.to(readout.weight.device))
        head = cls(config)
        head.use_vocabulary(ids)
        with torch.no_grad():
            for own in head.heads:
                own[-1].weight.copy_(weight)
                if bias is not None:
                    own[-1].bias.copy_(bias)
        return head.to(target.device).bind(readout)

    @classmethod
    def configure(cls, options: MedusaOptions, target: Any) -> MedusaConfig:
        readout = target.readout
        return MedusaConfig(
            steps=options.steps,
            layers=options.layers,
            step_decay=options.step_decay,
            loss=options.loss,
            vocab_size=readout.vocab_size,
            draft_vocab_size=vocab.size_of(options.draft_vocab_size, target),
            hidden_size=target.hidden_size,
            output_bias=readout.bias is not None,
            target=TargetFacts.of(target),
        )

    # ── training face ────────────────────────────────────────────────────────

    def unroll(self, batch: Batch, steps: int) -> Iterator[Unrolled]:
        anchors = counted(batch.reply, 0).flatten().nonzero().squeeze(1)
        for step in range(steps):
            yield Unrolled(step, self._blocks(_rows(batch, anchors), step), anchors)

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        return self.readout.cap(self.heads[step][-1](hidden))

    def work(self, shape: Shape) -> Work:
        """Head k works on its own anchors; nothing of one is used by another."""
        config = self.config
        hidden, size, soft = config.hidden_size, config.draft_vocab_size, config.loss == "soft"
        result = Work()
        for step in range(config.steps):
            rows = shape.anchors(step)
            # The first block that learns has no one to hand a gradient to.
            passes = [3 if shape.live or block else 2 for block in range(config.layers)]
            enters = shape.live or config.layers > 0
            result += Work(
                tuple(Product("blocks", rows, hidden, hidden, one) for one in passes),
                numbers=rows * hidden * (4 + 14 * config.layers),
                kept=rows * hidden * (enters + 2 * config.layers),
            )
            result += row_loss_work(
                shape, [rows], hidden, size, learns=True, soft=soft, enters=enters
            )
        if soft:
            rows = shape.anchors(0)
            teacher = Product("teacher", rows, config.target.hidden_size, size, 1)
            whole = rows * size
            result += Work((teacher,), scored=6 * whole, kept=whole)
            # Before anything else it is made: logits, their softmax and a copy with one row more.
            first = 3 * whole - result.kept - result.early - result.laid
            result = replace(result, moment=max(result.moment, first))
        return result

    def counts(self, batch: Batch) -> Tensor:
        return scoring.taught_counts(self, batch, self.config.steps, self._labels(batch))

    def objective(self, batch: Batch) -> Objective:
        labels = self._labels(batch)
        teacher = scoring.Teacher.of(self, batch) if labels is None else None
        parts = scoring.Sums(self, batch, labels)
        for step in range(self.config.steps):
            # Each head on the rows that count for it.
            anchors = counted(batch.reply, step).flatten().nonzero().squeeze(1)
            rows = parts.step(Unrolled(step, anchors, anchors))
            if teacher is None:
                label = torch.where(rows.taught, labels.flatten()[rows.rows], self.draft_ids[0])
                taught = self.to_draft(label)
            else:
                taught = teacher.of_rows(rows.rows)
            output = self.heads[step][-1]
            loss, choice = linear_cross_entropy(
                self._blocks(_rows(batch, anchors), step),
                output.weight,
                output.bias,
                taught,
                rows.taught,
                softcap=self.readout.softcap,
            )
            parts.add_choice(rows, loss, self.to_target(choice))
        return parts.objective()

    def weights(self, progress: float) -> list[float]:
        return [self.config.step_decay**k for k in range(self.config.steps)]

    def _labels(self, batch: Batch) -> Tensor | None:
        """What teacher rows are taught: the text, or (None) the target's distribution there."""
        return scoring.next_tokens(batch) if self.config.loss == "ce" else None

    def _blocks(self, last: Tensor, step: int) -> Tensor:
        """[..., H] → [..., H], all of head `step` but its output layer."""
        hidden = last.to(self._like.dtype)
        for block in self.heads[step][:-1]:
            hidden = block(hidden)
        return hidden

    # ── drafting face ────────────────────────────────────────────────────────

    def start(self, rows: int, slots: int) -> MedusaState:
        return MedusaState()

    def extend(
        self,
        state: MedusaState,
        tokens: Tensor,
        features: Features,
        counts: Tensor,
        view: int = 0,
    ) -> Tensor:
        rows = torch.arange(len(counts), device=counts.device)
        state.last, state.level = features.last[rows, (counts - 1).clamp(min=0)], 0
        return self.logits(self._blocks(state.last, 0), 0)

    def adopt(
        self, state: MedusaState, rows: Tensor, other: MedusaState, chosen: Tensor | None = None
    ) -> None:
        """Nothing: `extend` needs the new features alone."""

    def expand(self, state: MedusaState, tokens: Tensor, parents: Tensor) -> Tensor:
        state.level += 1
        assert state.level < self.config.steps, "a draft is no deeper than there are heads"
        logits = self.logits(self._blocks(state.last, state.level), state.level)
        return logits[:, None].expand(-1, tokens.shape[1], -1)


def _rows(batch: Batch, anchors: Tensor) -> Tensor:
    """The target's states at the anchors: [R, H]."""
    return batch.last.flatten(0, 1)[anchors]

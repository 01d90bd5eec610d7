"""What both kinds of multi-token prediction share: the target's output layer and the objective.

R rows, H hidden, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from spectrain.core.batch import Batch
from spectrain.core.readout import Readout
from spectrain.heads import scoring, vocab
from spectrain.heads.base import DraftHead, HeadConfig, Objective, TargetFacts
from spectrain.heads.linear_loss import linear_cross_entropy
from spectrain.heads.loss_work import row_loss_work
from spectrain.heads.mtp_module import LayerKind
from spectrain.heads.work import NORM, Shape, Work


class MtpOptions(BaseModel):
    """What a user may choose for either kind."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: int = Field(3, ge=1, le=16, description="draft steps K the head is trained for")
    draft_vocab_size: int | None = Field(
        None, ge=1, description="tokens the head can guess; default: all there are"
    )
    init: Literal["target", "random"] = Field(
        "target", description="start from the target's last layer, or at random"
    )
    loss: Literal["ce", "soft"] = Field(
        "ce", description="taught the text itself (ce) or the target's distribution (soft)"
    )


class MtpConfig(HeadConfig):
    """The fields of config.json that both kinds have."""

    layer: LayerKind
    loss: Literal["ce", "soft"]


class MtpHead(DraftHead):
    """A head that guesses with the target's own output layer."""

    reads_last_everywhere: ClassVar[bool] = True
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        self._rows: tuple[Tensor, Tensor | None] | None = None
        self._first: bool | None = None

    @staticmethod
    def sizes(size: int | None, target: Any) -> dict[str, Any]:
        """What both kinds take over from a core.target.Target. Draft vocabulary: by default
        everything the target can say, for the output layer is there anyway."""
        return {
            "vocab_size": target.readout.vocab_size,
            "draft_vocab_size": vocab.size_of(size, target),
            "layer": LayerKind.of(target.config),
            "target": TargetFacts.of(target),
        }

    @abstractmethod
    def norm_of(self, step: int) -> nn.Module:
        """The norm before the output layer at a step."""

    # ── the target's output layer ────────────────────────────────────────────

    def bind(self, readout: Readout) -> MtpHead:
        self._rows = self._first = None
        super().bind(readout)
        return self

    @property
    def leading(self) -> bool:
        """Whether the draft vocabulary is the target's first D tokens (all of them, say): then the
        target's own output layer serves, and no row of it is copied."""
        if self._first is None:
            self._first = int(self.draft_ids[-1]) == self.config.draft_vocab_size - 1
        return self._first

    @property
    def rows(self) -> tuple[Tensor, Tensor | None]:
        """The target's output rows of the draft vocabulary: weight [D, H], bias [D] or None."""
        if self._rows is None:
            readout, count = self.readout, self.config.draft_vocab_size
            if self.leading:
                bias = None if readout.bias is None else readout.bias[:count]
                self._rows = readout.weight[:count], bias
            else:
                self._rows = readout.rows(self.draft_ids.to(readout.weight.device))
        return self._rows

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        normed = self.norm_of(step)(hidden).to(self.readout.weight.dtype)
        if self.leading:  # also where the target's layer is packed for the CPU
            return self.readout.logits(normed)[..., : self.config.draft_vocab_size]
        return self.readout.cap(F.linear(normed, *self.rows))

    # ── training ─────────────────────────────────────────────────────────────

    def _labels(self, batch: Batch) -> Tensor | None:
        return scoring.next_tokens(batch) if self.config.loss == "ce" else None

    def loss_work(self, shape: Shape) -> Work:
        """Of all steps: the norm before the output layer, that layer, which learns where its
        target does, and its teacher."""
        config = self.config
        each = [shape.anchors(step) for step in range(config.steps)]
        rows = sum(each)
        hidden, size = config.target.hidden_size, config.draft_vocab_size
        soft, learns = config.loss == "soft", self.readout.weight.requires_grad
        loss = row_loss_work(shape, each, hidden, size, learns=learns, soft=soft)
        teacher = replace(loss.products[0], part="teacher", passes=1)
        return loss + Work(
            (teacher,) if soft else (), numbers=rows * hidden * (NORM + 12), kept=rows * hidden * 3
        )

    def counts(self, batch: Batch) -> Tensor:
        return scoring.taught_counts(self, batch, self.config.steps, self._labels(batch))

    def objective(self, batch: Batch) -> Objective:
        labels = self._labels(batch)
        parts = scoring.Sums(self, batch, labels)
        weight, bias = self.rows
        for unrolled in self.unroll(batch, self.config.steps):
            step = parts.step(unrolled)
            # Anchors that no longer count at this step cost nothing.
            live = step.live.nonzero().squeeze(1)
            hidden = self.norm_of(unrolled.step)(unrolled.hidden[live])
            taught = self._taught(batch, labels, step.rows[live])
            loss, first = linear_cross_entropy(
                hidden, weight, bias, taught, step.taught[live], softcap=self.readout.softcap
            )
            choice = torch.full_like(step.rows, -2)
            choice[live] = self.to_target(first)
            parts.add_choice(step, loss, choice)
        return parts.objective()

    def _taught(self, batch: Batch, labels: Tensor | None, rows: Tensor):
        """What flat teacher rows [R] teach, asked for a range at a time."""
        if labels is not None:
            ids = labels.flatten()[rows]
            guessable = self.guessable(ids)
            ids = torch.where(guessable, self.to_draft(ids.clamp(min=0)), 0)
            return lambda start, stop: ids[start:stop]
        weight, bias = self.rows
        last = batch.last.flatten(0, 1)

        def distribution(start: int, stop: int) -> Tensor:
            logits = F.linear(last[rows[start:stop]].to(weight.dtype), weight, bias)
            return self.readout.cap(logits).float().softmax(-1)

        return distribution

"""Which rows of a batch a step of the training face is scored on, and by which teacher.

At anchor t and step k the teacher row is u = t+1+k: the target's own distribution for x[t+2+k].

B batch, T length, R anchors, U teacher rows, K steps, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.core.batch import Batch, counted
from spectrain.core.fast_linear import fast_linear

if TYPE_CHECKING:
    from spectrain.heads.base import DraftHead, Objective, Unrolled


@dataclass(frozen=True)
class StepRows:
    """The anchors of one step, [R] each.

    live: the anchor counts at this step · rows: flat index of its teacher row (any valid one where
    it does not count) · taught: it counts and the head can guess what it is taught there
    """

    live: Tensor
    rows: Tensor
    taught: Tensor


def next_tokens(batch: Batch) -> Tensor:
    """Labels of heads that are taught the text itself: x[t+1] at row t, −1 at the last: [B, T]."""
    end = torch.full_like(batch.tokens[:, :1], -1)
    return torch.cat([batch.tokens[:, 1:], end], dim=1)


def taught_counts(
    head: DraftHead, batch: Batch, steps: int, labels: Tensor | None = None
) -> Tensor:
    """[K] rows that the loss of each step is a sum over: known without a forward.

    labels [B, T]: what teacher row u is taught, by default the target's argmax there.
    """
    guessable = head.guessable(batch.deciding if labels is None else labels)
    result = []
    for step in range(steps):
        live = counted(batch.reply, step)[:, : -1 - step]
        result.append((live & guessable[:, 1 + step :]).sum())
    return torch.stack(result)


class Sums:
    """Gathers the sums of an objective, step by step; labels as in `taught_counts`."""

    def __init__(self, head: DraftHead, batch: Batch, labels: Tensor | None = None) -> None:
        self.head, self.batch = head, batch
        self._guessable = head.guessable(batch.deciding if labels is None else labels).flatten()
        self._parts: list[tuple[Tensor, ...]] = []

    def step(self, unrolled: Unrolled) -> StepRows:
        anchors, step = unrolled.anchors, unrolled.step
        live = counted(self.batch.reply, step).flatten()[anchors]
        rows = (anchors + 1 + step).clamp(max=self.batch.tokens.numel() - 1)
        return StepRows(live, rows, live & self._guessable[rows])

    def add(self, step: StepRows, row_loss: Tensor, logits: Tensor) -> None:
        """row_loss [R] (rows that are not taught are left out), logits [R, D] of the same rows."""
        choice = self.head.to_target(logits.detach().argmax(-1))
        self.add_choice(step, (row_loss * step.taught).sum(), choice)

    def add_choice(self, step: StepRows, loss: Tensor, choice: Tensor) -> None:
        """loss: the sum over taught rows · choice [R]: the head's first choices, as target ids."""
        argmax = self.batch.argmax.flatten()[step.rows]
        hits = (step.live & (choice == argmax)).sum()
        self._parts.append((loss, step.taught.sum(), hits, step.live.sum()))

    def objective(self) -> Objective:
        from spectrain.heads.base import Objective

        return Objective(*(torch.stack(part) for part in zip(*self._parts, strict=True)))


class Teacher:
    """Target distributions over the draft vocabulary, computed once for all steps of a batch.

    probabilities [U + 1, D] renormalised over D; the last row of zeros stands for positions that
    have no teacher. lookup [B·T] → row.
    """

    def __init__(self, probabilities: Tensor, lookup: Tensor) -> None:
        self.probabilities, self._lookup = probabilities, lookup

    @classmethod
    @torch.no_grad()
    def of(cls, head: DraftHead, batch: Batch) -> Teacher:
        reply = batch.reply
        inside = torch.zeros_like(reply, dtype=torch.bool)
        inside[:, :-1] = (reply[:, :-1] > 0) & (reply[:, 1:] == reply[:, :-1])
        rows = inside.flatten().nonzero().squeeze(1)
        weight, bias = head.readout.rows(head.draft_ids)
        last = batch.last.flatten(0, 1)[rows].to(weight.dtype)
        logits = head.readout.cap(fast_linear(last, weight, bias))
        teacher = logits.float().softmax(-1)
        teacher = torch.cat([teacher, teacher.new_zeros(1, teacher.shape[1])])
        lookup = rows.new_full((reply.numel(),), len(rows))
        lookup[rows] = torch.arange(len(rows), device=rows.device)
        return cls(teacher, lookup)

    def of_rows(self, rows: Tensor) -> Callable[[int, int], Tensor]:
        """`at`, for losses that take a range of the rows at a time."""
        return lambda start, stop: self.at(rows[start:stop])

    def at(self, rows: Tensor) -> Tensor:
        """Flat teacher rows [R] → distributions [R, D]."""
        return self.probabilities[self._lookup[rows]]

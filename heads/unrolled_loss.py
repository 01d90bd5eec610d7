"""The loss of all steps of an unrolled head over its own output layer, and its gradient.

The teacher row u serves step k of anchor u−1−k. So all steps of some anchors are taken together:
the teacher of these is made once and dropped, and so are the logits. What is left is a gradient as
large as the states, and one as large as the output layer, of all steps together.

B batch, T length, C anchors given at once, c anchors of a chunk, U teacher rows of these, K steps,
H hidden, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.core.batch import Batch, counted, predicting
from spectrain.core.fast_linear import Weight, fast_product
from spectrain.heads import kernels
from spectrain.heads.base import DraftHead, Objective
from spectrain.heads.linear_loss import product_type
from spectrain.heads.losses import ROW_LOSSES, RowLoss
from spectrain.heads.ttt_attention import Anchors

# Logits of one chunk, in numbers, and the rows below which products are slow.
CPU_CHUNK, GPU_CHUNK, FEWEST = 1 << 22, 1 << 26, 256

COLUMNS = 1 << 13  # of the output layer, whose gradient is added up at a time

# Losses [K, C] (0 where nothing is taught), first choices [K, C], gradients of logits [K·C, D].
Parts = tuple[Tensor, Tensor, Tensor]


class UnrolledLoss:
    """Sums over the anchors that were added so far.

    scale [K] what each step is weighed by · weight [D, H] the output layer · to_weight [D, H] the
    gradient of `total` there, None where it does not learn.
    """

    def __init__(
        self,
        head: DraftHead,
        batch: Batch,
        scale: Tensor,
        weight: Tensor,
        row_loss: RowLoss,
        chunk: int | None = None,
    ) -> None:
        self.head, self.batch, self.scale, self.weight = head, batch, scale, weight
        self.row_loss = row_loss
        steps, device = len(scale), batch.tokens.device
        self._guessable = head.guessable(batch.deciding).flatten()
        live = [counted(batch.reply, step).flatten() for step in range(steps)]
        self._live = torch.stack(live)  # [K, B·T]
        self._argmax, self._last = batch.argmax.flatten(), batch.last.detach().flatten(0, 1)
        self._teaches = predicting(batch.reply).flatten()
        readout = head.readout
        whole = readout.weight, readout.bias
        self._teacher = readout.rows(head.draft_ids) if head.reduced else whole
        self.exact = torch.promote_types(weight.dtype, torch.float32)
        self._output = Weight(weight.detach().to(product_type(weight)))
        self.to_weight = None
        if weight.requires_grad:
            self.to_weight = torch.zeros_like(weight, dtype=self.exact)
        self.loss = torch.zeros(steps, dtype=self.exact, device=device)
        self.count, self.hits, self.seen = torch.zeros(
            3, steps, dtype=torch.int64, device=device
        ).unbind()
        if chunk is None:
            numbers = CPU_CHUNK if device.type == "cpu" else GPU_CHUNK
            chunk = max(FEWEST, numbers // len(weight)) // steps
        self._chunk = max(1, chunk)

    @property
    def total(self) -> Tensor:
        return (self.scale * self.loss).sum()

    def objective(self, total: Tensor) -> Objective:
        return Objective(self.loss, self.count, self.hits, self.seen, total)

    @torch.no_grad()
    def add(self, anchors: Anchors, states: Tensor) -> Tensor:
        """states [K, C, H] → the gradient of `total` there."""
        parts = zip(anchors.split(self._chunk), states.split(self._chunk, dim=1), strict=True)
        return torch.cat([self._add(*part) for part in parts], dim=1)

    def _add(self, anchors: Anchors, states: Tensor) -> Tensor:
        rows, place = anchors.following(len(states))
        # Behind the last place of the batch there is nothing: no anchor counts there.
        rows = rows.clamp(max=len(self._last) - 1)
        live = self._live[:, anchors.flat]
        taught = live & self._guessable[rows][place]
        # A row that is not taught may hold anything, infinities included; now it holds zeros.
        low = states.masked_fill(~taught[..., None], 0).flatten(0, 1).to(self._output.value.dtype)
        by_kernel = self.row_loss == "soft_ce" and kernels.usable(low)
        way = self._by_kernel if by_kernel else self._by_torch
        losses, choices, slope = way(low, rows, place, taught)
        self.loss += losses.sum(1)
        hits = live & (self.head.to_target(choices) == self._argmax[rows][place])
        self.hits += hits.sum(1)
        self.count += taught.sum(1)
        self.seen += live.sum(1)
        slope = slope.to(low.dtype)
        scale = (self.scale.to(self.exact)[:, None] * taught).view(-1, 1)
        if self.to_weight is not None:
            turned = (low * scale).to(low.dtype).t()
            for start in range(0, len(self.to_weight), COLUMNS):  # one product is as large as all
                part = slice(start, start + COLUMNS)
                self.to_weight[part] += fast_product(slope[:, part].t(), turned)
        above = self._output.back(slope) * scale
        return above.to(states.dtype).view_as(states)

    def _by_torch(self, low: Tensor, rows: Tensor, place: Tensor, taught: Tensor) -> Parts:
        """low [K·C, H]; rows [U]; place, taught [K, C]."""
        teacher = self._teacher_logits(rows).to(self.exact).softmax(-1)
        logits = self._output.times(low).to(self.exact).unflatten(0, place.shape)
        losses = torch.empty_like(logits[..., 0])
        choices = torch.empty_like(place)
        for step, at in enumerate(place):
            losses[step], choices[step] = self._row(logits[step], teacher[_neighbours(at)])
        return losses.masked_fill_(~taught, 0), choices, logits.flatten(0, 1)

    def _by_kernel(self, low: Tensor, rows: Tensor, place: Tensor, taught: Tensor) -> Parts:
        """The same; nothing is as large as the logits but these."""
        teacher, logits = self._teacher_logits(rows), self._output.times(low)
        norm, rest = kernels.log_norm(teacher), (place.flatten(), taught.flatten())
        losses, choices = kernels.soft_cross_entropy_(logits, teacher, norm, *rest)
        return losses.view_as(place), choices.view_as(place), logits

    def _teacher_logits(self, rows: Tensor) -> Tensor:
        """The target's logits over the draft vocabulary at flat rows [U]: [U, D]. Rows that teach
        nothing may hold anything, too."""
        weight, bias = self._teacher
        last = self._last[rows].masked_fill_(~self._teaches[rows][:, None], 0)
        logits = fast_product(last.to(weight.dtype), weight)
        if bias is not None:
            logits += bias
        return self.head.readout.cap(logits)

    def _row(self, logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and teacher [c, D] → losses and first choices [c]; the logits become their
        gradient."""
        top, choice = logits.max(-1)
        if self.row_loss != "soft_ce":
            with torch.enable_grad():
                leaf = logits.detach().clone().requires_grad_()
                loss = ROW_LOSSES[self.row_loss](leaf, teacher)
                logits.copy_(torch.autograd.grad(loss.sum(), leaf)[0])
            return loss.detach(), choice
        cross = (teacher * logits).sum(-1)  # no product of matrices: autocast would round it
        torch.softmax(logits, -1, out=logits)
        norm = top - logits.gather(1, choice[:, None]).squeeze(1).log()
        logits.sub_(teacher)
        return norm - cross, choice


def _neighbours(place: Tensor) -> slice | Tensor:
    """place [C], ascending: as a slice where one follows the other and the host can see it."""
    if place.device.type != "cpu" or not len(place):
        return place
    first, stop = int(place[0]), int(place[-1]) + 1
    return slice(first, stop) if stop - first == len(place) else place

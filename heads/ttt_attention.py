"""Attention of training-time test: step-0 keys causally, plus a row's own keys of later steps.

At step k the row of anchor t sees the step-0 keys of positions ≤ t and its own keys of steps 1…k,
nothing of other rows' later steps: just what it will see when it drafts. Only anchors ask; prompt
rows are needed for their step-0 key and value alone.

Anchors are taken a chunk at a time, and a chunk looks only at the keys from the start of its first
document up to its last place. Scores live for one chunk: the backward pass makes them anew from the
queries and each row's log-sum-exp over all it sees, as in FlashAttention-2 (arXiv 2307.08691).

B batch, T length, R anchors, r anchors of a chunk, n keys of a chunk, Q query heads, G kv heads,
S = Q/G, d head size, k own keys, m = r·S rows that share a kv head. […] is a group at a time where
the kind of product works on single matrices, all of them else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectrain.core.fast_linear import fast_product, suits

# Scores of one chunk, in numbers: what a CPU's cache holds; a GPU wants large products.
CPU_CHUNK, GPU_CHUNK = 1 << 22, 1 << 26
# Below this products are too small, however long a row is.
FEWEST = 16


@dataclass
class Anchors:
    """Where the anchors of a batch are, in order."""

    flat: Tensor  # [R] b·T + t
    position: Tensor  # [R] t, counted from the start of its document
    length: int  # T
    _where: Tensor  # [R, 3] batch row, place t in it, start of the document; on the CPU
    _seen: Tensor  # [R, 2] place and start again, on the device

    @classmethod
    def of(cls, chosen: Tensor, starts: Tensor | None = None) -> Anchors:
        """chosen [B, T] bool → the anchors, in order; starts [B, T] of documents as in Batch."""
        length = chosen.shape[1]
        row, place = chosen.nonzero(as_tuple=True)
        start = torch.zeros_like(place) if starts is None else starts[row, place]
        where = torch.stack([row, place, start], dim=1)
        # The one wait for the device: what a chunk may look at has to be known on the host.
        return cls(row * length + place, place - start, length, where.cpu(), where[:, 1:])

    def __len__(self) -> int:
        return len(self.flat)

    def split(self, size: int) -> list[Anchors]:
        """`size` anchors each, the last ones fewer; none at all are one part, too."""
        lists = (self.flat, self.position, self._where, self._seen)
        parts = zip(*(values.split(size) for values in lists), strict=True)
        return [Anchors(flat, place, self.length, *rest) for flat, place, *rest in parts]

    def following(self, steps: int) -> tuple[Tensor, Tensor]:
        """The rows behind the anchors, b·T + t + 1 + k for k < steps, each of them once [U], and
        where among these each is [steps, R]; worked out on the host."""
        flat = self._where[:, 0] * self.length + self._where[:, 1]
        rows, place = (flat + 1 + torch.arange(steps)[:, None]).unique(return_inverse=True)
        device = self.flat.device
        return rows.to(device, non_blocking=True), place.to(device, non_blocking=True)

    def chunks(self, size: int) -> Iterator[Chunk]:
        """At most `size` anchors of one batch row each, which cover all anchors in order."""
        begin = 0
        for count in self._where[:, 0].unique_consecutive(return_counts=True)[1].tolist():
            for first in range(begin, begin + count, size):
                stop = min(first + size, begin + count)
                row, place, start = self._where[first].tolist()
                _, last, latest = self._where[stop - 1].tolist()
                seen = self._seen[first:stop]
                one = None if latest == start else seen[:, 1]
                yield Chunk(slice(first, stop), row, start, place + 1, last + 1, seen[:, 0], one)
            begin += count


@dataclass
class Chunk:
    """Some anchors of one batch row and the step-0 keys [begin, end) that any of them sees."""

    rows: slice  # among the anchors
    row: int  # of the batch
    begin: int
    common: int  # keys [begin, common) come before the place of every anchor
    end: int
    place: Tensor  # [r]
    start: Tensor | None  # [r] of their documents; None: all begin at `begin`

    def keys(self, values: Tensor) -> Tensor:
        """[B, T, G, d] → [G, n, d]"""
        return values[self.row, self.begin : self.end].transpose(0, 1)

    def hide(self, scores: Tensor) -> None:
        """Put −inf where an anchor must not look: scores […, m, n], in place."""
        share = scores.shape[-2] // len(self.place)
        first = self.begin if self.start is not None else self.common
        column = torch.arange(first, self.end, device=scores.device)
        hidden = column > self.place[:, None]
        if self.start is not None:
            hidden |= column < self.start[:, None]
        part = scores[..., first - self.begin :].unflatten(-2, (-1, share))
        part.masked_fill_(hidden[:, None], float("-inf"))


def ttt_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
    anchors: Anchors,
    scale: float,
    *,
    chunk: int | None = None,
) -> Tensor:
    """query [R, Q, d]; keys, values [B, T, G, d] of step 0; own_* k times [R, G, d] → [R, Q·d].

    Products are taken in the values' type, sums in float32 at least. chunk: anchors at a time.
    """
    kind = values.dtype
    heads, groups = query.shape[1], keys.shape[2]
    if chunk is None:
        numbers = CPU_CHUNK if query.device.type == "cpu" else GPU_CHUNK
        chunk = max(FEWEST, numbers // (heads * max(1, anchors.length)))
    query = query.to(kind).unflatten(1, (groups, heads // groups))
    own = (part.to(kind) for part in (*own_keys, *own_values))
    out = _Attention.apply(anchors, chunk, scale, query, keys.to(kind), values, *own)
    return out.flatten(1)


class _Attention(torch.autograd.Function):
    """query [R, G, S, d] → [R, G, S, d]"""

    @staticmethod
    def forward(
        ctx,
        anchors: Anchors,
        chunk: int,
        scale: float,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *own: Tensor,
    ) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty_like(query, dtype=exact)
        norm = torch.empty(query.shape[:3], dtype=exact, device=query.device)  # log-sum-exp
        for part in anchors.chunks(chunk):
            asked, key, value = _fold(part, query) * scale, part.keys(keys), part.keys(values)
            for g in _groups(query):
                scores = fast_product(asked[g], key[g]).to(exact)
                part.hide(scores)
                top = scores.amax(-1, keepdim=True)  # finite: every anchor sees itself
                weights = scores.sub_(top).exp_()
                total = weights.sum(-1, keepdim=True)
                mixed = fast_product(weights.to(values.dtype), value[g].mT).to(exact) / total
                _put(out, part, g, mixed)
                _put(norm[..., None], part, g, top + total.log())
        if own:
            own_keys, own_values = _stacked(own)
            scores = torch.einsum("rgsd,rkgd->rgsk", query, own_keys).to(exact) * scale
            prefix, norm = norm, torch.cat([scores, norm[..., None]], dim=-1).logsumexp(-1)
            weights = (scores - norm[..., None]).exp_().to(values.dtype)
            out.mul_((prefix - norm).exp_()[..., None])
            out += torch.einsum("rgsk,rkgd->rgsd", weights, own_values)
        out = out.to(values.dtype)
        ctx.save_for_backward(query, keys, values, out, norm, *own)
        ctx.how = anchors, chunk, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With P = exp(scores − norm) and Δ = Σ grad · out: dV = Pᵀ grad, dS = P (grad Vᵀ − Δ)."""
        query, keys, values, out, norm, *own = ctx.saved_tensors
        anchors, chunk, scale = ctx.how
        kind, exact = values.dtype, norm.dtype
        mean = (grad.to(exact) * out).sum(-1)  # Δ [R, G, S]
        to_query = torch.empty_like(query)
        to_keys = torch.zeros_like(keys, dtype=exact)
        to_values = torch.zeros_like(values, dtype=exact)
        for part in anchors.chunks(chunk):
            asked, key, value = _fold(part, query) * scale, part.keys(keys), part.keys(values)
            above, deltas = _fold(part, grad), _fold(part, mean[..., None]).mT
            norms = _fold(part, norm[..., None]).mT
            for g in _groups(query):  # scores the other way round, […, n, m]: nothing is turned
                weights = fast_product(key[g], asked[g]).to(exact)
                part.hide(weights.mT)
                weights.sub_(norms[g]).exp_()
                part.keys(to_values)[g] += fast_product(weights.to(kind), above[g].mT)
                slope = fast_product(value[g], above[g]).to(exact)
                slope = slope.sub_(deltas[g]).mul_(weights).to(kind)
                part.keys(to_keys)[g] += fast_product(slope, asked[g].mT)
                _put(to_query, part, g, fast_product(slope.mT, key[g].mT) * scale)
        to_own: list[Tensor] = []
        if own:
            own_keys, own_values = _stacked(own)
            scores = torch.einsum("rgsd,rkgd->rgsk", query, own_keys).to(exact) * scale
            weights = (scores - norm[..., None]).exp_()
            slope = torch.einsum("rgsd,rkgd->rgsk", grad, own_values).to(exact) - mean[..., None]
            slope = slope.mul_(weights).mul_(scale).to(kind)
            to_query += torch.einsum("rgsk,rkgd->rgsd", slope, own_keys)
            to_own += torch.einsum("rgsk,rgsd->krgd", slope, query)
            to_own += torch.einsum("rgsk,rgsd->krgd", weights.to(kind), grad)
        return None, None, None, to_query, to_keys.to(kind), to_values.to(kind), *to_own


def _groups(query: Tensor) -> list[int | slice]:
    """The kv heads one after the other, or all at once: how products of query [R, G, S, d] go."""
    return list(range(query.shape[1])) if suits(query, query) else [slice(None)]


def _fold(part: Chunk, rows: Tensor) -> Tensor:
    """Rows of a chunk out of [R, G, S, x] → [G, m, x]: heads that share keys are more rows."""
    return rows[part.rows].transpose(0, 1).flatten(1, 2)


def _put(into: Tensor, part: Chunk, g: int | slice, folded: Tensor) -> None:
    """folded […, m, x] → the rows of a chunk in [R, G, S, x], of these groups"""
    rows = folded.unflatten(-2, (-1, into.shape[2]))  # […, r, S, x]
    into[part.rows].transpose(0, 1)[g] = rows


def _stacked(own: list[Tensor] | tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """k keys and k values [R, G, d] → [R, k, G, d] twice"""
    half = len(own) // 2
    return torch.stack(list(own[:half]), dim=1), torch.stack(list(own[half:]), dim=1)

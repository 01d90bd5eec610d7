"""Attention of training-time test: step-0 keys causally, plus a row's own keys of later steps.

At step k the row of anchor t sees the step-0 keys of positions ≤ t and its own keys of steps 1…k,
nothing of other rows' later steps: just what it will see when it drafts. Only anchors ask; prompt
rows are needed for their step-0 key and value alone.

B batch, T length, R anchors, A most anchors in one batch row, Q query heads, G kv heads,
S = Q/G, d head size, k own keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Anchors:
    """Where the anchors of a batch are, as a list [R] and as a padded grid [B, A]."""

    flat: Tensor  # [R] b·T + t
    position: Tensor  # [R] t, counted from the start of its document
    seen: Tensor  # [B, A, T] bool: step-0 keys that the anchor in this grid cell may see
    _cell: Tensor  # [R] b·A + place within the row

    @classmethod
    def of(cls, chosen: Tensor, starts: Tensor | None = None) -> Anchors:
        """chosen [B, T] bool → the anchors, in order; starts [B, T] of documents as in Batch."""
        batch, length = chosen.shape
        row, place = chosen.nonzero(as_tuple=True)
        number = (chosen.cumsum(1) - 1)[row, place]
        widest = int(chosen.sum(1).max()) if batch else 0
        cell = row * widest + number

        def on_grid(values: Tensor) -> Tensor:
            empty = values.new_zeros(batch * widest)
            return empty.index_copy(0, cell, values).view(batch, widest, 1)

        column = torch.arange(length, device=chosen.device)
        seen, position = column <= on_grid(place), place
        if starts is not None:
            start = starts[row, place]
            seen, position = seen & (column >= on_grid(start)), place - start
        return cls(row * length + place, position, seen, cell)

    def pad(self, rows: Tensor) -> Tensor:
        """[R, …] → [B, A, …], empty cells zero."""
        batch, widest = self.seen.shape[:2]
        grid = rows.new_zeros(batch * widest, *rows.shape[1:]).index_copy(0, self._cell, rows)
        return grid.view(batch, widest, *rows.shape[1:])

    def unpad(self, grid: Tensor) -> Tensor:
        """[B, A, …] → [R, …]"""
        return grid.flatten(0, 1)[self._cell]


def ttt_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
    anchors: Anchors,
    scale: float,
) -> Tensor:
    """query [R, Q, d]; keys, values [B, T, G, d] of step 0; own_* k times [R, G, d] → [R, Q·d]."""
    rows, heads, size = query.shape
    length, groups = keys.shape[1:3]
    share = heads // groups
    query = query.view(rows, groups, share, size)
    grid = anchors.pad(query).permute(0, 2, 1, 3, 4)  # [B, G, A, S, d]
    batch, _, widest = grid.shape[:3]
    scores = grid.reshape(batch, groups, widest * share, size) @ keys.permute(0, 2, 3, 1)
    scores = scores.view(batch, groups, widest, share, length) * scale
    scores = scores.masked_fill(~anchors.seen[:, None, :, None], float("-inf"))
    scores = anchors.unpad(scores.permute(0, 2, 1, 3, 4))  # [R, G, S, T]
    if own_keys:
        own = torch.einsum("rgsd,rkgd->rgsk", query, torch.stack(own_keys, dim=1)) * scale
        scores = torch.cat([scores, own], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    prefix, own_weights = weights[..., :length], weights[..., length:]
    prefix = anchors.pad(prefix).permute(0, 2, 1, 3, 4)  # [B, G, A, S, T]
    out = prefix.reshape(batch, groups, widest * share, length) @ values.transpose(1, 2)
    out = anchors.unpad(out.view(batch, groups, widest, share, size).permute(0, 2, 1, 3, 4))
    if own_keys:
        out = out + torch.einsum("rgsk,rkgd->rgsd", own_weights, torch.stack(own_values, dim=1))
    return out.reshape(rows, heads * size)

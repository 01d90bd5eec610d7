"""Features in int8: groups of a token's numbers, each with a scale of its own.

W numbers of a token (A of the auxiliary states, H of the last one), G of them to a group.

========= ============== ==========================================================
values    int8 [N, W]    −127 … 127
scales    bfloat16       what 1 stands for, > 0: largest absolute value of the group / 127
          [N, W/G]
========= ============== ==========================================================

A residual stream has a few dimensions a hundred times as large as the rest, others in every layer;
one scale for a token drowns the rest, groups of 32 keep the error near 1 % (docs/LOG.md). Bfloat16
scales reach as far as float32, where those of float16 would end at 127 · 65504.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROUP = 32
LARGEST = 127
# What the values are given back as: half the bytes of float32, and no loss beside that of int8.
WIDE = torch.bfloat16
# Rows worked on at a time, so that no float32 copy of a whole shard exists.
_ROWS = 1024


def group_of(hidden: int) -> int:
    """Numbers to a group: 32, or what divides a hidden size H that 32 does not, so that no group
    has numbers of two layers."""
    return math.gcd(GROUP, hidden)


def to_int8(features: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Features [N, W], finite and of any float type → (values int8 [N, W], scales [N, W/group])."""
    count, width = features.shape
    values = torch.empty(count, width, dtype=torch.int8, device=features.device)
    scales = torch.empty(count, width // group, dtype=WIDE, device=features.device)
    for part in range(0, count, _ROWS):
        rows = slice(part, part + _ROWS)
        groups = features[rows].float().unflatten(1, (-1, group))
        scale = (groups.abs().amax(-1) / LARGEST).to(WIDE)
        scale[scale == 0] = 1  # all zeros
        scales[rows] = scale
        # By the scale as it is stored; where that was rounded down the largest may pass 127.
        whole = (groups / scale.float()[..., None]).round().clamp(-LARGEST, LARGEST)
        values[rows] = whole.flatten(1).to(torch.int8)
    return values, scales


def from_int8(values: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """[n, W] in bfloat16, written to `out` [n, W] where given."""
    out = torch.empty_like(values, dtype=WIDE) if out is None else out
    out.copy_(values)
    out.unflatten(1, (scales.shape[1], -1)).mul_(scales[..., None])
    return out

"""Uniform numbers by counter: what a row draws for a token depends on the row's key, the purpose
and the token's index alone; not on the batch, the device, the tree, or how often a step ran.

B rows. The sequence of one (key, stream) is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), whose
n-th number needs none before it. int64 arithmetic wraps, as it must here.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Streams: the target's own draw of a new token, the draft's draws for it, their acceptance.
OWN, DRAFT, ACCEPT = 0, 1, 2

_BITS = 64


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value %= 1 << _BITS
    return value - (1 << _BITS) if value >> (_BITS - 1) else value


_STEP = _signed(0x9E3779B97F4A7C15)  # between the states of one sequence
_STREAM = _signed(0xD1B54A32D192ED03)  # between the streams of one key; any odd constant will do
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def row_key(seed: int, request: int) -> int:
    """The key of one request under one seed, an int64 for `uniform`; on the host."""
    start, number = torch.tensor([_signed(seed), _signed(request)])
    return int(_mix(_mix(start + _STEP) + (number + 1) * _STEP))


def uniform(keys: Tensor, stream: int, index: Tensor) -> Tensor:
    """keys [B], index [B, ...], both int64 → float64 [B, ...]: multiples of 2⁻⁵³ in [0, 1)."""
    start = _mix(keys + _signed((stream + 1) * _STREAM))
    start = start.reshape(-1, *[1] * (index.dim() - 1))
    return _shift(_mix(start + (index + 1) * _STEP), 11).double() * 2.0**-53


def several(index: Tensor, count: int) -> Tensor:
    """Indices for `count` (at most 65,536) numbers of each token: [B, ...] → [B, ..., count].

    The first numbers of a token stay the same whatever `count` is.
    """
    return (index << 16)[..., None] + torch.arange(count, device=index.device)


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's output for a state: every bit of it depends on every bit of the state."""
    state = (state ^ _shift(state, 30)) * _FIRST
    state = (state ^ _shift(state, 27)) * _SECOND
    return state ^ _shift(state, 31)


def _shift(state: Tensor, by: int) -> Tensor:
    """To the right, zeros from the left (>> on int64 repeats the sign)."""
    return (state >> by) & ((1 << (_BITS - by)) - 1)

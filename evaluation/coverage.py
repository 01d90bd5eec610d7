"""How much of what the target says lies inside draft vocabularies of several sizes.

S sizes (ascending), V vocabulary, R rows, C conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spectrain.evaluation.bootstrap import Floats, intervals, ratio

# So much less than the largest vocabulary covers counts as the same.
TOLERANCE = 0.005


def members(vocabularies: Sequence[Tensor], vocab_size: int) -> Tensor:
    """Which tokens each vocabulary, given as its ids, holds: [V, S] bool."""
    held = torch.zeros(vocab_size, len(vocabularies), dtype=torch.bool)
    for place, ids in enumerate(vocabularies):
        held[ids, place] = True
    return held


def mass_inside(logits: Tensor, held: Tensor) -> Tensor:
    """The probability that logits [R, V] give to the tokens of each vocabulary, held [V, S] of the
    same device: float64 [R, S]."""
    # Sums of so many small numbers are 1e-4 off in float32.
    return logits.float().softmax(-1).double() @ held.double()


def shares(held: Floats, of: Floats, seed: int) -> list[dict[str, Any]]:
    """held [C, S] of [C, 1] → for each size Σ held / Σ of, with an interval over conversations."""
    return intervals({"held": held, "of": of}, lambda s: ratio(s["held"], s["of"]), seed)


def smallest(sizes: Sequence[int], covered: Sequence[float], tolerance: float = TOLERANCE) -> int:
    """The smallest size that covers as much as the largest one does, less `tolerance`."""
    enough = covered[-1] - tolerance
    return next(size for size, share in zip(sizes, covered, strict=True) if share >= enough)

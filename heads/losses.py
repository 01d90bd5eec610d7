"""Losses shared by the heads: one value per row, never a mean; they are summed and divided once.

R rows, D draft vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def soft_cross_entropy_rows(logits: Tensor, teacher: Tensor) -> Tensor:
    """−Σ_x p(x) log q(x) for each row; logits, teacher (probabilities) [R, D] → [R] float32."""
    return -(teacher.float() * F.log_softmax(logits.float(), dim=-1)).sum(-1)

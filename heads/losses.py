"""Losses shared by the heads: one value per row, never a mean; they are summed and divided once.

p is the target's distribution over the draft vocabulary, q the head's, α = Σ_x min(p(x), q(x)) the
chance that a token drawn from q is accepted. Every loss takes the head's logits [R, D] and p [R, D]
and gives [R] in float32 (float64 stays). A row of zeros for p, a row without a teacher, gives a
finite value with a finite gradient, so that masking it works.

R rows, D draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LAMBDA_DECAY = 3.0
# What reverse KL takes for an impossible token: guessing it costs at most 18.4 nats.
_LEAST = 1e-8
# Logarithm of an impossible token's probability: finite, and below any log q that occurs.
_IMPOSSIBLE = -1e4


def soft_cross_entropy_rows(logits: Tensor, teacher: Tensor) -> Tensor:
    """−Σ_x p(x) log q(x), the forward KL up to the target's own entropy."""
    return -(_wide(teacher) * F.log_softmax(_wide(logits), dim=-1)).sum(-1)


def total_variation_rows(logits: Tensor, teacher: Tensor) -> Tensor:
    """1 − α."""
    return 1 - _acceptance(_wide(logits).softmax(-1), _wide(teacher))


def lk_alpha_rows(logits: Tensor, teacher: Tensor) -> Tensor:
    """−log α (arXiv 2602.23881). Summed in logarithms: α may be smaller than any float."""
    p, log_q = _wide(teacher), F.log_softmax(_wide(logits), dim=-1)
    log_p = p.log().clamp(min=_IMPOSSIBLE)
    return -torch.logsumexp(torch.minimum(log_p, log_q), dim=-1)


def lk_lambda_rows(logits: Tensor, teacher: Tensor) -> Tensor:
    """λ · KL(p ‖ q) + (1 − λ) · (1 − α) with λ = exp(−3 α), no gradient through λ (2602.23881).

    The paper takes α as a mean over the micro-batch at each draft step; here it is the row's own,
    so that the loss does not depend on how a batch is cut.
    """
    p, log_q = _wide(teacher), F.log_softmax(_wide(logits), dim=-1)
    divergence = (torch.xlogy(p, p) - p * log_q).sum(-1)
    alpha = _acceptance(log_q.exp(), p)
    share = torch.exp(-LAMBDA_DECAY * alpha.detach())
    return share * divergence + (1 - share) * (1 - alpha)


def reverse_kl_rows(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL(q ‖ p) = Σ_x q(x) (log q(x) − log p(x)), p at least 1e-8."""
    log_q = F.log_softmax(_wide(logits), dim=-1)
    return (log_q.exp() * (log_q - _wide(teacher).clamp(min=_LEAST).log())).sum(-1)


RowLoss = Literal["soft_ce", "lk_alpha", "lk_lambda", "tv", "reverse_kl"]
ROW_LOSSES: dict[RowLoss, Callable[[Tensor, Tensor], Tensor]] = {
    "soft_ce": soft_cross_entropy_rows,
    "lk_alpha": lk_alpha_rows,
    "lk_lambda": lk_lambda_rows,
    "tv": total_variation_rows,
    "reverse_kl": reverse_kl_rows,
}


def _acceptance(q: Tensor, p: Tensor) -> Tensor:
    """α [R]"""
    return torch.minimum(p, q).sum(-1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()

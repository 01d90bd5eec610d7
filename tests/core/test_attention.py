"""Both ways to attend, few rows and many, against sums in float64."""

from __future__ import annotations

import pytest
import torch

from spectrain.core import attention
from spectrain.core.attention import grouped_attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def slow(query, key, value, mask, scale):
    out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    share = query.shape[1] // key.shape[1]
    for batch, head, row in torch.cartesian_prod(*map(torch.arange, query.shape[:3])).tolist():
        keys, values = (t[batch, head // share].double() for t in (key, value))
        scores = keys @ query[batch, head, row].double() * scale
        weights = scores.masked_fill(~mask[batch, row], float("-inf")).softmax(0)
        out[batch, head, row] = weights @ values
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [2, 30])
def test_grouped_attention(dtype, rows):
    random = torch.Generator().manual_seed(0)
    query = torch.randn(rows, 6, 3, 8, generator=random).to(dtype)
    key, value = (torch.randn(rows, 2, 9, 8, generator=random).to(dtype) for _ in range(2))
    mask = torch.rand(rows, 3, 9, generator=random) > 0.3
    mask[..., 0] = True
    folded = query.reshape(rows, 2, 9, 8)
    assert attention._by_products(folded) == (rows == 30)
    got = grouped_attention(query, key, value, mask, 0.3)
    assert got.dtype == dtype
    error = (got.double() - slow(query, key, value, mask, 0.3)).abs().max()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [2, 30])
def test_large_products_do_not_overflow_in_float16(rows):
    """q · k = 80,000 is no float16, q · k / 8 is one."""
    query = torch.full((rows, 6, 1, 8), 100.0, dtype=torch.float16)
    key, value = torch.full((2, rows, 2, 4, 8), 100.0, dtype=torch.float16)
    mask = torch.ones(rows, 1, 4, dtype=torch.bool)
    got = grouped_attention(query, key, value, mask, 1 / 8)
    assert torch.isfinite(got).all()

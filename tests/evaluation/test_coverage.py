"""Coverage of nested vocabularies equals that of each one looked at alone, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectrain.evaluation.coverage import mass_inside, members, shares, smallest
from spectrain.heads import vocab

V, USABLE, PINNED, SIZES = 60, 54, [3, 50], (2, 7, 20, 54)


@pytest.fixture(params=range(5))
def random(request):
    return torch.Generator().manual_seed(request.param)


@pytest.fixture
def held(random):
    counts = torch.randint(0, 4, (V,), generator=random)  # many ties
    chosen = [vocab.choose_tokens(counts, size, PINNED, USABLE) for size in SIZES]
    found = members(chosen, V)
    for place, ids in enumerate(chosen):
        assert found[:, place].nonzero().flatten().tolist() == ids.tolist()
    return found


def test_every_vocabulary_is_the_one_that_a_head_would_get_and_they_are_nested(held):
    assert held[PINNED].all()
    assert not held[USABLE:].any()
    assert (held[:, :-1] <= held[:, 1:]).all()


def test_mass_is_the_sum_over_the_members(random, held):
    logits = 3 * torch.randn(9, V, generator=random)
    found = mass_inside(logits, held)
    for row, own in zip(found, logits.double(), strict=True):
        total = sum(own.exp().tolist())
        for place in range(len(SIZES)):
            inside = sum(own[token].exp().item() for token in range(V) if held[token, place])
            assert row[place].item() == pytest.approx(inside / total, abs=1e-6)


def test_a_wide_vocabulary_holds_all_of_the_mass():
    """In float32 the sum over 50,000 tokens would be 1e-4 off."""
    logits = 4 * torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0))
    found = mass_inside(logits, torch.ones(50_000, 2, dtype=torch.bool))
    torch.testing.assert_close(found, torch.ones_like(found), atol=2e-5, rtol=0)


def test_shares_count_every_token_once():
    """Two short conversations with all inside do not outweigh a long one with half of it inside."""
    held, of = np.array([[2.0, 2], [2, 2], [10, 20]]), np.array([[2.0], [2], [20]])
    assert [share["value"] for share in shares(held, of, 0)] == [14 / 24, 1]
    many = shares(np.tile(held, (3, 1)), np.tile(of, (3, 1)), 0)
    assert many[0]["low"] < 14 / 24 < many[0]["high"]
    assert many[1] == {"value": 1, "low": 1, "high": 1}


def test_smallest_is_measured_by_the_largest():
    assert smallest((10, 20, 30), (0.90, 0.975, 0.98), 0.005) == 20
    assert smallest((10, 20, 30), (0.90, 0.97, 0.98), 0.005) == 30
    assert smallest((10,), (0.5,)) == 10

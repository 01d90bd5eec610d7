"""Warps against the library's own, the settings' errors, and picking by a uniform number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spectrain.core.errors import SpectrainError
from spectrain.generator.sampling import Sampling, pick


def library_warp(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after the warpers in the order of `generate`."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    warpers.append(MinPLogitsWarper(min_p))
    return warpers(None, logits).softmax(-1)


def require_equal(logits, **settings):
    got, expected = Sampling(**settings).warp(logits), library_warp(logits, **settings)
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got, expected)


@given(
    st.integers(0, 10_000),
    st.integers(1, 40),
    st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    st.integers(0, 45),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 1e-4, 0.1, 0.7, 1.0]),
    st.booleans(),
)
def test_warp_leaves_the_library_s_tokens(seed, vocab, temperature, top_k, top_p, min_p, ties):
    """The same tokens stay with the same probabilities; `ties`: many logits are equal, and some
    tokens are forbidden."""
    logits = 3 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))
    if ties:
        # Whole numbers: equal ones stay equal, and no mass lies on an edge by chance.
        logits = logits.round()
        logits[:, 1::5] = -math.inf
    require_equal(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"top_k": 3}, [0, 1, 2, 3]),  # all that equal the third stay
        ({"top_k": 8}, [0, 1, 2, 3, 4, 5]),  # there are only 6
        ({"top_k": 6}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 1}, [0]),
        ({"top_p": 1e-12}, [0]),
        ({"top_p": 0.6}, [0, 2, 3]),  # 0.4 + 0.14 are too little; of equal ones the later stay
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.34}, [0, 1, 2, 3]),
        ({"min_p": 0.36}, [0]),
        ({"top_k": 2, "top_p": 0.5, "min_p": 0.3}, [0, 3]),
    ],
)
def test_edges_by_hand(settings, left):
    """0.4, three of 0.14 and two of 0.09. Top-k 2 leaves four, 0.82 together; top-p counts anew:
    0.4 / 0.82 is less than a half, so a second one stays."""
    logits = torch.tensor([[0.4, 0.14, 0.14, 0.14, 0.09, 0.09]]).log()
    assert Sampling(1.0, **settings).warp(logits)[0].nonzero().flatten().tolist() == left
    require_equal(logits, temperature=1.0, **settings)


def test_equal_logits_all_stay_with_min_p_1():
    logits = torch.tensor([[2.0, 2.0, -1.0]])
    assert Sampling(0.5, min_p=1.0).warp(logits).tolist() == [[0.5, 0.5, 0.0]]


def test_any_shape_and_half_precision():
    """[B, M, V] is warped row by row, in float32 whatever came."""
    sampling = Sampling(0.8, top_k=5, top_p=0.8, min_p=0.05)
    logits = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = sampling.warp(logits)
    assert got.dtype == torch.float32
    assert torch.equal(got.flatten(0, 1), sampling.warp(logits.flatten(0, 1).float()))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"temperature": -0.1}, "temperature -0.1 is not a number ≥ 0"),
        ({"temperature": math.nan}, "temperature nan is not a number ≥ 0"),
        ({"temperature": math.inf}, "temperature inf is not a number ≥ 0"),
        ({"top_k": -1}, "top_k -1 is negative; 0 turns it off"),
        ({"top_p": 0.0}, "top_p 0.0 is not in (0, 1]; 1 turns it off"),
        ({"top_p": math.nan}, "top_p nan is not in (0, 1]; 1 turns it off"),
        ({"min_p": 1.1}, "min_p 1.1 is not in [0, 1]; 0 turns it off"),
        ({"min_p": math.nan}, "min_p nan is not in [0, 1]; 0 turns it off"),
    ],
)
def test_bad_settings_are_one_line(settings, line):
    with pytest.raises(SpectrainError) as caught:
        Sampling(**settings)
    assert str(caught.value) == line


def slow_pick(probabilities: list[float], uniform: float) -> int:
    height, total = uniform * math.fsum(probabilities), 0.0
    for token, probability in enumerate(probabilities):
        total += probability
        if total > height:
            return token
    return len(probabilities) - 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_pick_is_the_inverse_of_the_cumulated_probabilities(weights, uniform):
    """Quarters add up without rounding; a token of probability 0 is never picked."""
    got = pick(torch.tensor(weights) / 4, torch.tensor(uniform, dtype=torch.float64)).item()
    assert got == slow_pick([weight / 4 for weight in weights], uniform)
    assert weights[got] > 0 or not any(weights)


def test_pick_at_the_edges():
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    last = 1 - 2.0**-53
    uniform = torch.tensor([0.0, 0.25 - 2.0**-54, 0.25, last], dtype=torch.float64)
    assert pick(p.expand(4, -1), uniform).tolist() == [1, 1, 3, 3]
    # Whatever the sum, the largest number stays below it.
    odd = torch.rand(500, 7, generator=torch.Generator().manual_seed(0))
    odd[:, -2:] = 0
    assert (pick(odd, torch.full((500,), last, dtype=torch.float64)) == 4).all()

"""Intervals: right coverage, over conversations, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from spectrain.evaluation.bootstrap import intervals, ratio


def tau(hits, size, seed=0):
    sums = {"hits": np.array(hits, float)[:, None], "size": np.array(size, float)[:, None]}
    return intervals(sums, lambda s: ratio(s["hits"], s["size"]), seed)[0]


def test_covers():
    """400 worlds of 50 conversations whose rates and lengths differ: the 95 % interval holds the
    truth in 90–98 % (94 ± 3.4 standard errors: the percentile bootstrap is a little narrow)."""
    random = np.random.default_rng(1)
    inside = 0
    for _ in range(400):
        size = random.integers(20, 200, 50)
        hits = random.binomial(size, random.beta(4, 4, 50))
        found = tau(hits, size)
        inside += found["low"] <= 0.5 <= found["high"]
    assert 0.90 <= inside / 400 <= 0.98


def test_is_over_conversations():
    """Ten times the tokens in the same conversations say nothing new; four times the conversations
    halve the interval."""
    random = np.random.default_rng(2)
    size = random.integers(20, 200, 60)
    hits = random.binomial(size, random.beta(4, 4, 60))
    plain, longer = tau(hits, size), tau(10 * hits, 10 * size)
    assert longer == pytest.approx(plain)
    more = tau(np.tile(hits, 4), np.tile(size, 4))
    width = [found["high"] - found["low"] for found in (plain, more)]
    assert width[1] == pytest.approx(width[0] / 2, rel=0.15)


def test_seeded():
    hits, size = [1, 5, 3, 2, 0, 4, 6, 2], [4, 6, 9, 7, 3, 5, 8, 2]
    assert tau(hits, size, seed=3) == tau(hits, size, seed=3)
    assert tau(hits, size, seed=3) != tau(hits, size, seed=4)


def test_undefined_is_none():
    assert tau([0] * 9, [0] * 9) == {"value": None, "low": None, "high": None}
    assert tau([1], [2]) == {"value": 0.5, "low": None, "high": None}
    found = tau([1] * 8 + [0] * 20, [2] * 8 + [0] * 20)  # undefined in hardly a resample in 10,000
    assert found == {"value": 0.5, "low": 0.5, "high": 0.5}


def test_too_few_conversations_have_no_interval():
    """Seven of them, though each differs; and seven that have the quantity among many."""
    hits, size = [1, 5, 3, 2, 0, 4, 6, 2], [4, 6, 9, 7, 3, 5, 8, 2]
    assert tau(hits, size)["low"] < tau(hits, size)["value"] < tau(hits, size)["high"]
    alone = tau(hits[:7], size[:7])
    assert alone == {"value": 0.5, "low": None, "high": None}
    assert tau(hits[:7] + [0] * 20, size[:7] + [0] * 20) == alone

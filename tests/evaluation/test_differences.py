"""Differences of two heads are paired: what both do on one conversation is drawn together."""

from __future__ import annotations

import numpy as np
import pytest

from spectrain.evaluation.alpha import Acceptance
from spectrain.evaluation.summary import Conversation, differences, summarise

STEPS = 3


def conversations(seed, shift=0.0, count=30):
    """Conversations whose acceptance differs much from one to the next, and little by `shift`."""
    random = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        size, level = int(random.integers(4, 30)), random.uniform(0.1, 0.8)
        beta = np.full((size, STEPS), level + shift)
        for step in range(STEPS):
            beta[size - step :, step] = 0  # past the end of the reply
        result.append(Conversation("chat", [Acceptance(beta, beta)]))
    return result


def test_values_are_those_of_the_two_summaries():
    one, other = conversations(0, 0.05), conversations(0)
    left, right = (summarise(found, STEPS, seed=1) for found in (one, other))
    found = differences(one, other, STEPS, seed=1)
    for k in range(STEPS):
        ours = [s["positions"][k]["marginal"]["value"] for s in (left, right)]
        assert found["marginal"][k]["value"] == pytest.approx(ours[0] - ours[1])
        ours = [s["tau"][k]["value"] for s in (left, right)]
        assert found["tau"][k]["value"] == pytest.approx(ours[0] - ours[1])


def test_what_both_heads_share_is_no_uncertainty():
    """A shift that is the same in every conversation is known exactly, though each head's own
    acceptance is not."""
    one, other = conversations(0, 0.05), conversations(0)
    wide = summarise(one, STEPS, seed=1)["positions"][0]["marginal"]
    paired = differences(one, other, STEPS, seed=1)["marginal"][0]
    assert paired["value"] == pytest.approx(0.05)
    assert paired["high"] - paired["low"] < 1e-9 < 0.05 < wide["high"] - wide["low"]
    nothing = differences(one, one, STEPS, seed=1)
    assert all(d == {"value": 0, "low": 0, "high": 0} for part in nothing.values() for d in part)

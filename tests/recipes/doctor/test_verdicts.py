"""What doctor makes of a measured acceptance: the upper end of the interval decides."""

from __future__ import annotations

import pytest

from spectrain.evaluation import behaviour
from spectrain.recipes.doctor_verdicts import acceptance

BLIND = 0.05
LEAST = behaviour.least(BLIND)


def measured(value, low, high):
    first = {"value": value, "low": low, "high": high}
    return {"blind": BLIND, "positions": [{"conditional": first}]}


@pytest.mark.parametrize(("value", "low", "high", "verdict"), [
    (LEAST, LEAST - 0.02, LEAST + 0.02, "ok"),
    (LEAST - 0.01, LEAST - 0.03, LEAST + 0.01, "ok"),  # it may guess: too few replies to tell
    (LEAST - 0.02, LEAST - 0.03, LEAST - 0.01, "fail"),
    (LEAST, None, None, "ok"),
    (LEAST - 0.01, None, None, "fail"),
])  # fmt: skip
def test_near_zero_is_what_may_not_be_more(value, low, high, verdict):
    assert acceptance(measured(value, low, high), 3).verdict == verdict


def test_a_cause_that_explains_it_needs_no_advice():
    """in_vain is how many were tried for nothing, None where one explains it."""
    bad = measured(0.0, 0.0, 0.0)
    assert "none of 3 causes" in acceptance(bad, 3).fix
    assert acceptance(bad, None).fix == ""

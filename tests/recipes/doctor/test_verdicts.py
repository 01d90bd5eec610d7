"""What doctor makes of a measured acceptance: the upper end of the interval decides."""

from __future__ import annotations

import pytest

from spectrain.evaluation import behaviour
from spectrain.recipes.doctor_verdicts import acceptance, ranked

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


def tried(name, value, high, seen, likely=True):
    gain = {"value": value, "low": 0.01, "high": high}
    return {"name": name, "position_1": value, "gain": gain, "seen": seen, "likely": likely}


@pytest.mark.parametrize(("high", "likely", "first"), [
    (0.21, True, "rope"),  # a near tie
    (0.15, True, "layers"),  # surely behind
    (0.21, False, "layers"),  # it explains nothing
])  # fmt: skip
def test_of_near_ties_that_which_a_finding_tells_of(high, likely, first):
    rows = [tried("rope", 0.1, high, True, likely), tried("layers", 0.2, 0.3, False)]
    assert ranked(rows)[0]["name"] == first
    assert ranked(rows[::-1]) == ranked(rows)


def test_changes_of_a_head_that_cannot_run_have_no_gain():
    rows = [tried("a", 0.1, 0.2, True), tried("b", 0.3, 0.4, False)]
    rows = [row | {"gain": None} for row in rows]
    assert [row["name"] for row in ranked(rows)] == ["b", "a"]

"""What doctor says of a measured acceptance; how that is measured: test_behaviour.py."""

from __future__ import annotations

import pytest

from spectrain.recipes.doctor_verdicts import (
    acceptance,
    next_position,
    not_finite,
    ranked,
    verdicts,
)


def measured(*knows, broken=0):
    """One position for each."""
    interval = {"value": 0.3, "low": 0.2, "high": 0.4}
    rows = [
        {"position": place, "conditional": interval, "over_blind": interval, "blind": 0.05}
        | {"knows": one, "not_finite": broken if place > 1 else 0}
        for place, one in enumerate(knows, 1)
    ]
    return {"blind": 0.05, "conversations": 10, "positions": rows}


@pytest.mark.parametrize(("knows", "verdict"), [(True, "ok"), (None, "warn"), (False, "fail")])
def test_what_it_knows_decides(knows, verdict):
    assert acceptance(measured(knows), 3).verdict == verdict


def test_where_replies_do_not_tell_more_are_asked_for():
    told = acceptance(measured(None), 3)
    assert told.text.startswith("10 replies do not tell whether it guesses at all: 0.30")
    assert "--limit" in told.fix
    few = measured(None)
    few["positions"][0]["over_blind"] = {"value": 0.3, "low": None, "high": None}
    assert acceptance(few, 3).verdict == "warn"


def test_a_cause_that_explains_it_needs_no_advice():
    """in_vain is how many were tried for nothing, None where one explains it."""
    assert "none of 3 causes" in acceptance(measured(False), 3).fix
    assert acceptance(measured(False), None).fix == ""


@pytest.mark.parametrize("second", [True, None])
def test_a_second_position_that_may_be_accepted(second):
    assert list(next_position(measured(True, second))) == []


def test_a_head_that_guesses_once_and_never_again():
    """Position 1 alone does not show what a head makes of its own output."""
    (one,) = next_position(measured(True, False), "TRAIN")
    assert one.verdict == "fail"
    assert "position 2" in one.text
    assert "TRAIN" in one.fix
    (one,) = next_position(measured(True, False), None)  # a cause explains it
    assert one.fix == ""


def test_logits_that_are_no_numbers_fail_whatever_is_accepted():
    assert list(not_finite(measured(True, True))) == []
    (one,) = not_finite(measured(True, True, True, broken=1234))
    assert (one.verdict, one.text) == ("fail", "NaN or infinite at position 2, for 1,234 drafts")
    assert one in list(verdicts(measured(True, True, broken=1234), [], ""))


def row(position, likely, before=0.1):
    return {
        "name": f"cause {position}",
        "position": position,
        "before": before,
        "accepted": 0.5,
    } | {
        "likely": likely,
        "fix": "MEND",
    }


def test_a_cause_is_told_with_the_position_that_it_explains():
    accepted = measured(True, False)
    *_, last = verdicts(accepted, [row(1, False), row(2, True)], "TRAIN")
    assert last.text == "cause 2: position 2 is then accepted 0.50 instead of 0.10"
    assert last.fix == "MEND"
    *_, last = verdicts(None, [row(1, True, None)], "")
    assert last.text == "cause 1: position 1 is then accepted 0.50"
    first, *_ = verdicts(measured(False), [row(1, False), row(2, False)], "TRAIN")
    assert "none of 1 causes" in first.fix


def tried(name, value, high, seen, likely=True):
    gain = {"value": value, "low": 0.01, "high": high}
    return {
        "name": name,
        "position": 1,
        "accepted": value,
        "gain": gain,
        "seen": seen,
        "likely": likely,
    }


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

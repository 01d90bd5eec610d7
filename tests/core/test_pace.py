"""Time left: nothing while it would be a guess, then the rate of the last units."""

from __future__ import annotations

import pytest

from spectrain.core.pace import FEWEST, MARKS, SECONDS, Pace


def run(*ends: float) -> Pace:
    """One unit ends at each of these seconds."""
    pace = Pace(now=0.0)
    for count, end in enumerate(ends, 1):
        pace.reached(count, now=end)
    return pace


def test_nothing_is_said_before_there_is_something_to_say():
    """Neither before enough units nor before enough time, however much of the other there is."""
    assert Pace(now=0.0).left(10) is None
    assert run(*[10.0 * n for n in range(1, FEWEST)]).left(10) is None
    assert run(*[SECONDS / 1000 * n for n in range(1, 900)]).left(10) is None
    assert run(*[10.0 * n for n in range(1, FEWEST + 1)]).left(10) == pytest.approx(100)


def test_a_slow_first_unit_does_not_count():
    """60 s of warm-up, then a second each: ten units are ten seconds."""
    assert run(60, 61, 62).left(10) == pytest.approx(10)


def test_the_rate_is_that_of_the_last_units():
    """Units of a second become units of four: once MARKS of those are done nothing else counts,
    and on the way the estimate only moves towards them."""
    ends = [float(n) for n in range(1, 501)]
    pace = run(*ends)
    told = []
    for number in range(1, MARKS + 1):
        pace.reached(500 + number, now=500 + 4.0 * number)
        told.append(pace.left(10))
    assert told == sorted(told)
    assert told[0] < 11
    assert told[-1] == pytest.approx(40)


def test_many_units_a_second_are_kept_as_few_marks():
    """A million ends are MARKS numbers, and the rate is right all the same."""
    pace = run(*[n / 1000 for n in range(1, 200_001)])
    assert len(pace._marks) <= MARKS
    assert pace.left(1000) == pytest.approx(1, rel=1e-6)


def test_nothing_done_since_the_first_mark_is_no_rate():
    pace = Pace(now=0.0)
    for second in (1, 10, 20):
        pace.reached(5, now=second)
    assert pace.left(10) is None

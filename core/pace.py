"""How fast units are done, and when they will be over: no number before there is one to be had."""

from __future__ import annotations

import time
from collections import deque

# Nothing is said before so many units' ends and seconds: the first unit of a stage warms up caches
# and kernels, and a rate of two is a guess.
FEWEST, SECONDS = 3, 3.0
# The rate is that of the last MARKS ends of a unit, at least GAP seconds apart.
MARKS, GAP = 100, 1.0


class Pace:
    """Of a count of units that grows; `now` in seconds, for tests."""

    def __init__(self, now: float | None = None) -> None:
        self._start = self._clock(now)
        self._ends = 0
        # (second, count) of the last ends; the first one is that of the first unit, so what came
        # before it (the warm-up) does not count
        self._marks: deque[tuple[float, float]] = deque(maxlen=MARKS)
        self._last = (self._start, 0.0)

    def reached(self, count: float, now: float | None = None) -> None:
        """`count` units of this run are done."""
        self._last = (self._clock(now), count)
        self._ends += 1
        if not self._marks or self._last[0] - self._marks[-1][0] >= GAP:
            self._marks.append(self._last)

    def left(self, units: float) -> float | None:
        """Seconds that `units` more will take; None: too early to say."""
        if self._ends < FEWEST or self._last[0] - self._start < SECONDS:
            return None
        (first, before), (last, count) = self._marks[0], self._last
        return units * (last - first) / (count - before) if count > before else None

    @staticmethod
    def _clock(now: float | None) -> float:
        return time.monotonic() if now is None else now


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 where there are no hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

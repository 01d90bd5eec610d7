"""Metrics as (sum, count): gathered over steps, divided once when a row is written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spectrain.core.files import atomic_write, disk_errors

METRICS = "metrics.jsonl"
HELDOUT = "heldout"  # the key of an evaluation among the rows


@dataclass
class Window:
    """Sums since the last row of metrics; plain numbers, kept in checkpoints.

    loss, count, hits, seen: one entry per term of the objective, summed over all processes.
    """

    loss: list[float] = field(default_factory=list)
    count: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    padding: float = 0.0
    steps: int = 0
    skipped: int = 0

    def add(self, sums: Sequence[Sequence[float]], padding: float) -> None:
        """Add a step: sums = loss, count, hits, seen."""
        for name, values in zip(("loss", "count", "hits", "seen"), sums, strict=True):
            old = getattr(self, name) or [0.0] * len(values)
            setattr(self, name, [a + b for a, b in zip(old, values, strict=True)])
        self.padding += padding
        self.steps += 1

    def row(self, weights: Sequence[float]) -> dict[str, Any]:
        """Means over the window; None where nothing was counted."""
        terms = [_ratio(s, c) for s, c in zip(self.loss, self.count, strict=True)]
        # Without a single good step there are no terms, and nothing to weigh.
        pairs = zip(weights, terms, strict=True) if terms else ()
        weighed = [w * t for w, t in pairs if t is not None]
        return {
            "loss": sum(weighed) if weighed else None,
            "loss_terms": terms,
            "counts": [int(value) for value in self.count],
            "acceptance": acceptance(self.hits, self.seen),
            "hits": [int(value) for value in self.hits],
            "seen": [int(value) for value in self.seen],
            "padding": _ratio(self.padding, self.steps),
            "skipped": self.skipped,
        }


def acceptance(hits: Sequence[float], seen: Sequence[float]) -> list[float | None]:
    """Share of anchors whose first guess was the target's own choice, per term."""
    return [_ratio(h, s) for h, s in zip(hits, seen, strict=True)]


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None


class MetricsFile:
    """metrics.jsonl of a run: one JSON object a line, a row for each logged step and one for each
    evaluation on held-out conversations."""

    def __init__(self, run: Path, after: int) -> None:
        """Continue behind step `after`: later rows (of steps that will run again) are dropped."""
        self.path = run / METRICS
        kept = [row for row in _read(run) if row["step"] <= after]
        atomic_write(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def append(self, row: dict[str, Any]) -> None:
        with disk_errors(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The training rows of a run."""
    return [row for row in _read(run) if HELDOUT not in row]


def read_heldout(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run: {"step": …, "heldout": {…}}."""
    return [row for row in _read(run) if HELDOUT in row]


def _read(run: Path) -> list[dict[str, Any]]:
    """All rows; a line that a killed process left unfinished is passed over."""
    path = run / METRICS
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


class Stopwatch:
    """Seconds since it was last read, pauses left out."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        return passed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside takes no time."""
        begin = time.perf_counter()
        yield
        self._last += time.perf_counter() - begin

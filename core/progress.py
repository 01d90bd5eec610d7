"""Progress of long stages: a bar with rate and time left on a terminal, plain lines elsewhere.

Everything goes to stderr, so that stdout stays free for results. `SPECTRAIN_QUIET=1` silences it,
and in a run of several processes only rank 0 speaks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from spectrain.core.pace import Pace, clock

PLAIN_EVERY_SECONDS = 10.0


class Bar:
    """What `progress` yields. `update(n, loss=1.23)` counts n units and shows the named values."""

    def __init__(self, label: str, total: float | None, unit: str, done: float = 0) -> None:
        self.label, self.total, self.unit, self.done = label, total, unit, done
        self.shown: dict[str, Any] = {}
        self._first, self._start = done, time.monotonic()
        self._pace = Pace()

    def update(self, n: float = 1, **shown: Any) -> None:
        """Count `n` more units; `shown` values replace the earlier ones of the same name."""
        self.done += n
        self.shown.update(shown)
        if n > 0:
            self._pace.reached(self.done - self._first)

    def skip(self, n: float) -> None:
        """Count `n` units that an earlier run has done; they say nothing of this run's rate."""
        self._first += n
        self.done += n
        self.update(0)

    def finish(self) -> None:
        """Called once at the end, also after an error."""

    def rate(self) -> float:
        """Units per second of this run; units done before it (a resumed run) do not count."""
        return (self.done - self._first) / max(time.monotonic() - self._start, 1e-9)

    def left(self) -> str:
        """The time left, once it can be told."""
        seconds = None
        if self.total is not None:
            seconds = self._pace.left(max(self.total - self.done, 0))
        return "" if seconds is None else f"{clock(seconds)} left"

    def details(self) -> str:
        """Rate and the shown values as one short text."""
        values = [f"{self.rate():.3g} {self.unit}/s"]
        values += [f"{name} {_short(value)}" for name, value in self.shown.items()]
        return "  ".join(values)


class _RichBar(Bar):
    def __init__(self, *args: Any, console: Console) -> None:
        super().__init__(*args)
        # a narrow bar leaves room for the values at 80 columns
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=18),
            TaskProgressColumn(),
            TextColumn("{task.fields[time]}", markup=False, style="cyan"),
            TextColumn("{task.fields[details]}", markup=False),
            console=console,
        )
        self._task = self._progress.add_task(
            self.label, total=self.total, completed=self.done, time="", details=""
        )
        self._progress.start()

    def update(self, n: float = 1, **shown: Any) -> None:
        super().update(n, **shown)
        self._show(self.left())

    def finish(self) -> None:
        self._show(f"in {clock(time.monotonic() - self._start)}")
        self._progress.stop()

    def _show(self, time_text: str) -> None:
        self._progress.update(
            self._task, completed=self.done, time=time_text, details=self.details()
        )


class _PlainBar(Bar):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._spoke = self._start

    def update(self, n: float = 1, **shown: Any) -> None:
        super().update(n, **shown)
        if time.monotonic() - self._spoke >= PLAIN_EVERY_SECONDS:
            self._speak(self.left())

    def finish(self) -> None:
        self._speak(f"in {clock(time.monotonic() - self._start)}")

    def _speak(self, time_text: str) -> None:
        self._spoke = time.monotonic()
        count = f"{self.done:g}" if self.total is None else f"{self.done:g}/{self.total:g}"
        parts = [f"{self.label}: {count} {self.unit}", time_text, self.details()]
        print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main_process() -> bool:
    """Whether this is rank 0, the one that speaks; true outside a launcher."""
    return (os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0") == "0"


def _silent() -> bool:
    return os.environ.get("SPECTRAIN_QUIET", "") not in ("", "0") or not main_process()


def say(text: str) -> None:
    """A line of what is going on, where a bar would be shown."""
    if not _silent():
        print(text, file=sys.stderr, flush=True)


def terminal() -> Console | None:
    """Where lines that stay in place may be shown: stderr, if it is a terminal that can move its
    cursor and nobody asked for silence."""
    console = Console(stderr=True)
    return console if console.is_interactive and not _silent() else None


@contextmanager
def progress(
    total: float | None = None, label: str = "", unit: str = "items", done: float = 0
) -> Iterator[Bar]:
    """A bar to move by hand: `with progress(100, "train", "steps") as bar: bar.update(1, loss=x)`.

    total: units of the whole stage, None when unknown; done: units finished by an earlier run.
    """
    console = terminal()
    if console is not None:
        bar = _RichBar(label, total, unit, done, console=console)
    elif _silent():
        bar = Bar(label, total, unit, done)
    else:
        bar = _PlainBar(label, total, unit, done)
    try:
        yield bar
    finally:
        bar.finish()

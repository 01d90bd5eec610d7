"""What a person sees of a run: lines that stay in place on a terminal, plain ones elsewhere.

Rows are those of metrics.jsonl: of training steps, and of evaluations on held-out rows. The shares
that are shown of both are α over all positions of the replies (marginal), so they compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import psutil
import torch
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spectrain.core.pace import Pace, clock
from spectrain.core.progress import Bar, progress, say, terminal

RAMP = "▁▂▃▄▅▆▇█"
CURVE = 32  # characters of the loss curve
LABEL = 10  # characters before each line
DRAW_SECONDS = 0.25  # at least, between two steps that are shown
POSITIONS = 8  # that fit on a line of 80 columns


@contextmanager
def watch(
    steps: int,
    done: int,
    rows: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> Iterator[Lines | Panel]:
    """The view of a run of `steps` steps, `done` of which an earlier part has taken with these
    rows; silent on all processes but rank 0."""
    console = terminal()
    if console is None:
        with progress(steps, "train", "steps", done) as bar:
            yield Lines(bar, evaluations)
    else:
        panel = Panel(steps, done, rows, evaluations, device)
        # stdout is for results; what is printed on stderr appears above the lines
        way = {"auto_refresh": False, "redirect_stdout": False}
        with Live(console=console, get_renderable=panel.render, **way) as live:
            live.refresh()
            panel.changed = live.refresh
            yield panel


class Lines:
    """A plain line now and then, and one for each evaluation."""

    def __init__(self, bar: Bar, evaluations: Sequence[Mapping[str, Any]] = ()) -> None:
        self._bar, self._evaluations = bar, list(evaluations)

    def step(self, step: int, loss: float | None) -> None:
        """`step` steps are done; loss: the mean of the last few."""
        self._bar.update(1)

    def row(self, row: Mapping[str, Any], accepted: Sequence[float | None], skipped: int) -> None:
        """A row of metrics; accepted: by draft position; skipped: steps, altogether."""
        first = "/".join(f"{value:.2f}" for value in accepted[:3] if value is not None)
        shown = {"loss": row["loss"], "acc": first, "tok/s": round(row["tokens_per_second"])}
        self._bar.update(0, **{name: value for name, value in shown.items() if value is not None})

    def measuring(self) -> None:
        """An evaluation begins."""

    def heldout(self, row: Mapping[str, Any]) -> None:
        """An evaluation is done."""
        self._evaluations.append(row)
        say(f"held-out: {tau_line(self._evaluations)}")

    def saved(self, step: int) -> None:
        """A checkpoint is written."""


class Panel:
    """At most six lines, of at most 80 columns. They are drawn when there is news, so nothing
    flickers in between; `changed` does it."""

    def __init__(
        self,
        steps: int,
        done: int,
        rows: Sequence[Mapping[str, Any]],
        evaluations: Sequence[Mapping[str, Any]],
        device: torch.device,
    ) -> None:
        self._steps, self._first, self._done, self._device = steps, done, done, device
        self._pace = Pace()
        self._losses = [row["loss"] for row in rows if row["loss"] is not None]
        self._loss: float | None = None
        self._accepted: Sequence[float | None] = ()
        self._evaluations = list(evaluations)
        self._facts: list[str] = []
        self._saved = done
        self._measuring = False
        self.changed: Callable[[], Any] = lambda: None
        self._start = self._drawn = time.monotonic()

    def step(self, step: int, loss: float | None) -> None:
        """See Lines."""
        self._done, self._loss = step, loss
        self._pace.reached(step - self._first)
        if time.monotonic() - self._drawn >= DRAW_SECONDS:
            self._draw()

    def row(self, row: Mapping[str, Any], accepted: Sequence[float | None], skipped: int) -> None:
        """See Lines."""
        if row["loss"] is not None:
            self._losses.append(row["loss"])
        self._accepted = accepted
        self._facts = [f"{row['tokens_per_second']:,.0f} tokens/s", memory(self._device)]
        self._facts += [f"{skipped} step{'s' if skipped > 1 else ''} skipped"] if skipped else []

    def measuring(self) -> None:
        """See Lines."""
        self._measuring = True
        self._draw()

    def heldout(self, row: Mapping[str, Any]) -> None:
        """See Lines."""
        self._evaluations.append(row)
        self._measuring = False
        self._draw()

    def saved(self, step: int) -> None:
        """See Lines."""
        self._saved = step
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self.changed()

    def render(self) -> RenderableType:
        """The lines as they are now."""
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="dim", min_width=LABEL, no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        for label, content in self._lines():
            grid.add_row(label, content)
        return Group(self._head(), grid)

    def _head(self) -> Table:
        head = Table.grid(padding=(0, 1))
        head.add_column(style="dim", min_width=LABEL)
        bar = ProgressBar(self._steps, self._done, width=28)
        count = f"{self._done:,}/{self._steps:,} steps"
        head.add_row(
            "train", bar, count, f"{self._done / self._steps:.0%}", Text(self._time(), "cyan")
        )
        return head

    def _time(self) -> str:
        if self._measuring:
            return "measuring"
        if self._done == self._steps:
            return f"in {clock(time.monotonic() - self._start)}"
        left = self._pace.left(self._steps - self._done)
        return "" if left is None else f"{clock(left)} left"

    def _lines(self) -> Iterator[tuple[str, RenderableType]]:
        if self._loss is not None:
            first = (
                f"  first {self._losses[0]:.3f}"
                if self._losses[:1] not in ([], [self._loss])
                else ""
            )
            curve = sparkline(self._losses, CURVE)
            yield "loss", Text.assemble((f"{self._loss:.3f}  ", "bold"), (curve, "cyan"), first)
        if self._accepted:
            yield "α train", positions(self._accepted)
        if self._evaluations:
            yield "α held-out", positions(self._evaluations[-1]["heldout"]["marginal"])
            yield "", Text(tau_line(self._evaluations))
        facts = [*self._facts, *([f"checkpoint {self._saved:,}"] if self._saved else [])]
        if facts:
            yield "speed", Text("  ".join(facts))


def tau_line(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """τ of the last evaluation, and the best so far where that is another one."""
    last, best = evaluations[-1], max(evaluations, key=lambda row: row["heldout"]["tau"] or 0)
    line = f"τ {_tau(last)}, γ = {last['heldout']['draft']}, after step {last['step']:,}"
    return line if best is last else f"{line}; best {_tau(best)} after step {best['step']:,}"


def _tau(row: Mapping[str, Any]) -> str:
    return "–" if (tau := row["heldout"]["tau"]) is None else f"{tau:.3f}"


def positions(shares: Sequence[float | None]) -> Text:
    """Shares by draft position, each a bar of one character and its number."""
    text = Text()
    for share in shares[:POSITIONS]:
        if share is None:
            text.append("– –     ")
        else:
            text.append(level(share), "green").append(f" {share:.2f}  ")
    text.append("… " if len(shares) > POSITIONS else "")
    return text.append("marginal", "dim")


def level(share: float) -> str:
    """A share from 0 to 1 as a bar of one character."""
    return RAMP[max(0, min(int(share * len(RAMP)), len(RAMP) - 1))]


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve from its lowest value to its highest, means where there are more than `width`."""
    if len(values) < 2:
        return ""
    cuts = [round(place * len(values) / width) for place in range(width + 1)]
    if len(values) <= width:
        cuts = list(range(len(values) + 1))
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join(level((mean - low) / (high - low) if high > low else 0.0) for mean in means)


def memory(device: torch.device) -> str:
    """What this process holds now: of the GPU's memory where it works there, else of the main."""
    if device.type == "cuda":
        return f"{torch.cuda.memory_reserved(device) / 1e9:.1f} GB of GPU memory"
    return f"{psutil.Process().memory_info().rss / 1e9:.1f} GB of memory"

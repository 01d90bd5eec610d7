"""The picture of an evaluation: conditional acceptance by position, τ by draft length."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from spectrain.evaluation.bootstrap import FEWEST

COLOURS = ("#2563a8", "#d9742b", "#3a8f5c", "#8a5aa8", "#b03a48", "#5d6770")
MARKERS = ("o", "s", "^", "D", "v", "P")


def draw(report: Mapping[str, Any]) -> bytes:
    """The report of `recipes.evaluate.run` as a PNG of 1650 × 675 pixels."""
    figure = Figure(figsize=(11, 4.5), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, measured in enumerate(report["temperatures"]):
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "label": f"temperature {measured['temperature']:g}",
        }
        positions = measured["positions"]
        _line(
            left, [p["position"] for p in positions], [p["conditional"] for p in positions], style
        )
        _line(right, [t["draft"] for t in measured["tau"]], measured["tau"], style)
    _finish(left, "Conditional acceptance", "draft position", "accepted when those before were")
    left.set_ylim(0, 1)
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    _finish(right, "Tokens per target forward", "draft length γ", "τ, own token included")
    right.set_ylim(bottom=1)
    figure.suptitle(f"{report['head']} on {report['split']} rows", fontsize=11, color="#333333")
    note = f"bars: 95 % bootstrap over conversations, none from fewer than {FEWEST} of them"
    # A label of the whole figure, so that the layout keeps room for it.
    figure.supxlabel(note, x=0.995, ha="right", fontsize=7, color="#777777")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _line(
    axes: Axes, x: Sequence[int], intervals: Sequence[Mapping[str, Any]], style: Mapping[str, str]
) -> None:
    """Values as a line, intervals as a band; undefined values leave a gap, a single point a bar."""
    known = [(place, i) for place, i in zip(x, intervals, strict=True) if i["value"] is not None]
    axes.plot([p for p, _ in known], [i["value"] for _, i in known], linewidth=2, **style)
    banded = [(p, i) for p, i in known if i["low"] is not None]
    places = [p for p, _ in banded]
    low, high = ([i[end] for _, i in banded] for end in ("low", "high"))
    axes.fill_between(places, low, high, color=style["color"], alpha=0.18, linewidth=0)
    axes.vlines(places, low, high, color=style["color"], alpha=0.6, linewidth=1)


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=12, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)

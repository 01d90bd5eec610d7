"""The table and the picture of `compare`."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from spectrain.evaluation.plot import COLOURS, MARKERS

DEFINITIONS = {
    "params": "of the head, and of them (and of a tuned target) those that were trained, in "
    "millions; what a head shares with its target is not counted",
    "B/token": "bytes of stored features that training this head reads per token of the store",
    "α k": "greedy, conditional: first choices agree at position k when those before it did",
    "τ": "tokens per target forward with chains of γ guesses, greedy, the target's own included; "
    "exact walk over held-out replies, 95 % bootstrap over conversations",
    "speed": "tokens per second over spectrain-plain (this engine without a head) in one race, "
    "95 % bootstrap over prompts",
}

TIMES = ("before", "after")


def rows(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and cells; the heads by τ, the best first, then the baselines."""
    entries, methods = report["entries"], report["race"]["methods"]
    longest = report["draft_tokens"]
    header = ["head", "params", "trained", "tokens", "train s", "B/token"]
    header += [f"α{k + 1}" for k in range(longest)]
    header += [f"τ, γ = {longest}", f"speed, {raced(report)}"]
    cells = []
    for name, entry in sorted(entries.items(), key=lambda pair: -pair[1]["tau"][-1]["value"]):
        alphas = [_plain(p["conditional"], 2) for p in entry["positions"]]
        cells.append(
            [
                name,
                f"{entry['parameters'] / 1e6:.1f}",
                _or_dash(entry["trained_parameters"], lambda n: f"{n / 1e6:.1f}"),
                _or_dash(entry["trained_tokens"], lambda n: f"{n / 1e3:,.0f}k"),
                _or_dash(entry["seconds"], lambda n: f"{n:,.0f}"),
                f"{entry['bytes_per_token']:,.0f}",
                *alphas,
                _interval(entry["tau"][-1]),
                _interval(methods[name]["speedup over spectrain-plain"]),
            ]
        )
    for name in ("spectrain-plain", "transformers"):
        ratio = _interval(methods[name]["speedup over spectrain-plain"])
        cells.append([name, *[""] * (longest + 5), "1", "1" if "plain" in name else ratio])
    return header, cells


def raced(report: Mapping[str, Any]) -> str:
    """The lengths of draft in the race: as asked for, or as a head could."""
    found = {report["race"]["methods"][name]["draft_tokens"] for name in report["entries"]}
    return f"γ {'=' if len(found) == 1 else '≤'} {max(found)}"


def markdown(report: Mapping[str, Any]) -> str:
    """The table for a README, and the sentence that says what was done."""
    header, cells = rows(report)
    lines = [" | ".join(["", *header, ""]).strip(), "|---" * len(header) + "|"]
    lines += [" | ".join(["", *row, ""]).strip() for row in cells]
    found = report["entries"].items()
    notes = [f"{name} {tuned(e['quality'])}" for name, e in found if e["quality"]]
    return "\n".join([*lines, "", ". ".join([headline(report), *notes]), ""])


def headline(report: Mapping[str, Any]) -> str:
    prompts, methods = report["race"]["prompts"], report["race"]["methods"]
    odd = [f"{n} {m['identical']}" for n, m in methods.items() if m["identical"] < prompts]
    same = f"but for {', '.join(odd)} of {prompts}" if odd else "by every head on all of them"
    return (
        f"{report['target']}, {report['store_tokens'] or 0:,} reply tokens in the store, "
        f"{report['heldout_conversations']} held-out conversations, race over {prompts} held-out "
        f"prompts, plain decoding's tokens {same}"
    )


def table(report: Mapping[str, Any]) -> Group:
    """The same for a terminal."""
    header, cells = rows(report)
    costs = ("params", "trained", "tokens", "train s", "B/token")
    places = [header.index(name) for name in costs]
    worth = [place for place in range(len(header)) if place not in places]
    shown = [_table(header, cells, columns) for columns in (worth, [0, *places])]
    notes = [Text(f"{name}: {text}", style="dim") for name, text in DEFINITIONS.items()]
    for name, entry in report["entries"].items():
        if entry["quality"]:
            notes.append(Text(f"{name} {tuned(entry['quality'])}"))
    files = Text(f"table {report['table']}, plot {report['plot']}")
    return Group(Text(headline(report), style="bold"), *shown, *notes, files)


def tuned(quality: Mapping[str, Any]) -> str:
    """What was done to the target that a head was trained along with."""
    before, after = (_or_dash(quality[f"perplexity_{w}"], "{:.3f}".format) for w in TIMES)
    return (
        f"tunes its target: perplexity of {quality['heldout_tokens']:,} held-out reply tokens "
        f"{before} → {after}; α and τ on the tuned target's own replies"
    )


def _table(header: list[str], cells: list[list[str]], columns: list[int]) -> Table:
    """Some columns of the rows that have something to say in them."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(header[column], justify="right" if place else "left", no_wrap=True)
    for row in cells:
        chosen = [row[column] for column in columns]
        if any(chosen[1:]):
            table.add_row(*chosen)
    return table


def draw(report: Mapping[str, Any]) -> bytes:
    """α by position, τ by draft length, speed by head: a PNG of 1950 × 675 pixels."""
    figure = Figure(figsize=(13, 4.5), dpi=150, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    entries = sorted(report["entries"].items(), key=lambda pair: -pair[1]["tau"][-1]["value"])
    for number, (name, entry) in enumerate(entries):
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": "-" if number < len(COLOURS) else "--",
            "label": name,
        }
        known = [p for p in entry["positions"] if p["conditional"]["value"] is not None]
        conditional = [p["conditional"] for p in known]
        _line(left, [p["position"] for p in known], conditional, style)
        _line(middle, [t["draft"] for t in entry["tau"]], entry["tau"], style)
        ratio = report["race"]["methods"][name]["speedup over spectrain-plain"]
        place = len(entries) - 1 - number
        right.barh(place, ratio["value"], color=style["color"], height=0.6)
        if ratio["low"] is not None:
            right.hlines(place, ratio["low"], ratio["high"], color="#222222", linewidth=1.5)
    left.set_ylim(0, 1.02)
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    middle.set_ylim(bottom=1)
    right.axvline(1, color="#555555", linewidth=1)
    library = report["race"]["methods"]["transformers"]["speedup over spectrain-plain"]["value"]
    right.axvline(library, color="#555555", linewidth=1, linestyle=":")
    right.text(library, len(entries) - 0.45, "transformers", fontsize=7, ha="center")
    right.set_yticks(range(len(entries)), [name for name, _ in reversed(entries)])
    _finish(left, "Conditional acceptance", "draft position")
    _finish(middle, "Tokens per target forward", "draft length γ")
    _finish(right, "Speed over spectrain-plain", f"×, {raced(report)}")
    for axes in (left, middle):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend(frameon=False, fontsize=8)
    figure.suptitle(headline(report), fontsize=10, color="#333333")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _line(
    axes: Any, places: list[int], found: list[Mapping[str, Any]], style: dict[str, Any]
) -> None:
    """Values as a line, and their intervals where there are any."""
    axes.plot(places, [one["value"] for one in found], markersize=4, **style)
    for place, one in zip(places, found, strict=True):
        if one["low"] is not None:
            axes.vlines(place, one["low"], one["high"], color=style["color"], alpha=0.4)


def _finish(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, fontsize=12, loc="left")
    axes.set_xlabel(label)
    axes.grid(axis="both", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return "–" if value is None else show(value)


def _plain(interval: Mapping[str, Any], digits: int) -> str:
    return "–" if interval["value"] is None else f"{interval['value']:.{digits}f}"


def _interval(interval: Mapping[str, Any]) -> str:
    if interval["value"] is None:
        return "–"
    if interval["low"] is None:
        return f"{interval['value']:.2f}"
    return f"{interval['value']:.2f} ({interval['low']:.2f}–{interval['high']:.2f})"

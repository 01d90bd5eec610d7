"""The terminal's view of an evaluation: tables of at most 80 columns, the definitions below them.

Takes the report that `recipes.evaluate.run` returns; reads nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from spectrain.evaluation.bootstrap import FEWEST

WIDTH = 80
_DOMAIN_WIDTH = 18


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the report; `console` defaults to stdout, 80 columns wide."""
    (console or Console(width=WIDTH, highlight=False)).print(render(report))


def render(report: Mapping[str, Any]) -> Group:
    """Everything to print, one block for each temperature."""
    head = f"Acceptance of {report['head']} for {report['target']}, {report['split']} rows"
    parts: list[Any] = [Text(head, style="bold")]
    for measured in report["temperatures"]:
        parts += [Text(), Text(_headline(measured), style="bold cyan")]
        if measured["note"]:
            parts.append(Text(f"note: {measured['note']}", style="yellow"))
        if measured["conversations"] < FEWEST:
            few = f"{measured['conversations']} conversations, too few for an interval"
            parts.append(Text(f"note: {few} ({FEWEST} are needed)", style="yellow"))
        parts += [_positions(measured), _tau(measured), Text(_runs(measured), style="dim")]
        if len(measured["domains"]) > 1:
            parts.append(_domains(measured["domains"]))
    parts += [Text(), _definitions(report["definitions"])]
    if report["plot"]:
        parts.append(Text(f"plot {report['plot']}"))
    return Group(*parts)


def number(interval: Mapping[str, float | None], digits: int) -> Text:
    """`0.451 0.430–0.472`, the interval dimmed; a dash where the value is undefined."""
    if interval["value"] is None:
        return Text("—")
    text = Text(f"{interval['value']:.{digits}f}")
    if interval["low"] is not None:
        text.append(f" {interval['low']:.{digits}f}–{interval['high']:.{digits}f}", style="dim")
    return text


def _headline(measured: Mapping[str, Any]) -> str:
    used, usable, rows = (measured[name] for name in ("conversations", "usable", "rows"))
    which = "those answered at it" if used == usable else f"the first of {usable:,}"
    of = f" of {rows:,} rows ({which})" if used < rows else ""
    return (
        f"temperature {measured['temperature']:g}: {used:,} conversations{of}, "
        f"{measured['positions'][0]['anchors']:,} anchors, {measured['tokens']:,} tokens"
    )


def _table(*columns: str) -> Table:
    """The first column to the left, the others to the right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    return table


def _positions(measured: Mapping[str, Any]) -> Table:
    table = _table("position", "marginal", "conditional", "joint", "anchors")
    for row in measured["positions"]:
        cells = [number(row[name], 3) for name in ("marginal", "conditional", "joint")]
        table.add_row(str(row["position"]), *cells, f"{row['anchors']:,}")
    return table


def _tau(measured: Mapping[str, Any]) -> Table:
    table = _table("draft length γ", "τ (tokens per forward)", "target forwards")
    for row in measured["tau"]:
        table.add_row(str(row["draft"]), number(row, 3), f"{row['forwards']:,.0f}")
    return table


def _runs(measured: Mapping[str, Any]) -> str:
    longest = measured["tau"][-1]
    total = sum(longest["runs"]) or 1.0
    shares = ", ".join(f"{m}: {runs / total:.0%}" for m, runs in enumerate(longest["runs"]))
    return f"accepted per forward at γ = {longest['draft']}: {shares}"


def _definitions(definitions: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, text in definitions.items():
        grid.add_row(Text("τ" if name == "tau" else name, style="bold"), Text(text, style="dim"))
    return grid


def _domains(domains: Mapping[str, Mapping[str, Any]]) -> Table:
    longest = next(iter(domains.values()))["tau"][-1]["draft"]
    table = _table("domain", "rows", "tokens", "position 1", f"τ at γ = {longest}")
    table.columns[0].max_width = _DOMAIN_WIDTH
    for name, measured in domains.items():
        table.add_row(
            Text(name, overflow="ellipsis"),
            f"{measured['conversations']:,}",
            f"{measured['tokens']:,}",
            number(measured["positions"][0]["marginal"], 3),
            number(measured["tau"][-1], 2),
        )
    return table

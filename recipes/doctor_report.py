"""The terminal's view of what `doctor` found, at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from spectrain.core.show import WIDTH

_CHECK, _VERDICT = 18, 6
# Of numbers that are not told here.
_LEFT_OUT = ("tau", "joint")


def render(report: Mapping[str, Any]) -> str:
    """Every finding, the acceptance by position, what was tried, definitions, the verdict last."""
    lines = [report["path"], f"layout {report['layout']}, target {report['target']}", ""]
    for finding in report["findings"]:
        lines += _finding(finding)
    if report["acceptance"] and report["acceptance"]["blind"] is not None:
        lines += ["", *_acceptance(report)]
    if report["tried"]:
        lines += ["", *_tried(report)]
    lines.append("")
    for name, text in report["definitions"].items():
        if name not in _LEFT_OUT:
            lines += textwrap.wrap(f"{name}: {text}", WIDTH, subsequent_indent="  ")
    return "\n".join([*lines, "", *textwrap.wrap(_verdict(report), WIDTH)])


def _finding(finding: Mapping[str, str]) -> Iterator[str]:
    indent = " " * (_VERDICT + _CHECK)
    head = f"{finding['verdict']:<{_VERDICT}}{finding['check']:<{_CHECK - 1}} "
    yield from textwrap.wrap(
        head + finding["text"], WIDTH, subsequent_indent=indent, drop_whitespace=True
    )
    if finding["fix"] and finding["verdict"] != "ok":
        yield from textwrap.wrap(
            finding["fix"], WIDTH, initial_indent=f"{indent}→ ", subsequent_indent=indent + "  "
        )


def _acceptance(report: Mapping[str, Any]) -> Iterator[str]:
    found = report["acceptance"]
    yield (
        f"greedy acceptance on {found['conversations']} replies of the target, "
        f"{found['tokens']:,} tokens; {report['dtype']}"
    )
    yield f"  {'position':<10}{'conditional':<24}reached"
    for row in found["positions"]:
        yield f"  {row['position']:<10}{_number(row['conditional']):<24}{row['reached']:,.0f}"
    first = found["positions"][0]
    yield f"  {'blind':<10}{first['blind']:.3f}"
    yield f"  {'above it':<10}{_number(first['over_blind'])}"


def _tried(report: Mapping[str, Any]) -> Iterator[str]:
    yield "each mistake undone by itself: acceptance then at position 1, or at [2]"
    for row in report["tried"]:
        value = "—" if row["accepted"] is None else f"{row['accepted']:.3f}"
        place = f"[{row['position']}] " if row["position"] > 1 else ""
        text = f"  {value:<7}{place}{'LIKELY CAUSE: ' if row['likely'] else ''}{row['name']}"
        yield from textwrap.wrap(text, WIDTH, subsequent_indent=" " * 9)


def _number(interval: Mapping[str, float | None]) -> str:
    if interval["value"] is None:
        return "—"
    if interval["low"] is None:
        return f"{interval['value']:.3f}"
    return f"{interval['value']:.3f}  {interval['low']:.3f}–{interval['high']:.3f}"


def _verdict(report: Mapping[str, Any]) -> str:
    counts = [f"{verdict} {_count(report, verdict)}" for verdict in ("fail", "warn", "note", "ok")]
    told = "NOT HEALTHY" if report["failure"] else "HEALTHY"
    if not report["failure"] and _count(report, "warn"):
        told = "IT RUNS, but see what is warned of"
    return f"{told} ({', '.join(counts)})"


def _count(report: Mapping[str, Any], verdict: str) -> int:
    return sum(finding["verdict"] == verdict for finding in report["findings"])

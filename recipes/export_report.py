"""How `spectrain export` tells its report to a person."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from spectrain.core.show import WIDTH, table


def render(report: dict[str, Any]) -> str:
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{report['family']} for {report['base_model']} as {report['format']} "
        f"(layout {report['layout']}, {report['dtype']})"
    )
    yield f"written to {report['out']}"
    yield from table([one | {"bytes": f"{one['bytes']:,}"} for one in report["files"]], "  ")
    yield "checked:"
    for text in report["checks"]:
        yield from _wrapped(text)
    if not (report["measured"]["alpha"] or report["measured"]["heldout"]):
        yield from _wrapped(
            f"note: no measured acceptance was found in {report['to_measure']['report']}, the page "
            "says so; what measures it, and then export again with --overwrite:",
            "",
        )
        yield f"  {report['to_measure']['command']}"
    if same := report["untouched"]:
        more = f" and {len(same) - 3} more" if len(same) > 3 else ""
        yield from _wrapped(f"note: as in a new head: {', '.join(same[:3])}{more}", "")
    if report["note"]:
        yield from _wrapped(f"note: {report['note']}", "")
    for one in report["launch"]:  # as they are: they are to be copied
        yield ""
        yield f"{one['engine']}:"
        yield textwrap.indent(one["text"], "  ")
        if one["note"]:
            yield from _wrapped(one["note"])
    if report["pushed"]:
        yield ""
        yield f"pushed to {report['pushed']}"


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent="  ", break_long_words=False
    )

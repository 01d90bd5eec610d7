"""A report as plain text for people: at most 80 columns, readable without colours."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

WIDTH = 80
# facts for machines, found in the JSON file
_LEFT_OUT = ("provenance", "environment")


def show(report: Mapping[str, Any]) -> str:
    """Scalars as `name  value`, mappings indented, lists of mappings as tables."""
    kept = {key: value for key, value in report.items() if key not in _LEFT_OUT}
    return "\n".join(_block(kept, ""))


def _block(tree: Mapping[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    plain = [str(key) for key, value in tree.items() if not _nested(value)]
    width = max((len(key) for key in plain), default=0)
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{key}", *_block(value, indent + "  ")]
        elif _is_rows(value):
            lines += [f"{indent}{key}", *table(value, indent + "  ")]
        else:
            lines += _wrapped(f"{indent}{key!s:<{width}}  ", _text(value))
    return lines


def table(rows: list[Mapping[str, Any]], indent: str = "") -> list[str]:
    """Rows under one header; a table wider than WIDTH becomes one block for each row."""
    columns = list(dict.fromkeys(str(key) for row in rows for key in row))
    cells = [columns] + [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    if len(indent) + sum(widths) + 2 * len(widths) > WIDTH:
        return [line for row in rows for line in ("", *_block(row, indent))][1:]
    return [
        (indent + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True))).rstrip()
        for row in cells
    ]


def _nested(value: Any) -> bool:
    return (isinstance(value, Mapping) and bool(value)) or _is_rows(value)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value) or "-"
    if isinstance(value, Mapping):  # inside a table cell, or empty
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items()) or "-"
    return str(value)


def _wrapped(head: str, text: str) -> list[str]:
    """`head` and `text` on one line if they fit, else the text wrapped below, indented."""
    if len(head) + len(text) <= WIDTH and "\n" not in text:
        return [(head + text).rstrip()]
    indent = " " * (len(head) - len(head.lstrip()) + 2)
    lines = [head.rstrip()]
    for paragraph in text.split("\n"):
        wrapped = textwrap.wrap(
            paragraph,
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
        lines += wrapped or [""]
    return lines

"""Markdown and its metadata, of texts that nobody here wrote: none of them can break out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml


def plain(text: object) -> str:
    """A text as it is, on one line, whatever characters it has."""
    line = "".join(c if c.isprintable() else " " for c in str(text))
    return re.sub(r"([\\`*_\[\]<>#|~&$])", r"\\\1", " ".join(line.split()))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The first column to the left, the others to the right; cells are taken as texts."""
    marks = [":--", *("--:" for _ in header[1:])]
    lines = [[plain(cell) for cell in row] for row in (header, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (lines[0], marks, *lines[1:]))


def listed(pairs: Iterable[tuple[str, object]]) -> str:
    return "\n".join(f"* {plain(name)}: {plain(value)}" for name, value in pairs)


def code(text: str, language: str) -> str:
    """A block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def front_matter(metadata: Mapping[str, Any]) -> str:
    """The block that a model hub reads; what is None or empty is left out."""
    kept = {key: value for key, value in metadata.items() if value not in (None, [], "")}
    text = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, default_flow_style=False)
    return f"---\n{text}---"

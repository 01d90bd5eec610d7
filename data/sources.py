"""Where rows come from: the lines of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spectrain.core.errors import SpectrainError
from spectrain.core.files import disk_errors


def file_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(file:line, content) of the lines that are not blank."""
    if not path.exists():
        raise SpectrainError("no such file", where=str(path), fix="check --prompts")
    if path.is_dir():
        raise SpectrainError("a folder, not a JSONL file", where=str(path), fix="check --prompts")
    with disk_errors(path), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", line

"""What our own exports say of themselves, in a file beside the weights: held against what is there.

Other writers leave no such file; then there is nothing to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json
from spectrain.core.target import Target
from spectrain.export.found import Found
from spectrain.export.layout import CONFIG, Finding

RECORD = "spectrain-export.json"
_LONGEST = 10_000_000  # bytes


def findings(found: Found, target: Target) -> Iterator[Finding]:
    """Whether weights and config are those that were exported, and the target that of the head."""
    record = read(found)
    if record is None:
        return
    files = record.get("files")
    changed = []
    for path in (*found.files, found.path / CONFIG):
        known = files.get(path.name) if isinstance(files, dict) else None
        if isinstance(known, dict) and path.is_file() and found.sha256(path) != known.get("sha256"):
            changed.append(path.name)
    if changed:
        text = f"changed since they were exported: {', '.join(sorted(changed))}"
        yield Finding("checksums", "fail", text, f"get them again, or remove {RECORD}")
    else:
        yield Finding("checksums", "ok", "the files are those that were exported")
    made_for = record.get("target")
    if isinstance(made_for, dict) and made_for.get("fingerprint") != target.fingerprint:
        text = (
            f"exported for {made_for.get('name')} ({made_for.get('fingerprint')}), this target is "
            f"{target.name} ({target.fingerprint})"
        )
        yield Finding("made for", "warn", text, "expect fewer drafts to be accepted, if any")


def steps(found: Found) -> int | None:
    """For how many draft steps the exported head was trained, where that is told."""
    told = (read(found) or {}).get("steps")
    return told if type(told) is int and told >= 1 else None


def read(found: Found) -> dict[str, Any] | None:
    """The record beside the weights, None where there is none that can be read."""
    path = found.path / RECORD
    try:
        content = read_json(path, _LONGEST) if path.is_file() else None
    except SpectrainError:
        return None
    return content if isinstance(content, dict) else None

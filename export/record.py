"""What our own exports say of themselves, in a file beside the weights: held against what is there.

Other writers leave no such file; then there is nothing to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json
from spectrain.core.target import Target
from spectrain.export.card import README
from spectrain.export.found import Found
from spectrain.export.layout import CONFIG, Finding
from spectrain.export.stored import names_of

RECORD = "spectrain-export.json"
_LONGEST = 10_000_000  # bytes


def findings(found: Found, target: Target) -> Iterator[Finding]:
    """Whether the files are those that were exported, and the target that of the head."""
    if not (found.path / RECORD).is_file():
        return
    record = read(found) or {}
    files = record.get("files")
    if isinstance(files, dict) and files:
        yield from _checksums(found, files)
    else:
        text = f"{RECORD} names no files: nothing tells whether they are those that were exported"
        yield Finding("checksums", "warn", text, f"get the export again, or remove {RECORD}")
    made_for = record.get("target")
    if isinstance(made_for, dict) and made_for.get("fingerprint") != target.fingerprint:
        text = (
            f"exported for {made_for.get('name')} ({made_for.get('fingerprint')}), this target is "
            f"{target.name} ({target.fingerprint})"
        )
        yield Finding("made for", "warn", text, "expect fewer drafts to be accepted, if any")


def _checksums(found: Found, files: dict[str, Any]) -> Iterator[Finding]:
    """Every file of the folder beside those of the record [files]; its page is there to be edited,
    and what is hidden is of whoever copied it."""
    here = {one.name: one for one in found.path.iterdir() if one.is_file()}
    here = {name: one for name, one in here.items() if not name.startswith(".")}
    known = files.keys() - {README}
    changed = {
        name
        for name in known & here.keys()
        if not isinstance(files[name], dict)
        or found.sha256(here[name]) != files[name].get("sha256")
    }
    gone, new = known - here.keys(), here.keys() - files.keys() - {README, RECORD}
    # What the head is made of; the tokenizer and the like lie beside it.
    made_of = {CONFIG, *(one.name for one in found.files)}
    made_of |= {name for name in known | here.keys() if name.endswith(".index.json")}
    said = False
    for text, names, other in (
        ("changed since they were exported", changed, "warn"),
        ("exported, and no longer here", gone, "warn"),
        ("not of the export", new, "note"),
    ):
        for verdict, some in (("fail", names & made_of), (other, names - made_of)):
            if some:
                fix = "" if verdict == "note" else f"get the export again, or remove {RECORD}"
                said = said or bool(fix)
                yield Finding("checksums", verdict, f"{text}: {_told(some)}", fix)
    if not said:
        yield Finding("checksums", "ok", "the files are those that were exported")


def _told(names: set[str]) -> str:
    """In one line, whatever a record says."""
    return names_of([repr(name[:80])[1:-1] for name in names])


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

"""Formats and layouts by name; a module is imported only when it is asked for.

WRITERS: format → family → writer. READERS: every layout that can be read.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

from spectrain.core.errors import SpectrainError
from spectrain.export.found import Found
from spectrain.export.layout import Reader, Writer
from spectrain.heads.registry import FAMILIES

OWN = "spectrain.export.own"

WRITERS: dict[str, dict[str, str]] = {
    "spectrain": dict.fromkeys(FAMILIES, f"{OWN}:OwnWriter"),
    "speculators": {"eagle3": "spectrain.export.speculators:SpeculatorsWriter"},
    "medusa": {"medusa": "spectrain.export.medusa:MedusaWriter"},
    "hf": {"draft": "spectrain.export.causal_lm:CausalLmWriter"},
    "eagle": {
        **dict.fromkeys(("eagle1", "eagle2"), "spectrain.export.eagle1:SafeAiEagle1Writer"),
        "eagle3": "spectrain.export.eagle3_write:SafeAiEagle3Writer",
    },
    "vllm": {
        **dict.fromkeys(("eagle1", "eagle2"), "spectrain.export.eagle1:VllmEagle1Writer"),
        "eagle3": "spectrain.export.eagle3_write:VllmEagle3Writer",
    },
    "sglang": {
        **dict.fromkeys(("eagle1", "eagle2"), "spectrain.export.eagle1:SglangEagle1Writer"),
        "eagle3": "spectrain.export.eagle3_write:SglangEagle3Writer",
    },
    "trtllm": {"eagle3": "spectrain.export.eagle3_write:TrtllmEagle3Writer"},
    "mtp-deepseek": {"mtp-sequential": "spectrain.export.mtp_engines:DeepseekWriter"},
    "mtp-mimo": {"mtp-sequential": "spectrain.export.mtp_engines:MimoWriter"},
    "mtp-qwen3next": {"mtp-sequential": "spectrain.export.mtp_engines:QwenNextWriter"},
    "mtp-transformers": {"mtp-sequential": "spectrain.export.mtp_transformers:TransformersWriter"},
}
READERS: dict[str, str] = {
    "spectrain": f"{OWN}:OwnReader",
    "speculators": "spectrain.export.speculators:SpeculatorsReader",
    "medusa": "spectrain.export.medusa:MedusaReader",
    "hf": "spectrain.export.causal_lm:CausalLmReader",
    "eagle1": "spectrain.export.eagle1:Eagle1Reader",
    "eagle3": "spectrain.export.eagle3:Eagle3Reader",
    "mtp-deepseek": "spectrain.export.mtp_layouts:DeepseekReader",
    "mtp-mimo": "spectrain.export.mtp_layouts:MimoReader",
    "mtp-qwen3next": "spectrain.export.mtp_layouts:QwenNextReader",
    "mtp-transformers": "spectrain.export.mtp_layouts:TransformersReader",
}


def writer(format: str, family: str) -> Writer:
    """Raises SpectrainError for an unknown format, or one that has no place for this family."""
    if format not in WRITERS:
        near = difflib.get_close_matches(format, WRITERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {'; '.join(_formats())}"
        raise SpectrainError(f"unknown format {format!r}", where="--format", fix=hint)
    if family not in WRITERS[format]:
        others = [name for name, families in WRITERS.items() if family in families]
        raise SpectrainError(
            f"the format {format} has no place for a head of family {family}",
            where="--format",
            fix=f"formats that have one: {', '.join(others)}",
        )
    return _made(WRITERS[format][family])


def reader_of(found: Found) -> Reader:
    """The layout of a folder. Raises SpectrainError if it is none that is known."""
    for place in READERS.values():
        if (reader := _made(place)).recognises(found):
            return reader
    names = sorted(found.shapes)
    raise SpectrainError(
        f"no known layout of a head (its tensors: {', '.join(names[:4])}"
        + (f" and {len(names) - 4} more)" if len(names) > 4 else ")"),
        where=str(found.path),
        fix=f"known layouts: {', '.join(READERS)}",
    )


def _formats() -> Iterator[str]:
    """Each with the families that it has a place for."""
    for name, families in WRITERS.items():
        every = families.keys() >= FAMILIES.keys()
        yield f"{name} ({'every family' if every else ', '.join(families)})"


@cache
def _made(place: str) -> Any:
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)()

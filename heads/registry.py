"""Families by name; a family's module is imported only when it is asked for."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Literal

from spectrain.core.errors import SpectrainError
from spectrain.heads.base import DraftHead

FAMILIES = {
    "eagle1": "spectrain.heads.eagle1:Eagle1Head",
    "eagle2": "spectrain.heads.eagle2:Eagle2Head",
    "eagle3": "spectrain.heads.eagle3:Eagle3Head",
    "medusa": "spectrain.heads.medusa:MedusaHead",
    "mtp-parallel": "spectrain.heads.mtp_parallel:MtpParallelHead",
    "mtp-sequential": "spectrain.heads.mtp_sequential:MtpSequentialHead",
    "draft": "spectrain.heads.draft_model:DraftModelHead",
}


def family(name: str) -> type[DraftHead]:
    """The class of a head family. Raises SpectrainError for an unknown name."""
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(FAMILIES)}"
        raise SpectrainError(f"unknown head family {name!r}", fix=hint)
    module, attribute = FAMILIES[name].split(":")
    return getattr(import_module(module), attribute)


def kept_for(name: str) -> tuple[bool, Literal["everywhere", "replies"]]:
    """What a store for this family has to hold: (auxiliary states, where the last state is kept).
    Raises SpectrainError for an unknown name."""
    kind = family(name)
    return kind.reads_aux, "everywhere" if kind.reads_last_everywhere else "replies"

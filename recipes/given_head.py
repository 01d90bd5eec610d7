"""A head as a command is given it: our own, or a language model that drafts as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch

from spectrain.core.errors import SpectrainError
from spectrain.export.formats import reader_of
from spectrain.export.found import Found
from spectrain.heads.base import DraftHead
from spectrain.heads.io import load_head

_LOADED = ("spectrain", "hf")  # layouts that are loaded as they are


def given_head(path: Path, target: str, device: torch.device | str = "cpu") -> DraftHead:
    """`load_head`; a folder in the layout of another engine is refused with the command that makes
    it usable here. target: what the command calls the head's target."""
    try:
        return load_head(path, device=device)
    except SpectrainError:
        layout = _layout(path)
        if layout is None:
            raise
        given = ["spectrain", "import", str(path), "--target", target, "--out", "RUN"]
        raise SpectrainError(
            f"this is a head in the layout {layout}",
            where=str(path),
            fix=f"`{shlex.join(given)}` makes it usable here",
        ) from None


def _layout(path: Path) -> str | None:
    """Another engine's layout that lies in `path`; None for ours, and for what is no head."""
    if not path.exists():  # a name: nothing is fetched for the sake of a message
        return None
    try:
        name = reader_of(Found.open(path)).name
    except SpectrainError:
        return None
    return None if name in _LOADED else name

"""Whether an export is what it should be: what its engine expects, and the head that went in.

Whatever is wrong here is our own mistake, and nobody would notice it where the head runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.core.target import Target
from spectrain.export.conformance import problems
from spectrain.export.formats import reader_of
from spectrain.export.found import Found
from spectrain.export.layout import Encoded, Writer, load
from spectrain.export.parity import differences
from spectrain.heads.base import DraftHead


def conform(made: Writer, encoded: Encoded) -> str:
    """What an export was held against: what its engines' loaders expect. Raises RunFailed."""
    for engine, architecture in made.facts:
        if found := problems(encoded, (engine, architecture)):
            _fail(f"{engine} would not load it as {architecture}: {_some(found)}")
    if not made.facts:
        return "no engine's own list of tensors is known for this format"
    loaded = " and ".join(f"{engine} loads for {name}" for engine, name in made.facts)
    return f"names and shapes are those that {loaded}"


def read_back(
    made: Writer, head: DraftHead, target: Target, folder: Path, dtype: torch.dtype | None
) -> list[str]:
    """Compare what lies in `folder` with the bound head; returns what was compared. Raises
    RunFailed.

    dtype: of the written tensors, None as they are. The head is float32 afterwards, rounded to it.
    """
    try:
        found = Found.open(folder)
        reader = reader_of(found)
        if type(reader) is not type(made.reader):
            raise SpectrainError(f"it reads as {reader.name}")
        again = load(reader, found, target)
    except SpectrainError as error:
        _fail(f"what was written cannot be read back as {made.reader.name}: {error.what}")
    told = f", rounded to {str(dtype).removeprefix('torch.')} both" if rounded(head, dtype) else ""
    for one in (head, again):
        _round(one.float().eval(), dtype)
    if other := differences(head, again, target):
        _fail(f"what was written as {made.reader.name} is not the head: {_some(other)}")
    steps = min(head.config.steps, head.longest_draft)
    return [
        f"read back from the disk as {reader.name}: {len(head.state_dict())} tensors are the same"
        f"{told}",
        f"its drafts are the same to the last bit: {steps} steps behind random prompts",
    ]


def rounded(head: DraftHead, dtype: torch.dtype | None) -> bool:
    """Whether a file of this type holds other numbers than the head has."""
    if dtype is None:
        return False
    values = [value for value in head.state_dict().values() if value.is_floating_point()]
    return any(not torch.equal(value, value.to(dtype).to(value.dtype)) for value in values)


def beyond(head: DraftHead, dtype: torch.dtype) -> list[str]:
    """Names of the weights that would become infinite as this type."""
    return [
        name
        for name, value in head.state_dict().items()
        if value.is_floating_point() and not torch.isfinite(value.to(dtype)).all()
    ]


@torch.no_grad()
def _round(head: DraftHead, dtype: torch.dtype | None) -> None:
    """To what a file of this type can hold."""
    for value in head.state_dict().values():
        if dtype is not None and value.is_floating_point():
            value.copy_(value.to(dtype))


def _some(texts: Sequence[str]) -> str:
    return "; ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")


def _fail(what: str) -> NoReturn:
    fix = "nothing was written; this is a mistake of spectrain, please report it"
    raise RunFailed(what, fix=fix)

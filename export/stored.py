"""Checks of the tensors as they are stored, whatever their layout; only one is in memory at a time.

D draft vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.export.found import Found
from spectrain.export.layout import Finding, Suspect

D2T, T2D = "d2t", "t2d"
FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MAP_FIX = "store offsets in d2t: target id of draft token i, less i"
_SHOWN = 4  # names in a finding


def types(found: Found) -> Finding:
    """What weights are stored as, by the headers alone."""
    weights = _weights(found)
    kinds = Counter(FLOATS.get(kind, kind) for kind in weights.values())
    told = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
    odd = [name for name, kind in weights.items() if kind not in FLOATS]
    if odd:
        text = f"no floating numbers: {names_of(odd)} ({told})"
        return Finding("types", "fail", text, "dequantise the head, or export it again")
    if "float64" in kinds:
        return Finding("types", "warn", f"{told}: no engine computes in float64", "store float32")
    return Finding("types", "note" if len(kinds) > 1 else "ok", told)


def values(found: Found) -> Iterator[Finding]:
    """Values that are no numbers, and the two halves of a draft vocabulary; reads every tensor."""
    bad = []
    try:
        for name in (n for n, kind in _weights(found).items() if kind in FLOATS):
            if not torch.isfinite(found.read(name)).all():
                bad.append(name)
        maps = [_map(found)] if {D2T, T2D} <= found.shapes.keys() else []
    except SpectrainError as error:
        yield Finding("values", "fail", str(error), error.fix or "get the file again")
        return
    except MemoryError:  # what lies beside a head may be of any size
        text = f"{name} {found.shapes[name]} does not fit into memory"
        yield Finding("values", "fail", text, "leave it out, if the head does not need it")
        return
    if bad:
        text = f"NaN or infinite numbers in {names_of(bad)}"
        yield Finding("values", "fail", text, "train again, or take an earlier checkpoint")
    else:
        yield Finding("values", "ok", "every number is finite")
    yield from maps


def _weights(found: Found) -> dict[str, str]:
    """name → type"""
    return {name: kind for name, kind in found.dtypes.items() if name not in (D2T, T2D)}


def _map(found: Found) -> Finding:
    offsets, held = _halves(found)
    ids = torch.arange(len(offsets)) + offsets
    if torch.equal(ids, held):
        text = f"{len(ids):,} of {found.shapes[T2D][0]:,} tokens, both halves of the map agree"
        return Finding("draft vocabulary", "ok", text)
    if torch.equal(offsets, held):
        text = "d2t holds the target's ids themselves; its numbers are read as offsets"
        return Finding("draft vocabulary", "fail", text, _MAP_FIX)
    text = f"d2t and t2d name different tokens (t2d has {len(held):,}, d2t {len(ids):,})"
    return Finding("draft vocabulary", "fail", text, "export the head again, its map is damaged")


def _halves(found: Found) -> tuple[Tensor, Tensor]:
    """What d2t holds [D], and the ids that t2d names."""
    return found.read(D2T).long().flatten(), found.read(T2D).flatten().nonzero().flatten()


def suspects(found: Found) -> Iterator[Suspect]:
    """Mistakes of what is stored, undone."""
    if {D2T, T2D} <= found.shapes.keys():
        offsets, held = _halves(found)
        if torch.equal(offsets, held):
            mended = {D2T: held - torch.arange(len(held))}
            yield Suspect("d2t holds absolute ids", _MAP_FIX, found.edited(tensors=mended))


def names_of(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more

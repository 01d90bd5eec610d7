"""One safetensors file, read by its header without trusting a byte of it.

Such a file is a length (8 bytes), a JSON header with type, shape and offsets of each tensor, and
their bytes, one behind the other without a gap. Memory is taken for the header, and for a tensor
that is asked for: what a file claims and does not hold is refused before.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.core.files import disk_errors

LONGEST_HEADER = 100_000_000  # bytes, the format's own bound
_LONGEST_NAME, _MOST_DIMENSIONS, _MOST_VALUES = 512, 16, 1 << 62
_LENGTH = 8  # bytes that say how long the header is
# Types that can be read; the others of the format can be told of, with their bits.
TYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
FLOATING, WHOLE = ("F32", "BF16", "F16"), ("I64", "I32", "BOOL")
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **{"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32},
    **{"I64": 64, "U64": 64, "F64": 64, "C64": 64},
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file: the place of its bytes, its type and shape.

    dtype: as safetensors spells it
    """

    path: Path
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]


def header(path: Path) -> dict[str, Entry]:
    """name → place. Raises SpectrainError for a file that is missing, or not as it should be."""
    try:
        with disk_errors(path), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(_LENGTH))
            if length > LONGEST_HEADER:
                raise ValueError(f"its header claims to be {length:,} bytes long")
            if length > size - _LENGTH:
                raise ValueError("it ends within the header")
            text = file.read(length).decode()
        content = json.loads(text, object_pairs_hook=_without_repeats)
        if not isinstance(content, dict):
            raise ValueError("its header is no JSON object")
        content.pop("__metadata__", None)
        entries = {name: _entry(path, _LENGTH + length, name, v) for name, v in content.items()}
        _require_no_gap(entries, _LENGTH + length, size)
        return entries
    except FileNotFoundError:
        raise SpectrainError("a file of the checkpoint is missing", where=str(path)) from None
    except (ValueError, RecursionError, struct.error) as error:
        raise SpectrainError(
            f"not a whole safetensors file ({error})", where=str(path), fix="get it again"
        ) from None


def require_readable(name: str, dtype: str, where: str) -> None:
    """Raise SpectrainError for a type that no weights are read in."""
    if dtype not in TYPES:
        raise SpectrainError(
            f"{name} is stored as {dtype}",
            where=where,
            fix="use a checkpoint in bfloat16, float16 or float32 (dequantise it first)",
        )


def read(name: str, entry: Entry) -> Tensor:
    """The tensor, in memory of its own."""
    require_readable(name, entry.dtype, str(entry.path))
    content = bytearray(entry.end - entry.start)
    with disk_errors(entry.path), open(entry.path, "rb") as file:
        file.seek(entry.start)
        if file.readinto(content) != len(content):
            raise SpectrainError("the file became shorter while it was read", where=str(entry.path))
    if not content:
        return torch.empty(entry.shape, dtype=TYPES[entry.dtype])
    return torch.frombuffer(content, dtype=TYPES[entry.dtype]).view(entry.shape)


def overwrite(entries: Mapping[str, Entry], tensors: Mapping[str, Tensor]) -> None:
    """Replace the bytes of some tensors; shapes are those that `read` gave."""
    for name, value in tensors.items():
        entry = entries[name]
        stored = value.detach().cpu().to(TYPES[entry.dtype]).contiguous()
        content = stored.flatten().view(torch.uint8).numpy().tobytes()
        if tuple(value.shape) != entry.shape or len(content) != entry.end - entry.start:
            raise RuntimeError(f"{name}: {tuple(value.shape)} is not {entry.shape}")
        with open(entry.path, "r+b") as file:
            file.seek(entry.start)
            file.write(content)


def require_name(name: Any) -> None:
    """Raise ValueError for a tensor's name that cannot be printed in one line."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise ValueError(f"the name {str(name)[:40]!r} of a tensor is none")


def require_shape(name: str, shape: Any) -> None:
    """Raise ValueError for sizes that are none, or whose product is beyond any memory."""
    sizes = isinstance(shape, (list, tuple)) and all(type(n) is int and n >= 0 for n in shape)
    if not sizes or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"the shape of {name} is none")
    if math.prod(max(1, n) for n in shape) > _MOST_VALUES:
        raise ValueError(f"the shape of {name} is beyond any memory")


def _entry(path: Path, start: int, name: str, value: Any) -> Entry:
    require_name(name)
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} has no type, shape and offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{name} has the unknown type {str(dtype)[:20]!r}")
    require_shape(name, shape)
    if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int]:
        raise ValueError(f"{name} has no two offsets")
    first, last = offsets
    if first < 0 or (last - first) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"the bytes of {name} are not {dtype} × {tuple(shape)}")
    return Entry(path, start + first, start + last, dtype, tuple(shape))


def _require_no_gap(entries: Mapping[str, Entry], start: int, size: int) -> None:
    """Every byte behind the header belongs to one tensor."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != start:
            raise ValueError(f"{name} overlaps another tensor or lies behind a gap")
        start = entry.end
    if start != size:
        raise ValueError(f"it is {size:,} bytes long, its header tells of {start:,}")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"{name[:40]!r} is there twice")
        content[name] = value
    return content

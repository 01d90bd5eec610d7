"""The tensors of a checkpoint folder by name, as they lie in its safetensors files.

`transformers` drops the tensors of MTP layers when it loads a model, so they are read here, and
written back in place: a safetensors file is a length, a JSON header with the offsets, and bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LENGTH = 8  # bytes that say how long the header is
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Entry:
    """One tensor: its file, the place of its bytes in it, its type and shape."""

    path: Path
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """All tensors of a folder; nothing but headers is read until one is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, Entry] = {}
        for name in self._files():
            self.entries.update(_header(self.folder / name))

    def _files(self) -> list[str]:
        index = self.folder / INDEX
        if not index.is_file():
            if not (self.folder / SINGLE).is_file():
                raise SpectrainError(
                    f"neither {INDEX} nor {SINGLE} is here",
                    where=str(self.folder),
                    fix="give the folder of a checkpoint in safetensors files",
                )
            return [SINGLE]
        content = read_json(index)
        places = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
            raise SpectrainError("no weight_map from names to files", where=str(index))
        names = sorted(set(places.values()))
        for name in names:
            # A name that leads out of the folder would be read, and later written to.
            if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
                raise SpectrainError(
                    f"{name!r} is not the name of a safetensors file in this folder",
                    where=str(index),
                    fix="the checkpoint is damaged or made to do harm; get it again",
                )
        return names

    def read(self, name: str) -> Tensor:
        """The tensor in the type it is stored in."""
        entry = self.entries[name]
        if entry.dtype not in _TYPES:
            raise SpectrainError(
                f"{name} is stored as {entry.dtype}",
                where=str(entry.path),
                fix="use a checkpoint in bfloat16, float16 or float32 (dequantise it first)",
            )
        with open(entry.path, "rb") as file:
            file.seek(entry.start)
            content = bytearray(file.read(entry.end - entry.start))
        return torch.frombuffer(content, dtype=_TYPES[entry.dtype]).view(entry.shape)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the bytes of some tensors; shapes are those that `read` gave."""
        for name, value in tensors.items():
            entry = self.entries[name]
            stored = value.detach().cpu().to(_TYPES[entry.dtype]).contiguous()
            content = stored.flatten().view(torch.uint8).numpy().tobytes()
            if tuple(value.shape) != entry.shape or len(content) != entry.end - entry.start:
                raise RuntimeError(f"{name}: {tuple(value.shape)} is not {entry.shape}")
            with open(entry.path, "r+b") as file:
                file.seek(entry.start)
                file.write(content)


def _header(path: Path) -> dict[str, Entry]:
    """name → place, of one file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(_LENGTH))
            if length > size - _LENGTH:
                raise ValueError("it ends within the header")
            content = json.loads(file.read(length))
        start, result = _LENGTH + length, {}
        for name, value in content.items():
            if name == "__metadata__":
                continue
            first, last = value["data_offsets"]
            if not 0 <= first <= last <= size - start:
                raise ValueError(f"{name} lies beyond its end")
            shape = tuple(value["shape"])
            result[name] = Entry(path, start + first, start + last, value["dtype"], shape)
        return result
    except FileNotFoundError:
        raise SpectrainError("a file of the checkpoint is missing", where=str(path)) from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise SpectrainError(f"not a whole safetensors file ({error})", where=str(path)) from None

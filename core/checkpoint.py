"""The tensors of a checkpoint by name, as they lie in its files: safetensors, or torch.save's.

`transformers` drops the tensors of MTP layers when it loads a model, so they are read here, and
written back in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spectrain.core import tensor_files
from spectrain.core.errors import SpectrainError
from spectrain.core.files import disk_errors, read_json
from spectrain.core.pickled import load_pickled, type_of

SINGLE = "model.safetensors"
_INDEXED = ".index.json"
INDEX = SINGLE + _INDEXED
# What a folder's weights are called, the first that is there; an index names further files.
_CALLED = (INDEX, SINGLE, "pytorch_model.bin.index.json", "pytorch_model.bin")
SAFE, PICKLED = (".safetensors",), (".bin", ".pt", ".pth")
# What trainers leave beside a head, and what is none.
_OTHERS = ("adapter", "optimizer", "scheduler", "training_args", "rng_state", "scaler")


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint: its file, its type (as safetensors spells it), its shape.

    load: reads it, in memory of its own
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


class Checkpoint:
    """All tensors of a folder, or of one file; nothing but headers is read until one is asked for.

    files: those that hold them
    """

    def __init__(self, path: Path) -> None:
        """Raises SpectrainError for a path without weights, and for files that are damaged."""
        self.path = Path(path)
        self.files: list[Path] = []
        self.entries: dict[str, Stored] = {}
        with disk_errors(self.path):
            main = self._main_file()
            index = self.path / main
            places = _weight_map(index) if main.endswith(".json") else {}
            _require_one(index, places)
            names = sorted(set(places.values())) or [main]
        for name in names:
            file = self.path / name if name else self.path
            found = _stored(file)
            if twice := sorted(found.keys() & self.entries.keys()):
                raise SpectrainError(
                    f"{twice[0]} is in {self.entries[twice[0]].path.name}, too", where=str(file)
                )
            self.files.append(file)
            self.entries.update(found)
        for name, file in places.items():
            if name not in self.entries or self.entries[name].path.name != file:
                raise SpectrainError(
                    f"{file} does not hold {name[:80]!r}",
                    where=str(index),
                    fix="the checkpoint is damaged; get it again",
                )

    def read(self, name: str) -> Tensor:
        """The tensor in the type it is stored in."""
        return self.entries[name].load()

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the bytes of some tensors; shapes are those that `read` gave."""
        for file in self.files:
            mine = {name: v for name, v in tensors.items() if self.entries[name].path == file}
            if mine and file.suffix not in SAFE:
                raise SpectrainError(
                    "only safetensors are written back", where=str(file), fix="convert it first"
                )
            if mine:
                tensor_files.overwrite(tensor_files.header(file), mine)

    def _main_file(self) -> str:
        """The name of the index, or of the one file that holds weights; "" where the path itself is
        that file."""
        if not self.path.is_dir():
            if not self.path.exists():
                raise SpectrainError("no such folder or file", where=str(self.path))
            if not self.path.is_file() or self.path.suffix not in SAFE + PICKLED:
                raise SpectrainError(
                    "not a file of weights",
                    where=str(self.path),
                    fix=f"give one that ends with {', '.join(SAFE + PICKLED)}, or its folder",
                )
            return ""
        for name in _CALLED:
            if (self.path / name).is_dir():
                raise SpectrainError("a folder in the place of a file", where=str(self.path / name))
            if (self.path / name).is_file():
                return name
        for endings in (SAFE, PICKLED):
            found = self._ending(endings)
            if len(found) > 1:
                raise SpectrainError(
                    f"{len(found)} files of weights and no index: {', '.join(found[:4])}",
                    where=str(self.path),
                    fix="give the path of one of them",
                )
            if found:
                return found[0]
        raise SpectrainError(
            f"no weights here (no {SINGLE}, no {INDEX}, no single file of weights)",
            where=str(self.path),
            fix="give the folder of a checkpoint",
        )

    def _ending(self, endings: tuple[str, ...]) -> list[str]:
        files = (p for p in self.path.iterdir() if p.suffix in endings and p.is_file())
        return sorted(p.name for p in files if not p.name.startswith(_OTHERS))


def require_one(folder: Path) -> None:
    """Raise SpectrainError for a folder that says in two ways what its weights are. (Beside
    safetensors nobody reads a pickle.)"""
    for index in (folder / name for name in _CALLED[::2]):
        there = [path for path in (index, _beside(index)) if path.is_file()]
        if len(there) == 2:
            _require_one(index, _weight_map(index))
        if there:
            return


def read_by_the_library(folder: Path) -> set[str]:
    """Names of the files that `transformers` reads: the single one, where there is one, and then
    no index."""
    for index in (folder / name for name in _CALLED[::2]):
        if _beside(index).is_file():
            return {_beside(index).name}
        if index.is_file():
            return set(_weight_map(index).values())
    return set()


def _require_one(index: Path, places: Mapping[str, str]) -> None:
    single = _beside(index)
    if places and single.is_file() and single.name not in places.values():
        raise SpectrainError(
            f"{single.name} and {index.name}, which does not name it: two sets of weights, of "
            "which transformers reads the first and engines the second",
            where=str(index.parent),
            fix="remove the one that is not the model",
        )


def _beside(index: Path) -> Path:
    """The single file in whose place an index stands."""
    return index.with_name(index.name.removesuffix(_INDEXED))


def _stored(file: Path) -> dict[str, Stored]:
    """What a file holds, by name."""
    if file.suffix in SAFE:
        return {
            name: Stored(file, one.dtype, one.shape, lambda n=name, e=one: tensor_files.read(n, e))
            for name, one in tensor_files.header(file).items()
        }
    return {
        name: Stored(
            file, type_of(value), tuple(value.shape), lambda n=name, v=value: _copy(n, v, file)
        )
        for name, value in load_pickled(file).items()
    }


def _copy(name: str, value: Tensor, file: Path) -> Tensor:
    tensor_files.require_readable(name, type_of(value), str(file))
    return value.clone(memory_format=torch.contiguous_format)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor → file, from an index."""
    content = read_json(index, tensor_files.LONGEST_HEADER)
    places = content.get("weight_map") if isinstance(content, dict) else None
    named = isinstance(places, dict) and all(isinstance(v, str) for v in places.values())
    if not named or not places:
        raise SpectrainError("no weight_map from names to files", where=str(index))
    ending = SAFE if index.name == INDEX else PICKLED
    for name in places.values():
        # A name that leads out of the folder would be read, and later written to. (A plain name may
        # be a link: that is how the hub's cache keeps its files.)
        plain = Path(name).name == name and "\\" not in name and name.isprintable()
        if not plain or not name.endswith(ending):
            kind = "safetensors file" if ending == SAFE else "file of weights"
            raise SpectrainError(
                f"{name[:80]!r} is not the name of a {kind} in this folder",
                where=str(index),
                fix="the checkpoint is damaged or made to do harm; get it again",
            )
    return places

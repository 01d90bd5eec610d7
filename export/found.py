"""What lies in a folder that is said to be a head: read without trusting a byte of it.

Nothing but headers is read before a tensor is asked for, and no code of a checkpoint is ever run
(core/checkpoint.py says what is refused).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from spectrain.core.checkpoint import PICKLED, Checkpoint
from spectrain.core.errors import SpectrainError
from spectrain.core.files import disk_errors, read_json, sha256_file
from spectrain.core.models import snapshot
from spectrain.heads.io import LONGEST_CONFIG, find_head

_FIX = "give the folder of a head, a file of its weights, or a hub id OWNER/NAME"


@dataclass(frozen=True)
class Found:
    """A folder's config and tensors.

    path: the folder, or the file where one was asked for · files: those that hold the tensors
    config: what config.json says, {} where there is none · shapes: tensor name → shape
    dtypes: tensor name → type, as safetensors spells it ("F32", "BF16", "I64", "BOOL")
    """

    path: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    _read: Callable[[str], Tensor]
    _edits: Mapping[str, Tensor] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    _called: Mapping[str, str] = field(default_factory=dict)
    _digests: dict[Path, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | str) -> Found:
        """A folder (of a head, or of the run that trained one), a file of weights, or a hub id.

        Raises SpectrainError for what holds no checkpoint, or a damaged one.
        """
        path = _located(path)
        checkpoint = Checkpoint(path)
        config = _config(path if path.is_dir() else path.parent)
        entries = checkpoint.entries
        return cls(
            path,
            config,
            {name: entry.shape for name, entry in entries.items()},
            {name: entry.dtype for name, entry in entries.items()},
            checkpoint.read,
            files=tuple(checkpoint.files),
        )

    def read(self, name: str) -> Tensor:
        """A tensor in the type it is stored in."""
        return self._edits[name] if name in self._edits else self._read(name)

    def sha256(self, file: Path) -> str:
        """Of a file of this folder, in hex; each is read for it once."""
        if file not in self._digests:
            self._digests[file] = sha256_file(file)
        return self._digests[file]

    def renamed(self, rename: Callable[[str], str]) -> Found:
        """The same tensors under other names; one whose new name is taken keeps its own, and is
        then unknown to every layout."""
        names = {name: name for name in self.shapes if rename(name) == name}
        for old in sorted(self.shapes.keys() - names.keys()):
            names[old if rename(old) in names else rename(old)] = old
        return replace(
            self,
            shapes={new: self.shapes[old] for new, old in names.items()},
            dtypes={new: self.dtypes[old] for new, old in names.items()},
            _read=lambda name: self.read(names[name]),
            _edits={},
            _called={new: self.called(old) for new, old in names.items()},
        )

    def called(self, name: str) -> str:
        """What the file itself calls a tensor, or the module that it is the weight of; of one that
        is not there, the name that goes with those nearest to it."""
        for ending in ("", ".weight") if self._called else ():
            if name + ending in self._called:
                return self._called[name + ending].removesuffix(ending)
        parts = name.split(".")
        for length in reversed(range(len(parts) if self._called else 0)):
            start = "".join(f"{part}." for part in parts[:length])
            beside = Counter(
                theirs.removesuffix(ours.removeprefix(start))
                for ours, theirs in self._called.items()
                if ours.startswith(start) and theirs.endswith(ours.removeprefix(start))
            )
            if beside:
                return beside.most_common(1)[0][0] + name.removeprefix(start)
        return name

    def edited(
        self, config: Mapping[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> Found:
        """The same with some keys of the config and some tensors (of the same shape) replaced."""
        return replace(
            self,
            config={**self.config, **(config or {})},
            _edits={**self._edits, **(tensors or {})},
        )


def _located(name: Path | str) -> Path:
    """Where it lies here; what is nowhere here and is written like a hub id is fetched."""
    path = Path(name).expanduser()
    with disk_errors(path):
        if path.exists():
            return find_head(path)
    text = str(name)
    if text.count("/") != 1 or text.startswith((".", "/", "~")) or not text.isprintable():
        raise SpectrainError("no such folder or file", where=text, fix=_FIX)
    return snapshot(text, text, _FIX, endings=PICKLED)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        return {}
    config = read_json(file, LONGEST_CONFIG)
    if not isinstance(config, dict):
        raise SpectrainError("not a JSON object", where=str(file))
    return config

"""MTP layers that a checkpoint brings along: read them into modules, put them back.

Their names are in mtp_names.py. Not supported: float8 checkpoints, several Qwen3-Next layers (they
share one fc), embeddings or output layers of their own that differ from the target's. A Qwen3-Next
target itself has linear-attention layers, which core.target refuses; its MTP layer can be read and
put back.

N target layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.core import models
from spectrain.core.checkpoint import Checkpoint
from spectrain.core.errors import SpectrainError
from spectrain.core.files import atomic_folder, require_free
from spectrain.core.readout import Readout
from spectrain.heads.mtp_names import LAYOUTS, Names

# What is needed beside the weights.
_ENDINGS = (".jinja", ".model", ".tiktoken", ".txt", "LICENSE*")


def folder_of(name: str) -> Path:
    """The folder of a target's checkpoint, by the target's name."""
    source = Path(models.resolve(name))
    return source if source.is_dir() else models.snapshot(str(source), endings=_ENDINGS)


class Native:
    """The MTP layers of one checkpoint folder."""

    def __init__(self, folder: Path, num_layers: int) -> None:
        """num_layers N: the target's own. Raises SpectrainError if no layout fits."""
        self.folder = Path(folder)
        self.checkpoint = Checkpoint(self.folder)
        for layout in LAYOUTS.values():
            self.names = Names(layout, num_layers, self.checkpoint.entries)
            if self.names.count:
                break
        else:
            raise SpectrainError(
                "the checkpoint has no MTP layers",
                where=str(self.folder),
                fix=f"known layouts: {', '.join(LAYOUTS)}; or leave out head.native",
            )
        self.layout, self.count = layout, self.names.count
        if layout.name == "qwen3-next" and self.count > 1:
            raise SpectrainError(
                f"the checkpoint has {self.count} layers behind one mtp.fc, which is not supported",
                where=str(self.folder),
            )

    @classmethod
    def of(cls, target: Any) -> Native:
        """Of a core.target.Target, by its name."""
        return cls(folder_of(target.name), target.num_layers)

    def check(self, modules: Sequence[nn.Module]) -> None:
        """Every tensor there, each of its shape, and none that we do not know."""
        known, problems = self.checkpoint.entries, []
        for name, shape in self.names.shapes(modules).items():
            if name not in known:
                problems.append(f"missing {name}")
            elif known[name].shape != shape:
                problems.append(f"{name} has shape {known[name].shape}, expected {shape}")
        problems += [f"unknown {name}" for name in self.names.unknown(modules)]
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise SpectrainError(
                "; ".join(sorted(problems)[:5]) + more, where=f"MTP layers of {self.folder}"
            )

    def load(self, modules: Sequence[nn.Module], readout: Readout) -> None:
        """Fill the first modules' weights; `readout` is what they will share."""
        self.check(modules)
        for index in range(len(modules)):
            self._require_copies(index, readout)
        self.names.fill(modules, self.checkpoint.read)

    def _require_copies(self, index: int, readout: Readout) -> None:
        target = {"embedding": readout.embedding.weight, "output": readout.weight}
        for kind, name in self.names.copies(index):
            if name not in self.checkpoint.entries:
                continue
            own, value = target[kind], self.checkpoint.read(name)
            if own.shape != value.shape or not torch.equal(own.cpu(), value.to(own.dtype)):
                raise SpectrainError(
                    f"{name} is not the target's own {kind}, which the head shares",
                    where=str(self.folder),
                    fix="checkpoints whose MTP layers have their own are not supported",
                )

    def tensors(self, modules: Sequence[nn.Module]) -> dict[str, Tensor]:
        """The modules' weights under the checkpoint's names."""
        self.check(modules)
        return self.names.tensors(modules)


def put_back(head: Any, folder: Path, out: Path) -> None:
    """Write a copy of the checkpoint in `folder` to `out`, with the head's modules in the place of
    its MTP layers.

    head: an mtp-sequential head that was made with `native`. Every other byte stays as it is, and
    `out` appears as a whole or not at all. Raises SpectrainError when the checkpoint is another
    one, or `out` is not new.
    """
    folder, out = Path(folder), Path(out)
    expected = getattr(head.config, "native", None)
    if expected is None:
        raise SpectrainError(
            "the head was not made from a checkpoint's MTP layers",
            fix="train one with head.native=true",
        )
    if out.exists() or folder.resolve() in out.resolve().parents:
        raise SpectrainError(
            "there is something already, or it lies in the checkpoint itself",
            where=str(out),
            fix="choose the path of a new folder",
        )
    native = Native(folder, head.config.target.num_layers)
    if native.layout.name != expected:
        raise SpectrainError(
            f"the checkpoint has the layout {native.layout.name}, the head {expected}",
            where=str(folder),
            fix="give the target that the head was made from",
        )
    tensors = native.tensors(head.chain)
    require_free(out.parent, sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))
    with atomic_folder(out) as temporary:
        shutil.copytree(folder, temporary, dirs_exist_ok=True)
        Checkpoint(temporary).write(tensors)

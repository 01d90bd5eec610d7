"""MTP layers that a checkpoint brings along: read them into modules, put them back.

Three layouts are known (N: the target's layers; "…" the decoder layer's own names)::

    deepseek    model.layers.{N+k}.{enorm, hnorm, eh_proj, shared_head.norm, …}
                eh_proj reads [embedding, hidden]; embed_tokens and shared_head.head are copies of
                the target's; hands on its output before the norm
    qwen3-next  mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, layers.0.…}
                fc reads [embedding, hidden]; one layer; hands on its output after the norm
    mimo        model.mtp_layers.{k}.{token_layernorm, hidden_layernorm, input_proj,
                final_layernorm, …}; input_proj reads [hidden, embedding]; after the norm

Not supported: float8 checkpoints, several Qwen3-Next layers (they share one fc), embeddings or
output layers of their own that differ from the target's. A Qwen3-Next target itself has
linear-attention layers, which core.target refuses; its MTP layer can be read and put back.

N target layers, E experts, I width of an expert, H hidden.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.core import models
from spectrain.core.errors import SpectrainError
from spectrain.core.files import atomic_folder, require_free
from spectrain.core.readout import Readout
from spectrain.heads.mtp_checkpoint import Checkpoint


@dataclass(frozen=True)
class Layout:
    """Names of one layout; {k}: number of the module, {n}: N+k.

    mark: a tensor that every module has · own: our part → its name · layer: where the decoder
    layer's names begin · root: where all names of a module do · copies: tensors that repeat the
    target's (ours → theirs)
    """

    name: str
    mark: str
    own: dict[str, str]
    layer: str
    root: str
    pass_on: str
    hidden_first: bool = False
    copies: tuple[tuple[str, str], ...] = ()


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            "deepseek",
            mark="model.layers.{n}.eh_proj.weight",
            own={
                "enorm": "model.layers.{n}.enorm",
                "hnorm": "model.layers.{n}.hnorm",
                "eh_proj": "model.layers.{n}.eh_proj",
                "norm": "model.layers.{n}.shared_head.norm",
            },
            layer="model.layers.{n}.",
            root="model.layers.{n}.",
            pass_on="before_norm",
            copies=(
                ("embedding", "model.layers.{n}.embed_tokens.weight"),
                ("output", "model.layers.{n}.shared_head.head.weight"),
            ),
        ),
        Layout(
            "qwen3-next",
            mark="mtp.layers.{k}.input_layernorm.weight",
            own={
                "enorm": "mtp.pre_fc_norm_embedding",
                "hnorm": "mtp.pre_fc_norm_hidden",
                "eh_proj": "mtp.fc",
                "norm": "mtp.norm",
            },
            layer="mtp.layers.{k}.",
            root="mtp.",
            pass_on="after_norm",
        ),
        Layout(
            "mimo",
            mark="model.mtp_layers.{k}.input_proj.weight",
            own={
                "enorm": "model.mtp_layers.{k}.token_layernorm",
                "hnorm": "model.mtp_layers.{k}.hidden_layernorm",
                "eh_proj": "model.mtp_layers.{k}.input_proj",
                "norm": "model.mtp_layers.{k}.final_layernorm",
            },
            layer="model.mtp_layers.{k}.",
            root="model.mtp_layers.{k}.",
            pass_on="after_norm",
            hidden_first=True,
        ),
    )
}
# Rebuilt from the configuration, wherever a checkpoint still holds it.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint and the part of one of ours that it fills.

    swapped: its two halves of input columns change places
    """

    ours: str
    part: tuple[int | slice, ...]
    theirs: str
    swapped: bool = False


class Native:
    """The MTP layers of one checkpoint folder."""

    def __init__(self, folder: Path, num_layers: int) -> None:
        """num_layers N: the target's own. Raises SpectrainError if no layout fits."""
        self.folder, self._layers = Path(folder), num_layers
        self.checkpoint = Checkpoint(self.folder)
        for layout in LAYOUTS.values():
            self.layout, self.count = layout, 0
            while self._name(layout.mark, self.count) in self.checkpoint.entries:
                self.count += 1
            if self.count:
                break
        else:
            raise SpectrainError(
                "the checkpoint has no MTP layers",
                where=str(self.folder),
                fix=f"known layouts: {', '.join(LAYOUTS)}; or leave out head.native",
            )
        if layout.name == "qwen3-next" and self.count > 1:
            raise SpectrainError(
                f"the checkpoint has {self.count} layers behind one mtp.fc, which is not supported",
                where=str(self.folder),
            )

    @classmethod
    def of(cls, target: Any) -> Native:
        """Of a core.target.Target, by its name."""
        source = models.resolve(target.name)
        if not Path(source).is_dir():
            from huggingface_hub import snapshot_download

            with models.load_errors(target.name):
                source = snapshot_download(source, allow_patterns=["*.safetensors", "*.json"])
        return cls(Path(source), target.num_layers)

    def _name(self, pattern: str, index: int) -> str:
        return pattern.format(k=index, n=self._layers + index)

    def pieces(self, module: nn.Module, index: int) -> Iterator[Piece]:
        """Which tensors of the checkpoint make up module `index` (an MtpModule)."""
        layout, known = self.layout, self.checkpoint.entries
        for name, value in module.state_dict().items():
            owner, _, rest = name.partition(".")
            if owner != "layer":
                swapped = owner == "eh_proj" and layout.hidden_first
                yield Piece(name, (), f"{self._name(layout.own[owner], index)}.{rest}", swapped)
                continue
            theirs = self._name(layout.layer, index) + rest
            experts = re.fullmatch(r"(.*\.experts\.)(gate_up_proj|down_proj)", theirs)
            if experts is None or theirs in known:
                yield Piece(name, (), theirs)
            else:
                yield from _experts(name, experts[1], experts[2], value)

    def check(self, modules: Sequence[nn.Module]) -> None:
        """Every tensor there, each of its shape, and none that we do not know."""
        problems, used, known = [], set(), self.checkpoint.entries
        for index, module in enumerate(modules):
            ours = module.state_dict()
            for piece in self.pieces(module, index):
                used.add(piece.theirs)
                shape = tuple(ours[piece.ours][piece.part].shape)
                if piece.theirs not in known:
                    problems.append(f"missing {piece.theirs}")
                elif known[piece.theirs].shape != shape:
                    problems.append(
                        f"{piece.theirs} has shape {known[piece.theirs].shape}, expected {shape}"
                    )
            used |= {self._name(theirs, index) for _, theirs in self.layout.copies}
            start = self._name(self.layout.root, index)
            problems += [
                f"unknown {name}"
                for name in known.keys() - used
                if name.startswith(start) and not _IGNORED.search(name)
            ]
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise SpectrainError(
                "; ".join(sorted(problems)[:5]) + more, where=f"MTP layers of {self.folder}"
            )

    @torch.no_grad()
    def load(self, modules: Sequence[nn.Module], readout: Readout) -> None:
        """Fill the first modules' weights; `readout` is what they will share."""
        self.check(modules)
        for index, module in enumerate(modules):
            self._require_copies(index, readout)
            ours = module.state_dict()
            for piece in self.pieces(module, index):
                value = self.checkpoint.read(piece.theirs)
                ours[piece.ours][piece.part].copy_(_swap(value) if piece.swapped else value)

    def _require_copies(self, index: int, readout: Readout) -> None:
        target = {"embedding": readout.embedding.weight, "output": readout.weight}
        for kind, theirs in self.layout.copies:
            name = self._name(theirs, index)
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
        result = {}
        for index, module in enumerate(modules):
            ours = module.state_dict()
            for piece in self.pieces(module, index):
                value = ours[piece.ours][piece.part]
                result[piece.theirs] = _swap(value) if piece.swapped else value
        return result


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


def _experts(name: str, start: str, kind: str, value: Tensor) -> Iterator[Piece]:
    """Stacked weights [E, …] against one tensor for each expert; gate before up in [E, 2I, H]."""
    for expert in range(len(value)):
        if kind == "down_proj":
            yield Piece(name, (expert,), f"{start}{expert}.down_proj.weight")
            continue
        half = value.shape[1] // 2
        yield Piece(name, (expert, slice(None, half)), f"{start}{expert}.gate_proj.weight")
        yield Piece(name, (expert, slice(half, None)), f"{start}{expert}.up_proj.weight")


def _swap(value: Tensor) -> Tensor:
    """[H, 2H]: the halves of the input change places."""
    left, right = value.chunk(2, dim=1)
    return torch.cat([right, left], dim=1)

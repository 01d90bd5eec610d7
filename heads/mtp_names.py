"""Names that checkpoints give to MTP layers.

Four layouts are known (N: the target's layers; "…" the decoder layer's own names)::

    deepseek      model.layers.{N+k}.{enorm, hnorm, eh_proj, shared_head.norm, …}
                  eh_proj reads [embedding, hidden]; embed_tokens and shared_head.head are copies of
                  the target's
    transformers  mtp.layers.{k}.{enorm, hnorm, eh_proj, post_norm, …}
                  what the library's MtpModel calls them itself
    qwen3-next    mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, layers.0.…}
                  fc reads [embedding, hidden]; one layer
    mimo          model.mtp_layers.{k}.{token_layernorm, hidden_layernorm, input_proj,
                  final_layernorm, …}; input_proj reads [hidden, embedding]

Whatever the layout, engines hand on the state after a module's norm.

N target layers, E experts, I width of an expert, H hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


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
            copies=(
                ("embedding", "model.layers.{n}.embed_tokens.weight"),
                ("output", "model.layers.{n}.shared_head.head.weight"),
            ),
        ),
        # Before qwen3-next, whose mark it has as well.
        Layout(
            "transformers",
            mark="mtp.layers.{k}.eh_proj.weight",
            own={
                "enorm": "mtp.layers.{k}.enorm",
                "hnorm": "mtp.layers.{k}.hnorm",
                "eh_proj": "mtp.layers.{k}.eh_proj",
                "norm": "mtp.layers.{k}.post_norm",
            },
            layer="mtp.layers.{k}.",
            root="mtp.layers.{k}.",
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


@dataclass(frozen=True)
class Names:
    """What one layout calls the tensors of modules (MtpModule) behind a target of N layers.

    known: names that there are, by which experts are told: stacked, or one tensor for each
    """

    layout: Layout
    num_layers: int
    known: Collection[str]

    def of(self, pattern: str, index: int) -> str:
        return pattern.format(k=index, n=self.num_layers + index)

    @property
    def count(self) -> int:
        """Modules whose mark is known."""
        found = 0
        while self.of(self.layout.mark, found) in self.known:
            found += 1
        return found

    def pieces(self, module: nn.Module, index: int) -> Iterator[Piece]:
        """Which tensors of the checkpoint make up module `index`."""
        layout = self.layout
        for name, value in module.state_dict().items():
            owner, _, rest = name.partition(".")
            if owner != "layer":
                swapped = owner == "eh_proj" and layout.hidden_first
                yield Piece(name, (), f"{self.of(layout.own[owner], index)}.{rest}", swapped)
                continue
            theirs = self.of(layout.layer, index) + rest
            experts = re.fullmatch(r"(.*\.experts\.)(gate_up_proj|down_proj)", theirs)
            if experts is None or theirs in self.known:
                yield Piece(name, (), theirs)
            else:
                yield from _experts(name, experts[1], experts[2], value)

    def called(self, name: str) -> str:
        """What this layout calls a tensor, or a module, of a head whose modules are its `chain`."""
        if (found := re.fullmatch(r"chain\.(\d+)\.(\w+)\.?(.*)", name)) is None:
            return name
        index, owner, rest = int(found[1]), found[2], found[3]
        if owner == "layer":
            return self.of(self.layout.layer, index) + rest
        return ".".join(filter(None, (self.of(self.layout.own[owner], index), rest)))

    def shapes(self, modules: Sequence[nn.Module]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self._parts(modules)}

    def tensors(self, modules: Sequence[nn.Module]) -> dict[str, Tensor]:
        """The modules' weights under these names."""
        return dict(self._parts(modules))

    @torch.no_grad()
    def fill(self, modules: Sequence[nn.Module], read: Callable[[str], Tensor]) -> None:
        """Fill the modules' weights from the tensors that `read` gives by name."""
        for index, module in enumerate(modules):
            ours = module.state_dict()
            for piece in self.pieces(module, index):
                value = read(piece.theirs)
                ours[piece.ours][piece.part].copy_(swap(value) if piece.swapped else value)

    def copies(self, index: int) -> Iterator[tuple[str, str]]:
        """Tensors that repeat the target's: "embedding" or "output", and the name."""
        for kind, theirs in self.layout.copies:
            yield kind, self.of(theirs, index)

    def unknown(self, modules: Sequence[nn.Module]) -> list[str]:
        """Known names that look like a module's and are none of its tensors."""
        used = set(self.shapes(modules))
        starts = [self.of(self.layout.root, index) for index in range(len(modules))]
        used |= {name for index in range(len(modules)) for _, name in self.copies(index)}
        return sorted(
            name
            for name in set(self.known) - used
            if name.startswith(tuple(starts)) and not _IGNORED.search(name)
        )

    def _parts(self, modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        for index, module in enumerate(modules):
            ours = module.state_dict()
            for piece in self.pieces(module, index):
                value = ours[piece.ours][piece.part]
                yield piece.theirs, swap(value) if piece.swapped else value


def _experts(name: str, start: str, kind: str, value: Tensor) -> Iterator[Piece]:
    """Stacked weights [E, …] against one tensor for each expert; gate before up in [E, 2I, H]."""
    for expert in range(len(value)):
        if kind == "down_proj":
            yield Piece(name, (expert,), f"{start}{expert}.down_proj.weight")
            continue
        half = value.shape[1] // 2
        yield Piece(name, (expert, slice(None, half)), f"{start}{expert}.gate_proj.weight")
        yield Piece(name, (expert, slice(half, None)), f"{start}{expert}.up_proj.weight")


def swap(value: Tensor) -> Tensor:
    """[H, 2H]: the halves of the input change places."""
    left, right = value.chunk(2, dim=1)
    return torch.cat([right, left], dim=1)

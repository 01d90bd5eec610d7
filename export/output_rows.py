"""Whether the rows of a head's output layers are of the tokens that its map names.

D draft vocabulary, V target vocabulary, H hidden size, n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.core.target import Target
from spectrain.export.layout import Finding
from spectrain.export.stored import names_of
from spectrain.heads.base import DraftHead

_CHECK = "output rows"
_MOST = 10**11  # products (n·V·H) up to which every row is looked at
_SAMPLE = 512  # else so many
_AT_ONCE = 4096  # rows of a weight at a time
_ALIKE = 0.6  # cosine from which a row is taken for a copy of a target's row that was trained on
_AHEAD = 0.1  # by so much another token's row is nearer than its own, where most rows are moved
# Where most are in place a row has to be surely another's, and not alone: one that training has
# carried far from its start may come near another by chance.
_SURELY, _LEAST, _PART = 0.2, 2, 0.01


@dataclass(frozen=True)
class _Beside:
    """Cosines of rows [n] with the target's row of their own token, and with the nearest other."""

    own: Tensor
    other: Tensor

    @property
    def in_place(self) -> bool:
        """Whether the own token is the nearest of most rows."""
        return (self.own >= self.other).float().mean().item() > 0.5

    @property
    def most_moved(self) -> bool:
        """Whether most rows are like a row of the target's, and most of those like another's."""
        known = torch.maximum(self.own, self.other) > _ALIKE
        return known.float().mean().item() > 0.5 and bool(
            (self.other - self.own > _AHEAD)[known].float().mean() > 0.5
        )

    @property
    def moved(self) -> Tensor:
        """Which rows are another token's: [n]"""
        ahead = _AHEAD if self.most_moved else _SURELY
        moved = (self.other > _ALIKE) & (self.other - self.own > ahead)
        return moved & (self.most_moved or self.in_place)

    @property
    def wrong(self) -> bool:
        return int(self.moved.sum()) >= max(_LEAST, _PART * len(self.own))


@torch.no_grad()
def findings(
    head: DraftHead, target: Target, called: Callable[[str], str] = str
) -> Iterator[Finding]:
    layers = _output_layers(head)
    if not layers:
        return
    size = head.config.draft_vocab_size
    # Tokens that were never seen share a row in many targets.
    expected = _repeated(target.readout.weight[head.draft_ids])
    problems, looked = [], ""
    for name, layer in layers.items():
        repeated = _repeated(layer.weight) - expected
        if repeated > 0:
            text = (
                f"{called(name)}: {repeated:,} of {size:,} rows are constant or repeat another row"
            )
            problems.append(Finding(_CHECK, "warn", text, "convert the head again"))
        beside = _beside(head, layer, target)
        if beside is None:
            looked = "not compared with the target's: it is of another width"
            continue
        moved, count = int(beside.moved.sum()), len(beside.own)
        if moved:
            text = f"{called(name)}: {moved:,} of {count:,} rows that were looked at are of other "
            text += "tokens than the map says"
            verdict = "fail" if beside.most_moved else "warn" if beside.wrong else "note"
            problems.append(Finding(_CHECK, verdict, text, _in_order(called(name))))
        elif beside.in_place:
            looked = f"none of {count:,} that were looked at is of another token"
        else:
            looked = f"{count:,} that were looked at are not like the target's, so that nothing "
            looked += "tells of which tokens they are"
    yield from problems
    if not problems:
        text = f"{names_of([called(n) for n in layers])}: rows differ; {looked}"
        yield Finding(_CHECK, "ok", text)


@torch.no_grad()
def mends(
    head: DraftHead, target: Target, called: Callable[[str], str] = str
) -> Iterator[tuple[str, str, Callable[[DraftHead], None]]]:
    """Name, fix, and what to do with another copy, where rows are moved."""
    moved = []
    for name, layer in _output_layers(head).items():
        beside = _beside(head, layer, target)
        if beside is not None and beside.wrong:
            moved.append(name)
    if not moved:
        return
    theirs = target.readout.weight[head.draft_ids]

    @torch.no_grad()
    def sort(other: DraftHead) -> None:
        for name in moved:
            weight = other.get_submodule(name).weight
            rows = torch.arange(len(weight), device=weight.device)
            own, best, place = _nearest(weight, rows, theirs)
            goes = (best > _ALIKE) & (best - own > _AHEAD) & (best > own[place])
            weight[place[goes]] = weight[goes].clone()

    yield "output rows of other tokens than the map says", _in_order(called(moved[0])), sort


def _output_layers(head: DraftHead) -> dict[str, nn.Linear]:
    """Layers of the head's own whose rows are the tokens that it guesses."""
    size = head.config.draft_vocab_size
    named = head.named_modules()
    return {n: m for n, m in named if isinstance(m, nn.Linear) and m.out_features == size}


def _in_order(name: str) -> str:
    return f"sort the rows of {name} by token: weight[ids.argsort()], ids: the token of each row"


def _repeated(weight: Tensor) -> int:
    """Rows of [D, H] that are constant, or the same as an earlier one."""
    probe = torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    # Row by row, so that equal rows give equal sums; in float64, so that no others do.
    parts = weight.split(_AT_ONCE)
    sums = torch.cat([(part.double() * probe.double()).sum(-1) for part in parts])
    constant = torch.cat([part.amax(-1) == part.amin(-1) for part in parts])
    return int(constant.sum()) + int((~constant).sum()) - len(sums[~constant].unique())


def _beside(head: DraftHead, layer: nn.Linear, target: Target) -> _Beside | None:
    """All rows of a layer, or a sample of them; None where the target's are of another width."""
    weight, theirs = layer.weight, target.readout.weight
    if weight.shape[1] != theirs.shape[1]:
        return None
    rows = torch.arange(len(weight))
    if weight.numel() * len(theirs) > _MOST:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randperm(len(weight), generator=generator)[:_SAMPLE].sort().values
    rows = rows.to(weight.device)
    own, other, _ = _nearest(weight[rows], head.draft_ids[rows], theirs)
    return _Beside(own, other)


def _nearest(weight: Tensor, ids: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows [n, H] of the tokens `ids` [n]: cosine with their own row of [V, H], that with the
    nearest other, and which one that is."""
    own, other, place = [], [], []
    for rows, tokens in zip(weight.split(_AT_ONCE), ids.split(_AT_ONCE), strict=True):
        rows, found = F.normalize(rows.float(), dim=-1), []
        for start in range(0, len(theirs), _AT_ONCE):
            part = F.normalize(theirs[start : start + _AT_ONCE].float(), dim=-1)
            like, at = rows @ part.T, tokens - start
            here = (at >= 0) & (at < len(part))
            like[here, at[here]] = -2.0  # below every cosine
            best = like.max(-1)
            found.append((best.values, best.indices + start))
        values, places = (torch.stack(one, dim=-1) for one in zip(*found, strict=True))
        nearest = values.argmax(-1, keepdim=True)
        other.append(values.gather(-1, nearest).squeeze(-1))
        place.append(places.gather(-1, nearest).squeeze(-1))
        own.append((rows * F.normalize(theirs[tokens].float(), dim=-1)).sum(-1))
    return torch.cat(own), torch.cat(other), torch.cat(place)

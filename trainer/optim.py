"""Optimisers and the schedule; the rate of a step is a function of its number, without state."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from spectrain.core.errors import SpectrainError
from spectrain.trainer.muon import Muon
from spectrain.trainer.settings import TrainerSettings
from spectrain.trainer.sharding import is_cut, like

BETAS = (0.9, 0.95)
TRUNK = "trunk."  # names of the tensors of a target that is trained along
WSD_DECAY = 0.2  # share of the steps over which "wsd" falls to 0


@dataclass
class Part:
    """One optimiser, its highest rate, the names of its parameters in its own order, and the share
    of the training in which it still rests."""

    optimizer: Optimizer
    lr: float
    names: list[str]
    rests: float = 0.0

    def __post_init__(self) -> None:
        # Kept, for DeepSpeed puts flat pieces in their place.
        groups = self.optimizer.param_groups
        self.parameters: list[nn.Parameter] = [v for group in groups for v in group["params"]]


def build(head: nn.Module, settings: TrainerSettings, tables: Iterable[int]) -> dict[str, Part]:
    """The optimisers for the trainable tensors of `head`, by name.

    tables: row counts of matrices with one row for each token (vocabulary sizes). Muon makes all
    directions of a matrix equally strong, which suits maps between states and not tables.
    Raises SpectrainError when nothing is trainable or a pattern of lr_factors has no tensor.
    """
    trainable = {name: value for name, value in head.named_parameters() if value.requires_grad}
    _check_patterns(settings, trainable)
    mapped = maps(head, tables)
    trunk = settings.trunk
    if trunk.trained:
        tuned = {name: value for name, value in trainable.items() if name.startswith(TRUNK)}
        trainable = {name: value for name, value in trainable.items() if name not in tuned}
        share = trunk.share(settings.lr)
        parts = _parts(tuned, settings, mapped, share, "trunk-", trunk.first)
    else:
        parts = {}
    parts |= _parts(trainable, settings, mapped)
    if not parts:
        raise SpectrainError("the head has no trainable tensor", fix="unfreeze a part of it")
    return parts


def maps(head: nn.Module, tables: Iterable[int]) -> Callable[[Tensor], bool]:
    """Tells of a tensor of `head` whether Muon may have it; tables as in `build`."""
    embeddings = {id(m.weight) for m in head.modules() if isinstance(m, nn.Embedding)}
    sizes = set(tables)

    def mapped(value: Tensor) -> bool:
        return value.ndim == 2 and value.shape[0] not in sizes and id(value) not in embeddings

    return mapped


def head_tables(head: Any) -> set[int]:
    """Row counts of a head's matrices that have a row for each token."""
    return {head.config.vocab_size, head.config.draft_vocab_size}


def _parts(
    trainable: dict[str, nn.Parameter],
    settings: TrainerSettings,
    mapped: Callable[[Tensor], bool],
    share: float = 1.0,
    prefix: str = "",
    rests: float = 0.0,
) -> dict[str, Part]:
    """Optimisers of some tensors, at `share` of the rates; mapped: what muon may have."""
    parts: dict[str, Part] = {}
    matrices = {name: value for name, value in trainable.items() if value.ndim >= 2}
    if settings.optimizer == "muon":
        own = {name: value for name, value in matrices.items() if mapped(value)}
        if own:
            lr = settings.matrix_lr * share
            groups, names = _groups(own, settings)
            muon = Muon(groups, lr=lr, weight_decay=settings.weight_decay)
            parts[f"{prefix}muon"] = Part(muon, lr, names, rests)
        trainable = {name: value for name, value in trainable.items() if name not in own}
    if trainable:
        decayed = {name: value for name, value in trainable.items() if name in matrices}
        plain = {name: value for name, value in trainable.items() if name not in matrices}
        groups, names = _groups(decayed, settings, weight_decay=settings.weight_decay)
        rest_groups, rest_names = _groups(plain, settings, weight_decay=0.0)
        adamw = AdamW(
            groups + rest_groups,
            lr=settings.lr * share,
            betas=BETAS,
            fused=all(value.device.type in ("cpu", "cuda") for value in trainable.values()),
        )
        parts[f"{prefix}adamw"] = Part(adamw, settings.lr * share, names + rest_names, rests)
    return parts


def _groups(
    tensors: dict[str, nn.Parameter], settings: TrainerSettings, **options: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Tensors as groups of an optimiser, by factor of the rate, and their names in that order;
    options: further keys of each group."""
    # One fused update does not take pieces and whole tensors together.
    kinds: dict[tuple[float, bool], list[str]] = {}
    for name, value in tensors.items():
        factor = settings.lr_factors.get(_pattern(name, settings), 1.0)
        kinds.setdefault((factor, is_cut(value)), []).append(name)
    groups = [
        {"params": [tensors[name] for name in names], "factor": factor, **options}
        for (factor, _), names in kinds.items()
    ]
    return groups, [name for names in kinds.values() for name in names]


def _pattern(name: str, settings: TrainerSettings) -> str | None:
    """The first pattern of lr_factors that a name matches."""
    return next((p for p in settings.lr_factors if fnmatchcase(_shown(name), p)), None)


def _shown(name: str) -> str:
    """What a head's own tensors are called, whether or not a trunk is trained beside it."""
    return name.removeprefix("head.")


def _check_patterns(settings: TrainerSettings, trainable: Iterable[str]) -> None:
    used = {_pattern(name, settings) for name in trainable}
    for pattern in settings.lr_factors:
        if pattern not in used:
            # Layers have the same names but for a number.
            names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", _shown(name)) for name in trainable)
            raise SpectrainError(
                f"no trained tensor matches the pattern {pattern!r} and none before it",
                where="lr_factors",
                fix=f"there are {', '.join(names)}",
            )


def rest(parts: dict[str, Part], progress: float) -> None:
    """Leave out of this step what still rests: a tensor that asks for no gradient costs none, and
    without one no optimiser touches it."""
    for part in parts.values():
        for value in part.parameters:
            value.requires_grad_(progress >= part.rests)


def factor(schedule: str, step: int, steps: int, warmup: float) -> float:
    """Share of the highest rate that step `step` (from 0) of `steps` uses; never 0."""
    warm = round(warmup * steps)
    if step < warm:
        return (step + 1) / (warm + 1)
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        decay = max(1, min(round(WSD_DECAY * steps), steps - warm))
        return min(1.0, (steps - step) / (decay + 1))
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def set_rate(parts: dict[str, Part], share: float) -> None:
    for part in parts.values():
        for group in part.optimizer.param_groups:
            group["lr"] = part.lr * share * group["factor"]


def flatten(parts: dict[str, Part]) -> dict[str, Tensor]:
    """The optimisers' memory as flat names → tensors: "adamw/<parameter>/exp_avg"."""
    flat = {}
    for kind, part in parts.items():
        for index, memory in part.optimizer.state_dict()["state"].items():
            for key, value in memory.items():
                flat[f"{kind}/{part.names[index]}/{key}"] = torch.as_tensor(value)
    return flat


def restore(parts: dict[str, Part], flat: dict[str, Tensor]) -> None:
    """Put back what `flatten` took. Rates are not part of it: they are set at every step."""
    for kind, part in parts.items():
        state: dict[int, dict[str, Tensor]] = {}
        for index, name in enumerate(part.names):
            prefix = f"{kind}/{name}/"
            memory = {k.removeprefix(prefix): v for k, v in flat.items() if k.startswith(prefix)}
            own = part.parameters[index]
            if memory:  # a parameter without a step so far has none
                state[index] = {
                    key: like(value.to(own.device), own) if value.shape == own.shape else value
                    for key, value in memory.items()
                }
        groups = part.optimizer.state_dict()["param_groups"]
        part.optimizer.load_state_dict({"state": state, "param_groups": groups})

"""Optimisers and the schedule; the rate of a step is a function of its number, without state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from spectrain.core.errors import SpectrainError
from spectrain.trainer.muon import Muon
from spectrain.trainer.settings import TrainerSettings

BETAS = (0.9, 0.95)
WSD_DECAY = 0.2  # share of the steps over which "wsd" falls to 0


@dataclass
class Part:
    """One optimiser, its highest rate, and the names of its parameters in its own order."""

    optimizer: Optimizer
    lr: float
    names: list[str]


def build(head: nn.Module, settings: TrainerSettings, tables: Iterable[int]) -> dict[str, Part]:
    """The optimisers for the trainable tensors of `head`, by name.

    tables: row counts of matrices with one row for each token (vocabulary sizes). Muon makes all
    directions of a matrix equally strong, which suits maps between states and not tables.
    Raises SpectrainError when nothing is trainable.
    """
    trainable = {name: value for name, value in head.named_parameters() if value.requires_grad}
    matrices = {name: value for name, value in trainable.items() if value.ndim >= 2}
    parts: dict[str, Part] = {}
    if settings.optimizer == "muon":
        sizes = set(tables)
        mapped = {n: p for n, p in matrices.items() if p.ndim == 2 and p.shape[0] not in sizes}
        if mapped:
            muon = Muon(mapped.values(), lr=settings.matrix_lr, weight_decay=settings.weight_decay)
            parts["muon"] = Part(muon, settings.matrix_lr, list(mapped))
        trainable = {name: value for name, value in trainable.items() if name not in mapped}
    if trainable:
        decayed = {name: value for name, value in trainable.items() if name in matrices}
        plain = {name: value for name, value in trainable.items() if name not in matrices}
        groups = [
            {"params": list(decayed.values()), "weight_decay": settings.weight_decay},
            {"params": list(plain.values()), "weight_decay": 0.0},
        ]
        adamw = AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=BETAS,
            fused=all(value.device.type in ("cpu", "cuda") for value in trainable.values()),
        )
        parts["adamw"] = Part(adamw, settings.lr, [*decayed, *plain])
    if not parts:
        raise SpectrainError("the head has no trainable tensor", fix="unfreeze a part of it")
    return parts


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
            group["lr"] = part.lr * share


def flatten(parts: dict[str, Part]) -> dict[str, Tensor]:
    """The optimisers' memory as flat names → tensors: "adamw/<parameter>/exp_avg"."""
    flat = {}
    for kind, part in parts.items():
        for index, memory in part.optimizer.state_dict()["state"].items():
            for key, value in memory.items():
                flat[f"{kind}/{part.names[index]}/{key}"] = torch.as_tensor(value).cpu()
    return flat


def restore(parts: dict[str, Part], flat: dict[str, Tensor]) -> None:
    """Put back what `flatten` took. Rates are not part of it: they are set at every step."""
    for kind, part in parts.items():
        state: dict[int, dict[str, Tensor]] = {}
        for index, name in enumerate(part.names):
            prefix = f"{kind}/{name}/"
            memory = {k.removeprefix(prefix): v for k, v in flat.items() if k.startswith(prefix)}
            if memory:  # a parameter without a step so far has none
                state[index] = memory
        groups = part.optimizer.state_dict()["param_groups"]
        part.optimizer.load_state_dict({"state": state, "param_groups": groups})

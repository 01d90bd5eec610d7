"""Where a run is: its counters, and how it goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from spectrain.core.errors import SpectrainError
from spectrain.heads.base import DraftHead
from spectrain.trainer import checkpoint
from spectrain.trainer.ema import Ema
from spectrain.trainer.metrics import Window
from spectrain.trainer.update import Update


@dataclass
class State:
    """Counters of a run. step: finished optimiser steps; supervised: reply tokens seen;
    skipped: steps dropped as not finite, in a row and altogether; seconds: inside the loop;
    unreached: trainable tensors that no gradient other than zero has reached so far (None: no step
    yet). That a tensor changed would not do: weight decay changes it, too."""

    step: int = 0
    supervised: int = 0
    skipped_in_row: int = 0
    skipped: int = 0
    seconds: float = 0.0
    window: Window = field(default_factory=Window)
    unreached: list[str] | None = None


def resume(
    run: Path,
    head: DraftHead,
    update: Update,
    ema: Ema,
    identity: Mapping[str, Any],
    extend: bool,
) -> State:
    """Fill head, optimisers and mean from the newest whole checkpoint of `run`, if there is any.

    Raises SpectrainError when it is another run's or when every one is damaged.
    """
    found = checkpoint.newest(run)
    if found is None:
        return State()
    folder, saved = found
    checkpoint.require_same(saved["config"], identity, str(folder), extend)
    checkpoint.restore(folder, head, update, ema)
    counters = {name: saved[name] for name in State.__dataclass_fields__ if name in saved}
    del counters["window"]
    return State(**counters, window=Window(**saved["window"]))


def require_one_step(state: State, accelerator: Accelerator, run: Path) -> None:
    """Refuse processes that go on from different steps: their machines share no folder."""
    own = torch.tensor([state.step], device=accelerator.device)
    found = accelerator.gather(own).tolist()
    if len(set(found)) > 1:
        raise SpectrainError(
            f"the processes found checkpoints of different steps: {found}",
            where=str(run),
            fix="give all of them the same --out, in a folder that they share",
        )

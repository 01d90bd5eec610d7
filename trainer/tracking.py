"""The accelerator and the trackers that run through it; metrics.jsonl is written without them."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs

from spectrain.core.errors import SpectrainError
from spectrain.core.files import atomic_write
from spectrain.core.progress import say
from spectrain.trainer.muon import working_type
from spectrain.trainer.settings import TrainerSettings

PROJECT = "spectrain"
WANDB_HOST = "api.wandb.ai"
WANDB_ID = "wandb-id.txt"


def make_accelerator(settings: TrainerSettings, run: Path) -> Accelerator:
    """The accelerator of this process. Raises SpectrainError for a tracker not installed."""
    chosen = None if settings.tracker == "none" else settings.tracker
    if chosen and chosen not in [str(name) for name in get_available_trackers()]:
        raise SpectrainError(
            f"tracker {chosen} is not installed",
            where="--tracker",
            fix=f"pip install {chosen}, or leave the tracker out: metrics.jsonl is always written",
        )
    # Trainings in one process (compare) may differ in precision; accelerate keeps the first one.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        # Without this, accelerate takes each of several processes on a machine without a GPU for
        # the only one. None leaves the choice to `accelerate launch`.
        cpu=None if torch.accelerator.is_available() else True,
        mixed_precision=settings.mixed_precision,
        log_with=chosen,
        project_dir=str(run),
        kwargs_handlers=[
            # A head's buffers are constant; there is no need to send them round at every forward.
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        ],
    )
    return accelerator


def precision(settings: TrainerSettings) -> Literal["no", "bf16"]:
    """What `mixed_precision` means on this machine."""
    if settings.mixed_precision != "auto":
        return settings.mixed_precision
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "bf16" if working_type(here or torch.device("cpu")) is torch.bfloat16 else "no"


def start_trackers(
    accelerator: Accelerator, identity: Mapping[str, Any], run: Path, step: int
) -> None:
    """Open the chosen tracker for a run that goes on behind `step` (0: a new one).

    wandb goes on under the id that is kept in the run's folder, and stays offline when nobody is
    logged in; then one line says where its run lies, instead of its own report. Of tensorboard's
    points those of steps that will run again are taken back.
    """
    if not accelerator.is_main_process or not accelerator.log_with:
        return
    wandb: dict[str, Any] = {"dir": str(run), "name": run.name}
    if "wandb" in map(str, accelerator.log_with):
        wandb |= {"id": _wandb_id(run, new=step == 0), "resume": "allow"}
    if not _has_wandb_key() and "WANDB_MODE" not in os.environ:
        wandb["mode"] = "offline"
    offline = wandb.get("mode", os.environ.get("WANDB_MODE")) == "offline"
    if offline:
        wandb["settings"] = {"silent": True}
    # Trackers take plain values only.
    plain = {
        key: value if isinstance(value, (int, float, str, bool)) else str(value)
        for key, value in identity.items()
    }
    accelerator.init_trackers(
        PROJECT,
        config=None if step else plain,
        init_kwargs={"wandb": wandb, "tensorboard": {"purge_step": step + 1}},
    )
    if offline and "id" in wandb:
        folder = accelerator.get_tracker("wandb", unwrap=True).settings.sync_dir
        say(f"wandb is offline; when the run is done: wandb sync {folder}")


def _wandb_id(run: Path, new: bool) -> str:
    """The id of a run, made and kept where it is new; one of an earlier version has none."""
    path = run / WANDB_ID
    if new or not path.is_file():
        atomic_write(path, secrets.token_hex(4) + "\n")
    return path.read_text(encoding="utf-8").strip()


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators(WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False

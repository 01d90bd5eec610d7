"""What shapes a training run, apart from the data and the head."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from spectrain.core.config import Config

DEFAULT_EPOCHS = 4.0


class TrunkSettings(Config):
    """Whether and how the target itself is trained along with the head."""

    mode: Literal["frozen", "lora", "full", "scratch"] = Field(
        "frozen",
        description="frozen: the head alone; lora or full: the target is tuned along; scratch: a "
        "new model of the target's shape",
    )


class TrainerSettings(Config):
    """Settings of the loop; recipes add what to train on and turn epochs into steps."""

    steps: int | None = Field(None, ge=1, description="optimiser steps; or give epochs")
    epochs: float | None = Field(
        None, gt=0, description="passes over the data; or give steps; default 4"
    )
    batch_size: int = Field(
        8, ge=1, description="conversations in one optimiser step, over all processes"
    )
    micro_batch: int = Field(
        4,
        ge=1,
        description="conversations in one forward of one process; changes memory and speed only",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw, or muon for matrices (vectors and token tables stay with adamw)",
    )
    lr: float = Field(1e-3, gt=0, description="highest learning rate of adamw")
    matrix_lr: float = Field(0.02, gt=0, description="highest learning rate of muon")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay, on matrices only")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine",
        description="after the warm-up: cosine to 0, or constant, or wsd: constant and linear to 0 "
        "over the last fifth",
    )
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the steps with a rising rate")
    clip: float = Field(1.0, ge=0, description="largest gradient norm, 0 for no clipping")
    mixed_precision: Literal["no", "bf16"] = Field(
        "no", description="bf16: matrix products in bfloat16, weights stay float32"
    )
    trunk: TrunkSettings = Field(
        TrunkSettings(), description="training of the target itself (Medusa-2, MTP)"
    )
    seed: int = Field(0, ge=0, description="seed of weights, order and noise")
    max_bad_steps: int = Field(
        5, ge=1, description="give up after so many non-finite steps in a row"
    )
    save_every: int = Field(100, ge=1, description="steps between two checkpoints")
    keep: int = Field(2, ge=1, description="checkpoints that are kept")
    log_every: int = Field(10, ge=1, description="steps between two rows of metrics")
    tracker: Literal["none", "wandb", "tensorboard"] = Field(
        "none", description="where metrics go besides metrics.jsonl"
    )

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are both given, give one of them")
        return self

    def total_steps(self, rows: int) -> int:
        """Optimiser steps for a number of training rows."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil((self.epochs or DEFAULT_EPOCHS) * rows / self.batch_size))


# A run may be continued with other values of these: they do not change what is learnt (the split
# into micro-batches only by rounding).
FREE_TO_CHANGE = frozenset(
    {"micro_batch", "max_bad_steps", "save_every", "keep", "log_every", "tracker"}
)

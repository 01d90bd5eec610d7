"""What shapes a training run, apart from the data and the head."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from spectrain.core.config import Config

DEFAULT_EPOCHS = 4.0


class TrunkSettings(Config):
    """Whether and how the target itself (the heads' trunk) is trained along with the head.

    Defaults as in Medusa-2 (arXiv 2401.10774): λ0, two stages, rates of 4 to 1, self-distillation,
    rank and alpha.
    """

    mode: Literal["frozen", "lora", "full", "scratch"] = Field(
        "frozen",
        description="frozen: the head alone; lora or full: the target is tuned along; scratch: a "
        "new model of the target's shape, trained on the store's replies alone",
    )
    loss: Literal["distil", "text"] | None = Field(
        None,
        description="distil: stay close to the original target, for replies of its own (default of "
        "lora and full); text: next-token cross-entropy on the replies (default of scratch)",
    )
    heads_weight: float | None = Field(
        None,
        gt=0,
        description="weight of the heads' loss beside the trunk's; default: the family's (medusa "
        "0.2; 1 where the family's own terms are weighed already)",
    )
    heads_first: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of the steps before the trunk begins to learn; default 0.25, scratch 0",
    )
    ramp: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the steps, from where the trunk begins to learn, over which the "
        "heads' weight rises to heads_weight",
    )
    lr: float | None = Field(
        None,
        gt=0,
        description="highest learning rate of the trunk (of muon: matrix_lr in the same "
        "proportion); default: a quarter of lr, scratch: lr",
    )
    rank: int = Field(32, ge=1, description="rank of the LoRA matrices")
    alpha: float = Field(16, gt=0, description="LoRA scale: the update is weighed alpha / rank")
    targets: list[str] | None = Field(
        None,
        description="names of the layers with LoRA, e.g. [q_proj, v_proj]; default: all linear "
        "layers of the decoder",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.mode == "scratch" and self.loss == "distil":
            raise ValueError("trunk.loss distil needs a target to stay close to, scratch has none")
        return self

    @property
    def trained(self) -> bool:
        return self.mode != "frozen"

    @property
    def first(self) -> float:
        """Share of the steps in which the heads learn alone."""
        if self.heads_first is not None:
            return self.heads_first
        return 0.25 if self.mode in ("lora", "full") else 0.0

    def share(self, lr: float) -> float:
        """The trunk's learning rate as a share of the heads' rate `lr`."""
        if self.lr is not None:
            return self.lr / lr
        return 1.0 if self.mode == "scratch" else 0.25


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
        description="rows in one forward of one process; changes memory and speed only",
    )
    pack_length: int = Field(
        0,
        ge=0,
        description="tokens of a row that several conversations share in training; 0: one "
        "conversation a row; changes memory and speed only",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw, or muon for matrices (vectors and token tables stay with adamw)",
    )
    lr: float = Field(1e-3, gt=0, description="highest learning rate of adamw")
    matrix_lr: float = Field(0.02, gt=0, description="highest learning rate of muon")
    lr_factors: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="factors of the rate by names of tensors, e.g. {lm_head.*: 0.1, fc.*: 2}; the "
        "first pattern that a name matches counts",
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of a running mean of the weights, e.g. 0.999; the mean is the result "
        "then; default: none, the result is the weights of the last step",
    )
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay, on matrices only")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine",
        description="after the warm-up: cosine to 0, or constant, or wsd: constant and linear to 0 "
        "over the last fifth",
    )
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the steps with a rising rate")
    clip: float = Field(1.0, ge=0, description="largest gradient norm, 0 for no clipping")
    mixed_precision: Literal["no", "bf16", "auto"] = Field(
        "no",
        description="bf16: matrix products in bfloat16, weights stay float32; auto: bf16 where the "
        "device has units for it",
    )

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _no(cls, value: object) -> object:
        """YAML reads a bare `no` as false."""
        return "no" if value is False else value

    trunk: TrunkSettings = Field(
        TrunkSettings(), description="training of the target itself (Medusa-2, MTP)"
    )
    shard: bool | Literal["auto"] = Field(
        "auto",
        description="true: every process holds a part of the target's layers (FSDP2) and no device "
        "the whole; auto: where `accelerate launch --use_fsdp` asks for it; memory and speed only",
    )
    seed: int = Field(0, ge=0, description="seed of weights, order and noise")
    max_bad_steps: int = Field(
        5, ge=1, description="give up after so many non-finite steps in a row"
    )
    save_every: int = Field(100, ge=1, description="steps between two checkpoints")
    save_minutes: float = Field(
        10.0, ge=0, description="most minutes between two checkpoints; 0: as many as the steps take"
    )
    keep: int = Field(2, ge=1, description="checkpoints that are kept")
    log_every: int = Field(10, ge=1, description="steps between two rows of metrics")
    eval_every: int = Field(
        0,
        ge=0,
        description="steps between two measurements on held-out conversations (the best head is "
        "kept in out/best); 0: none",
    )
    eval_rows: int = Field(64, ge=1, description="held-out conversations measured, at most")
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
# into rows and micro-batches only by rounding).
FREE_TO_CHANGE = frozenset(
    {
        *("micro_batch", "pack_length", "shard", "max_bad_steps", "save_every", "save_minutes"),
        *("keep", "log_every", "tracker", "eval_every", "eval_rows"),
    }
)

"""`spectrain train-eagle`, `train-medusa`, `train-mtp` and `train-draft`: one recipe.

They differ in one flag, which chooses the family or how the target is treated. Typer reads options
from signatures, so each command lists its own; what was given is taken from the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer

from spectrain.commands import options, running
from spectrain.commands.options import (
    ConfigFile,
    Json,
    Overrides,
    Overwrite,
    Seed,
    Target,
    option,
)
from spectrain.core.failures import one_line_errors

Store, Out = options.store("runs/store"), options.out("runs/train")
Steps = option(int, "Optimiser steps.", default="4 epochs")
Rate = option(float, "Highest learning rate.", default="0.001")
BatchSize = option(int, "Conversations in each step.", default="8")
Tracker = option(str, "Metrics also go to wandb or tensorboard.", metavar="NAME", default="none")
EvalEvery = option(
    int, "Measure α and τ on held-out rows every so many steps; keep the best head.", default="0"
)
Keep = option(int, "Checkpoints that are kept.", default="2")
Init = option(
    str, "Start from this head: trained here, or imported.", metavar="FOLDER", default="a new one"
)
Version = option(str, "Which EAGLE to train.", metavar="1|2|3", default="3")
Stage = option(
    str, "1: heads alone; 2: the target is tuned along (LoRA).", metavar="1|2", default="1"
)
Kind = option(
    str, "How its modules are joined.", metavar="parallel|sequential", default="sequential"
)


@dataclass(frozen=True)
class Choice:
    """The flag of a command that is its own.

    kinds: what each of its values sets
    """

    flag: str
    default: str
    kinds: Mapping[str, Mapping[str, str]]


VERSION = Choice("version", "3", {v: {"family": f"eagle{v}"} for v in ("1", "2", "3")})
STAGE = Choice(
    "stage",
    "1",
    {
        "1": {"family": "medusa", "trunk.mode": "frozen"},
        "2": {"family": "medusa", "trunk.mode": "lora"},
    },
)
KIND = Choice("kind", "sequential", {k: {"family": f"mtp-{k}"} for k in ("parallel", "sequential")})
DRAFT = Choice("", "", {"": {"family": "draft"}})  # nothing to choose


def train_eagle(
    ctx: typer.Context,
    target: Target = None,
    store: Store = None,
    out: Out = None,
    init: Init = None,
    version: Version = None,
    steps: Steps = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    eval_every: EvalEvery = None,
    keep: Keep = None,
    tracker: Tracker = None,
    overwrite: Overwrite = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Train an EAGLE head on a feature store.

    \b
    Examples:
      spectrain train-eagle --store runs/store --out runs/train --steps 400
      accelerate launch --num_processes 2 --cpu -m spectrain \\
          train-eagle --store runs/store --out runs/train
    """
    _train(VERSION, ctx.params)


def train_medusa(
    ctx: typer.Context,
    target: Target = None,
    store: Store = None,
    out: Out = None,
    init: Init = None,
    stage: Stage = None,
    steps: Steps = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    eval_every: EvalEvery = None,
    keep: Keep = None,
    tracker: Tracker = None,
    overwrite: Overwrite = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Train Medusa heads, alone or together with the target.

    \b
    Examples:
      spectrain train-medusa --store runs/store --out runs/medusa
      spectrain train-medusa --stage 2 --store runs/store --out runs/medusa2 \\
          --set trunk.mode=full
    """
    _train(STAGE, ctx.params)


def train_mtp(
    ctx: typer.Context,
    target: Target = None,
    store: Store = None,
    out: Out = None,
    init: Init = None,
    kind: Kind = None,
    steps: Steps = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    eval_every: EvalEvery = None,
    keep: Keep = None,
    tracker: Tracker = None,
    overwrite: Overwrite = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Train multi-token-prediction modules: parallel (Meta) or sequential (DeepSeek-V3).

    \b
    Examples:
      spectrain train-mtp --kind sequential --store runs/store --out runs/mtp
      spectrain train-mtp --target with-mtp --store runs/store --out runs/mtp \\
          --set head.native=true --set put_back=new-target
    """
    _train(KIND, ctx.params)


def train_draft(
    ctx: typer.Context,
    target: Target = None,
    store: Store = None,
    out: Out = None,
    init: Init = None,
    steps: Steps = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    eval_every: EvalEvery = None,
    keep: Keep = None,
    tracker: Tracker = None,
    overwrite: Overwrite = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Distil a small draft model (a causal LM with the target's tokenizer).

    \b
    Examples:
      spectrain train-draft --store runs/store --out runs/draft
      spectrain train-draft --store runs/store --out runs/draft \\
          --set head.model=my-small-model
    """
    _train(DRAFT, ctx.params)


def _train(choice: Choice, given: Mapping[str, Any]) -> None:
    """Work out what the command's own flag sets, and train.

    Where the flag is not given, a family named in the configuration decides.
    """
    flags = dict(given)
    value = flags.pop(choice.flag, None)
    with one_line_errors():
        flags["set_"] = without_epochs(flags["steps"], flags["set_"])
        flags |= _chosen(choice, value, flags)
    running.run("train", "train", "TrainConfig", flags)


def without_epochs(steps: int | None, overrides: list[str] | None) -> list[str]:
    """--set texts with which --steps replaces the epochs of a configuration."""
    found = list(overrides or ())
    if steps is not None and not any(text.startswith("epochs") for text in found):
        found.append("epochs=null")
    return found


def _chosen(choice: Choice, value: str | None, given: Mapping[str, Any]) -> dict[str, str]:
    """Settings that follow from the value of the command's own flag (None: not given).

    Raises SpectrainError for an unknown value, or one that the configuration contradicts.
    """
    from spectrain.core.config import load_config
    from spectrain.core.errors import SpectrainError
    from spectrain.recipes.train_config import TrainConfig

    if value is not None and value not in choice.kinds:
        raise SpectrainError(
            f"{value!r} is not a choice",
            where=f"--{choice.flag}",
            fix=f"one of {', '.join(choice.kinds)}",
        )
    own = {name: flag for name, flag in given.items() if name not in ("config", "set_", "json")}
    found = load_config(TrainConfig, "train", given["config"], given["set_"], own)
    named = found.family if "family" in found.model_fields_set else None
    kinds = choice.kinds.values() if value is None else [choice.kinds[value]]
    wanted = [kind["family"] for kind in kinds]
    if named is not None and named not in wanted:
        raise SpectrainError(
            f"the configuration is for the family {named!r}, this command trains "
            f"{' or '.join(dict.fromkeys(wanted))}",
            where="family",
            fix="use that family's command or another --config",
        )
    if value is None and named is not None:
        return {}
    chosen = dict(choice.kinds[value or choice.default])
    if "trunk.mode" in chosen and "mode" in found.trunk.model_fields_set:
        # What the configuration says of the trunk stands, if the flag's value allows it.
        mode = chosen.pop("trunk.mode")
        if value is not None and (mode == "frozen") == found.trunk.trained:
            raise SpectrainError(
                f"--{choice.flag} {value} does not go with trunk.mode = {found.trunk.mode!r} of "
                "the configuration",
                where="trunk.mode",
                fix="leave out one of them",
            )
    return chosen

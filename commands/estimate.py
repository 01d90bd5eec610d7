"""`spectrain estimate`."""

from __future__ import annotations

import typer

from spectrain.commands import options, running, train
from spectrain.commands.options import ConfigFile, Json, Overrides, Overwrite, Seed, Target, option

Store = options.store()
Family = option(
    str,
    "eagle1, eagle2, eagle3, medusa, mtp-parallel, mtp-sequential or draft.",
    metavar="NAME",
    default="eagle3",
)
Conversations = option(int, "Training conversations.", default="the store's, or 1000")
Length = option(int, "Tokens of a conversation, without a store.", default="512")
Supervised = option(float, "Share of tokens in replies, without a store.", default="0.5")


def estimate(
    ctx: typer.Context,
    target: Target = None,
    family: Family = None,
    store: Store = None,
    conversations: Conversations = None,
    length: Length = None,
    supervised: Supervised = None,
    out: train.Out = None,
    steps: train.Steps = None,
    lr: train.Rate = None,
    batch_size: train.BatchSize = None,
    tracker: train.Tracker = None,
    overwrite: Overwrite = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Tell what a training will take: parameters, memory, time, disk.

    \b
    Takes what the train commands take, and reads shapes alone: a folder with the
    config.json of a target will do. Nothing is written.
    Examples:
      spectrain estimate --family eagle3 --store runs/store
      spectrain estimate --config eagle3-8b --target my-llama --length 2048
      spectrain estimate --family medusa --set trunk.mode=lora --batch-size 32
    """
    flags = dict(ctx.params)
    flags["set_"] = train.without_epochs(flags["steps"], flags["set_"])
    running.run("estimate", "estimate", "EstimateConfig", flags, section="train")

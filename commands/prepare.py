"""`spectrain prepare`, `spectrain verify-data` and `spectrain targets`."""

from __future__ import annotations

from typing import Annotated

import typer

from spectrain.commands import options, running
from spectrain.commands.options import (
    ConfigFile,
    Json,
    Limit,
    OnBadRow,
    Overrides,
    Overwrite,
    Seed,
    Target,
)
from spectrain.core.failures import one_line_errors

Prompts = options.sources("the shipped prompts")
Family = options.option(str, "Keep only what heads of this family read.", metavar="NAME")
Server = options.option(str, "Let an OpenAI-compatible server answer.", metavar="URL")
DryRun = options.option(bool, "Only say what it would take.", "--dry-run")
Store = options.store("runs/store")
Temperatures = options.temperatures("0.7")
MaxNewTokens = options.max_new_tokens("256")
Heldout = options.option(float, "Share of prompts kept for eval-alpha, up to 1.", default="0.1")
Verified = Annotated[
    str | None,
    typer.Argument(
        help="Feature store, written by prepare.  [default: runs/store]",
        metavar="FOLDER",
        show_default=False,
    ),
]
MadeBy = options.option(
    str,
    "Target model: smollm2-135m, a model folder or a hub id.",
    metavar="NAME",
    default="the store's own",
)
WithoutTarget = options.option(bool, "Look at the files alone, load no model.", "--without-target")
Sample = options.option(int, "Reply positions that are looked at closely.", default="256")
Fetch = options.option(str, "Fetch and convert this one now.", metavar="NAME")


def prepare(
    ctx: typer.Context,
    target: Target = None,
    prompts: Prompts = None,
    store: Store = None,
    temperature: Temperatures = None,
    max_new_tokens: MaxNewTokens = None,
    heldout: Heldout = None,
    limit: Limit = None,
    family: Family = None,
    server: Server = None,
    dry_run: DryRun = None,
    on_bad_row: OnBadRow = None,
    overwrite: Overwrite = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Let the target answer the prompts and store its features.

    --limit chooses by content, so every source is read to its end first.

    \b
    Examples:
      spectrain prepare --prompts prompts.jsonl --store runs/store --limit 50
      spectrain prepare --prompts chats.jsonl --family eagle3 --dry-run
    """
    given = ctx.params | {"temperature": running.split(temperature), "prompts": prompts or None}
    running.run("prepare", "prepare", "PrepareConfig", given)


def verify_data(
    ctx: typer.Context,
    store: Verified = None,
    target: MadeBy = None,
    without_target: WithoutTarget = None,
    sample: Sample = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Check a feature store: files, every invariant, the target's word.

    Exits with 1 if something does not hold, with 2 for what is no store.

    \b
    Examples:
      spectrain verify-data runs/store
      spectrain verify-data runs/store --without-target
    """
    running.run("verify_data", "verify-data", "VerifyConfig", ctx.params)


def targets(fetch: Fetch = None, json: Json = None) -> None:
    """List the targets at hand, or fetch the embedded one.

    \b
    Examples:
      spectrain targets
      spectrain targets --fetch smollm2-135m
    """
    with one_line_errors():
        from spectrain.core import models
        from spectrain.core.files import require_writable

        if json is not None:
            require_writable(json)
        if fetch is not None:
            models.fetch(fetch)
        running.finish({"targets": models.list_targets()}, json)

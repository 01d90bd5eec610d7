"""`spectrain prepare` and `spectrain targets`."""

from __future__ import annotations

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

Prompts = options.prompts("the shipped prompts")
Store = options.store("runs/store")
Temperatures = options.temperatures("0.7")
MaxNewTokens = options.max_new_tokens("256")
Heldout = options.option(float, "Share of prompts kept for eval-alpha, up to 1.", default="0.1")
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
    on_bad_row: OnBadRow = None,
    overwrite: Overwrite = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Let the target answer the prompts and store its features.

    \b
    Example:
      spectrain prepare --prompts prompts.jsonl --store runs/store --limit 50
    """
    given = ctx.params | {"temperature": running.split(temperature)}
    running.run("prepare", "prepare", "PrepareConfig", given)


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

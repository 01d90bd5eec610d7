"""`spectrain inspect`."""

from __future__ import annotations

import typer

from spectrain.commands import options, running
from spectrain.commands.options import ConfigFile, Json, Overrides, option

Target = option(str, options.TARGET, metavar="NAME", default="the store's, else smollm2-135m")
Prompts, Store = options.sources(), options.store()
Limit = option(int, options.LIMIT, default="1000")
Show = option(int, "Print so many of the rows.", default="3")
RowName = option(str, "Print this row alone: its number or id.", "--row", metavar="NUMBER|ID")
BadRows = option(str, options.BAD_ROW, metavar="stop|skip", default="skip")


def inspect(
    ctx: typer.Context,
    target: Target = None,
    prompts: Prompts = None,
    store: Store = None,
    limit: Limit = None,
    show: Show = None,
    row: RowName = None,
    on_bad_row: BadRows = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Show what training will see of prompts or of a store.

    \b
    Supervised text stands in ⟦ ⟧. Only the target's tokenizer is loaded.
    Examples:
      spectrain inspect --prompts prompts.jsonl --target smollm2-135m
      spectrain inspect --store runs/store --row 7
    """
    running.run("inspect", "inspect", "InspectConfig", ctx.params | {"prompts": prompts or None})

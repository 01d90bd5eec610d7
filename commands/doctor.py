"""`spectrain doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from spectrain.commands import options, running
from spectrain.commands.options import ConfigFile, Json, Overrides, Seed, Target, option

Path = Annotated[str, typer.Argument(help="Folder of a head, in any known layout.", metavar="PATH")]
Prompts, Limit = options.prompts("the shipped prompts"), option(int, options.LIMIT, default="10")
NewTokens = options.max_new_tokens("48")


def doctor(
    ctx: typer.Context,
    path: Path,
    target: Target = None,
    prompts: Prompts = None,
    limit: Limit = None,
    max_new_tokens: NewTokens = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Examine the checkpoint of a head, and find out why nothing is accepted.

    \b
    Names the layout, checks what can be read, lets the head guess, and undoes
    common mistakes one at a time. Exits with 1 if the head is not healthy.
    Example:
      spectrain doctor runs/train/head --target smollm2-135m
    """
    running.run("doctor", "doctor", "DoctorConfig", ctx.params)

"""`spectrain import`."""

from __future__ import annotations

from typing import Annotated

import typer

from spectrain.commands import options, running
from spectrain.commands.options import ConfigFile, Json, Overrides, Overwrite, Target, option

Path = Annotated[str, typer.Argument(metavar="PATH", help="Folder of a head, in any known layout.")]
Out = options.out("runs/import")
DraftSteps = option(
    int, "Draft steps it was trained for, where its files do not say.", metavar="NUMBER"
)


def import_(
    ctx: typer.Context,
    path: Path,
    target: Target = None,
    out: Out = None,
    draft_steps: DraftSteps = None,
    overwrite: Overwrite = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Make a run of a head that others trained, in any of the public layouts.

    PATH may also be a file of weights, or a hub id. What is written to OUT/head
    is taken by generate, eval-alpha and train-…; no code of a checkpoint is run.

    \b
    Examples:
      spectrain import downloads/head --target smollm2-135m --out runs/theirs
      spectrain import OWNER/NAME --target models/llama --draft-steps 5
    """
    running.run("import_head", "import", "ImportConfig", ctx.params)

"""The `spectrain` command: its groups of commands, gathered. No torch before a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

import spectrain
from spectrain.commands import (
    doctor,
    estimate,
    export,
    generate,
    import_head,
    inspect,
    measure,
    prepare,
    train,
)
from spectrain.core import environment

app = typer.Typer(
    name="spectrain",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: the same on every terminal and in a pipe
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Train draft heads for speculative decoding, and prove what they are worth.

    \b
    The usual way, each command reading what the one before it wrote:
      spectrain prepare --prompts prompts.jsonl --store runs/store
      spectrain train-eagle --store runs/store --out runs/train
      spectrain eval-alpha --store runs/store --head runs/train/head
      spectrain generate --head runs/train/head --prompt "Why is the sky blue?"
    """
    if version:
        typer.echo(spectrain.__version__)
        raise typer.Exit


for command in (
    prepare.prepare,
    inspect.inspect,
    prepare.verify_data,
    measure.draft_vocab,
    estimate.estimate,
    train.train_eagle,
    train.train_medusa,
    train.train_mtp,
    train.train_draft,
    measure.eval_alpha,
    measure.plan,
    generate.generate,
    generate.chat,
    measure.compare,
    measure.check,
    export.export,
    import_head.import_,
    doctor.doctor,
    prepare.targets,
):
    app.command(command.__name__.strip("_").replace("_", "-"))(command)


def main() -> None:
    """Entry point of the console script."""
    environment.settle()  # before anything imports torch
    app()

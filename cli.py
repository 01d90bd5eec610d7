"""The `spectrain` command: parse, call one recipe, print. No torch before a command runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any

import typer

import spectrain
from spectrain.core import environment
from spectrain.core.failures import one_line_errors

app = typer.Typer(
    name="spectrain",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: the same on every terminal and in a pipe
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)

# One word for one thing: every command takes its options from here.
Target = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Target model: smollm2-135m, a model folder or a hub id."),
]
Store = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Feature store, written by prepare.")
]
Head = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Trained head: OUT/head of train-eagle.")
]
Out = Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder to write to.")]
Prompts = Annotated[
    str | None, typer.Option(metavar="FILE", help="JSONL file, one conversation a line.")
]
Temperatures = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NUMBER", help="Sampling temperature, 0 = greedy; repeat it or separate by commas."
    ),
]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature, 0 = greedy.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Longest reply, in tokens.")]
DraftTokens = Annotated[
    int | None, typer.Option(help="Tokens drafted before each check by the target.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of everything random.")]
ConfigFile = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="YAML file, or the name of a shipped one."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; may be repeated."),
]
OnBadRow = Annotated[
    str | None, typer.Option(metavar="stop|skip", help="At a line that is no conversation.")
]
Steps = Annotated[int | None, typer.Option(help="Optimiser steps.")]
Rate = Annotated[float | None, typer.Option(help="Highest learning rate.")]
BatchSize = Annotated[int | None, typer.Option(help="Conversations in each step.")]
Tracker = Annotated[
    str | None, typer.Option(metavar="NAME", help="Metrics also go to wandb or tensorboard.")
]
Overwrite = Annotated[
    bool | None, typer.Option("--overwrite", help="Replace what other settings made there.")
]
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the report to this JSON file.")
]


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


@app.command()
def prepare(
    target: Target = None,
    prompts: Prompts = None,
    store: Store = None,
    temperature: Temperatures = None,
    max_new_tokens: MaxNewTokens = None,
    heldout: Annotated[
        float | None, typer.Option(help="Share of prompts kept for eval-alpha, up to 1.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use only so many conversations.")] = None,
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
    flags = {
        "target": target,
        "prompts": prompts,
        "store": store,
        "temperature": _split(temperature),
        "max_new_tokens": max_new_tokens,
        "heldout": heldout,
        "limit": limit,
        "on_bad_row": on_bad_row,
        "overwrite": overwrite,
        "seed": seed,
    }
    _run("prepare", "prepare", "PrepareConfig", config, set_, flags, json)


@app.command()
def train_eagle(
    target: Target = None,
    store: Store = None,
    out: Out = None,
    version: Annotated[
        str | None, typer.Option(metavar="1|2|3", help="Which EAGLE to train; 3 by default.")
    ] = None,
    steps: Steps = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
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
    _train(
        {name[5:]: {"family": name} for name in ("eagle1", "eagle2", "eagle3")},
        ("version", version, "3"),
        config,
        set_,
        json,
        target=target,
        store=store,
        out=out,
        steps=steps,
        lr=lr,
        batch_size=batch_size,
        tracker=tracker,
        overwrite=overwrite,
        seed=seed,
    )


@app.command()
def train_medusa(
    target: Target = None,
    store: Store = None,
    out: Out = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="1|2", help="1: heads alone (default); 2: the target is tuned along (LoRA)."
        ),
    ] = None,
    steps: Steps = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
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
    _train(
        {
            "1": {"family": "medusa", "trunk.mode": "frozen"},
            "2": {"family": "medusa", "trunk.mode": "lora"},
        },
        ("stage", stage, "1"),
        config,
        set_,
        json,
        target=target,
        store=store,
        out=out,
        steps=steps,
        lr=lr,
        batch_size=batch_size,
        tracker=tracker,
        overwrite=overwrite,
        seed=seed,
    )


@app.command()
def train_mtp(
    target: Target = None,
    store: Store = None,
    out: Out = None,
    kind: Annotated[
        str | None,
        typer.Option(metavar="parallel|sequential", help="How its modules are joined."),
    ] = None,
    steps: Steps = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
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
    _train(
        {kind: {"family": f"mtp-{kind}"} for kind in ("parallel", "sequential")},
        ("kind", kind, "sequential"),
        config,
        set_,
        json,
        target=target,
        store=store,
        out=out,
        steps=steps,
        lr=lr,
        batch_size=batch_size,
        tracker=tracker,
        overwrite=overwrite,
        seed=seed,
    )


@app.command()
def train_draft(
    target: Target = None,
    store: Store = None,
    out: Out = None,
    steps: Steps = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
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
    _train(
        {"": {"family": "draft"}},
        ("", None, ""),
        config,
        set_,
        json,
        target=target,
        store=store,
        out=out,
        steps=steps,
        lr=lr,
        batch_size=batch_size,
        tracker=tracker,
        overwrite=overwrite,
        seed=seed,
    )


@app.command()
def eval_alpha(
    target: Target = None,
    store: Store = None,
    head: Head = None,
    out: Out = None,
    temperature: Temperatures = None,
    max_draft: Annotated[
        int | None, typer.Option(help="Draft positions to measure, from the first.")
    ] = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Measure acceptance on the held-out conversations of a store.

    \b
    Example:
      spectrain eval-alpha --store runs/store --head runs/train/head \\
          --temperature 0,1 --json alpha.json
    """
    flags = {
        "target": target,
        "store": store,
        "head": head,
        "out": out,
        "temperature": _split(temperature),
        "max_draft": max_draft,
        "seed": seed,
    }
    _run("evaluate", "eval", "EvalConfig", config, set_, flags, json)


@app.command()
def generate(
    target: Target = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Trained head; without one, plain decoding."),
    ] = None,
    prompts: Prompts = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="One prompt, as text.")] = None,
    out: Out = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    limit: Annotated[int | None, typer.Option(help="Use only so many conversations.")] = None,
    on_bad_row: OnBadRow = None,
    draft_tokens: DraftTokens = None,
    tree: Annotated[
        str | None, typer.Option(metavar="chain|grown", help="Draft a chain, or grow a tree.")
    ] = None,
    compare: Annotated[
        bool | None,
        typer.Option("--compare", help="Also decode without the head; compare speed and tokens."),
    ] = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Write replies, faster with a head.

    \b
    Examples:
      spectrain generate --prompt "Why is the sky blue?"
      spectrain generate --head runs/train/head --prompts prompts.jsonl --compare
    """
    flags = {
        "target": target,
        "head": head,
        "prompts": prompts,
        "prompt": prompt,
        "out": out,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "limit": limit,
        "on_bad_row": on_bad_row,
        "draft_tokens": draft_tokens,
        "tree": tree,
        "compare": compare,
        "seed": seed,
    }
    _run("generate", "generate", "GenerateConfig", config, set_, flags, json)


@app.command()
def compare(
    target: Target = None,
    store: Store = None,
    out: Out = None,
    families: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these entries, e.g. eagle3,medusa."),
    ] = None,
    draft_tokens: DraftTokens = None,
    prompts: Annotated[
        int | None, typer.Option("--race-prompts", help="Prompts in the race.")
    ] = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Train several heads on one store and compare them: α, τ, speed.

    \b
    Examples:
      spectrain compare --store runs/store --out runs/compare
      spectrain compare --store runs/store --families eagle3,medusa \\
          --set common.steps=200
    """
    flags = {
        "target": target,
        "store": store,
        "out": out,
        "families": _split([families] if families else None),
        "draft_tokens": draft_tokens,
        "prompts": prompts,
        "seed": seed,
    }
    _run("compare", "compare", "CompareConfig", config, set_, flags, json)


@app.command()
def targets(
    fetch: Annotated[
        str | None, typer.Option(metavar="NAME", help="Fetch and convert this one now.")
    ] = None,
    json: Json = None,
) -> None:
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
        _finish({"targets": models.list_targets()}, json)


def _train(
    kinds: dict[str, dict[str, str]],
    choice: tuple[str, str | None, str],
    file: str | None,
    overrides: list[str] | None,
    json: str | None,
    **flags: Any,
) -> None:
    """Run one of the train commands.

    kinds: what each value of the command's own flag sets; choice: the flag, its value, its default.
    Where the flag is not given, a family named in the configuration decides.
    """
    with one_line_errors():
        from spectrain.core.config import load_config
        from spectrain.core.errors import SpectrainError
        from spectrain.recipes.train import TrainConfig

        overrides = list(overrides or [])
        if flags["steps"] is not None and not any(o.startswith("epochs") for o in overrides):
            overrides.append("epochs=null")  # --steps replaces the epochs of a configuration
        flag, value, default = choice
        if value is not None and value not in kinds:
            raise SpectrainError(
                f"{value!r} is not a choice", where=f"--{flag}", fix=f"one of {', '.join(kinds)}"
            )
        found = load_config(TrainConfig, "train", file, overrides, flags)
        named = found.family if "family" in found.model_fields_set else None
        families = [kind["family"] for kind in kinds.values()]
        wanted = families if value is None else [kinds[value]["family"]]
        if named is not None and named not in wanted:
            raise SpectrainError(
                f"the configuration is for the family {named!r}, this command trains "
                f"{' or '.join(dict.fromkeys(wanted))}",
                where="family",
                fix="use that family's command or another --config",
            )
        chosen = kinds[value or default] if value is not None or named is None else {}
        mode = chosen.pop("trunk.mode", None)
        flags |= chosen
        if mode is not None and "mode" not in found.trunk.model_fields_set:
            flags["trunk.mode"] = mode
        elif value is not None and mode and (mode == "frozen") == found.trunk.trained:
            raise SpectrainError(
                f"--{flag} {value} does not go with trunk.mode = {found.trunk.mode!r} of the "
                "configuration",
                where="trunk.mode",
                fix="leave out one of them",
            )
    _run("train", "train", "TrainConfig", file, overrides, flags, json)


def _run(
    recipe: str,
    verb: str,
    config_class: str,
    file: str | None,
    overrides: list[str] | None,
    flags: dict[str, Any],
    json: str | None,
) -> None:
    """Build the configuration, run `spectrain.recipes.<recipe>`, print and write its report."""
    with one_line_errors(goes_on=verb in ("prepare", "train", "compare")):
        from spectrain.core.config import load_config
        from spectrain.core.files import require_writable

        if json is not None:
            require_writable(json)  # now, not after hours of work
        module = importlib.import_module(f"spectrain.recipes.{recipe}")
        model = getattr(module, config_class)
        report = module.run(load_config(model, verb, file, overrides or [], flags))
        _finish(report, json, getattr(module, "render", None))


def _finish(
    report: dict[str, Any], json: str | None, render: Callable[[dict[str, Any]], Any] | None = None
) -> None:
    """Print the report the recipe's own way, or plainly, and write it to the --json file."""
    from rich.console import Console

    from spectrain.core.files import write_json
    from spectrain.core.progress import main_process
    from spectrain.core.show import WIDTH, show

    if not main_process():
        return
    shown = (render or show)(report)
    if isinstance(shown, str):
        typer.echo(shown)
    else:
        Console(width=WIDTH, highlight=False).print(shown)
    if json is not None:
        write_json(json, report)


def _split(texts: list[str] | None) -> list[str] | None:
    """`--temperature 0,1 --temperature 0.5` → three texts; the configuration makes them numbers."""
    if not texts:
        return None
    return [part.strip() for text in texts for part in text.split(",")]


def main() -> None:
    """Entry point of the console script."""
    environment.settle()  # before anything imports torch
    app()

"""`spectrain generate`."""

from __future__ import annotations

import typer

from spectrain.commands import options, running
from spectrain.commands.options import (
    ConfigFile,
    Json,
    Limit,
    OnBadRow,
    Overrides,
    Seed,
    Target,
    option,
)

Head = option(str, "Trained head; without one, plain decoding.", metavar="FOLDER")
Prompts = options.prompts()
Prompt = option(str, "One prompt, as text.", metavar="TEXT")
Out = options.out()
Temperature = option(float, "Sampling temperature, 0 = greedy.", default="0")
MaxNewTokens = options.max_new_tokens("128")
DraftTokens = options.draft_tokens("up to 3")
Tree = option(
    str,
    "Draft a chain, or grow a tree.",
    metavar="chain|grown",
    default="grown for EAGLE-2, else chain",
)
Compare = option(bool, "Also decode without the head; compare speed and tokens.", "--compare")


def generate(
    ctx: typer.Context,
    target: Target = None,
    head: Head = None,
    prompts: Prompts = None,
    prompt: Prompt = None,
    out: Out = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    limit: Limit = None,
    on_bad_row: OnBadRow = None,
    draft_tokens: DraftTokens = None,
    tree: Tree = None,
    compare: Compare = None,
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
    running.run("generate", "generate", "GenerateConfig", ctx.params)

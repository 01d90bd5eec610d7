"""`spectrain generate` and `spectrain chat`."""

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
    option,
)

Head = option(str, "Trained head; without one, plain decoding.", metavar="FOLDER")
Prompts = options.prompts()
Prompt = option(str, "One prompt, as text.", metavar="TEXT")
Out = options.out()
Temperature = option(float, options.TEMPERATURE, default="0")
TopP = option(float, "Nucleus; 1 = everything.", default="1")
MaxNewTokens = options.max_new_tokens("128")
LongReplies = options.max_new_tokens("512")
DraftTokens = options.draft_tokens("up to 3")
Tree = option(
    str,
    "Draft a chain, a static tree, or grow one.",
    metavar="chain|static|grown|FILE",
    default="as planned, else grown for EAGLE-2, else chain",
)
Lookup = option(
    int, "Prompt lookup without a head: match so many last tokens, or fewer.", metavar="N"
)
Proposal = option(
    str,
    "When sampling: draft the likeliest tokens, or draw them. Both are lossless.",
    metavar="top-k|drawn",
    default="drawn for unplanned chains, else top-k",
)
Typical = option(bool, "LOSSY: accept whatever is likely enough; changes the output.", "--typical")
Rows = option(int, options.ROWS, default="1")
Stop = option(list[str], "Text that ends a reply; may be repeated.", "--stop", metavar="TEXT")
Stats = option(bool, "Also show acceptance by depth and time by stage.", "--stats")
Compare = option(bool, "Also decode without the head; compare speed and tokens.", "--compare")
System = option(str, "System message that opens the conversation.", metavar="TEXT")


def generate(
    ctx: typer.Context,
    target: Target = None,
    head: Head = None,
    prompts: Prompts = None,
    prompt: Prompt = None,
    out: Out = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = None,
    stop: Stop = None,
    limit: Limit = None,
    on_bad_row: OnBadRow = None,
    rows: Rows = None,
    draft_tokens: DraftTokens = None,
    tree: Tree = None,
    lookup: Lookup = None,
    proposal: Proposal = None,
    typical: Typical = None,
    stats: Stats = None,
    compare: Compare = None,
    overwrite: Overwrite = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Write replies, faster with a head.

    A single reply appears while it grows. Replies to a file of prompts are kept
    in --out as they are finished: interrupted, the same command goes on.

    \b
    Examples:
      spectrain generate --prompt "Why is the sky blue?"
      spectrain generate --head runs/train/head --prompts prompts.jsonl --compare
      spectrain generate --head runs/train/head --prompts prompts.jsonl --rows 8 \\
        --out runs/replies
      spectrain generate --lookup 3 --prompt "Say it again: to be or not to be"
    """
    running.run("generate", "generate", "GenerateConfig", ctx.params)


def chat(
    ctx: typer.Context,
    target: Target = None,
    head: Head = None,
    system: System = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_new_tokens: LongReplies = None,
    stop: Stop = None,
    draft_tokens: DraftTokens = None,
    tree: Tree = None,
    lookup: Lookup = None,
    proposal: Proposal = None,
    typical: Typical = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Talk with the target in the terminal.

    \b
    Examples:
      spectrain chat --head runs/train/head
      spectrain chat --temperature 0.7 --system "You answer in one sentence."
    """
    running.run("chat", "chat", "ChatConfig", ctx.params)

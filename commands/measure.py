"""`spectrain draft-vocab`, `eval-alpha`, `plan`, `compare` and `check`."""

from __future__ import annotations

import typer

from spectrain.commands import generate, options, running
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

VocabStore, VocabOut = options.store(), options.out("runs/draft-vocab")
HeldoutStore = option(str, "Store whose held-out rows are used.", metavar="FOLDER")
Sizes = option(
    list[str],
    "Tokens of a draft vocabulary; repeat it or separate by commas.",
    metavar="NUMBER|all",
    default="2048, 4096, 8192, 16384, 32000, all",
)
Sample = option(int, "Reply positions that are looked at closely.", default="4096")
EvalStore, EvalOut = options.store(), options.out("runs/eval")
Head = option(str, "Trained head: OUT/head of train-eagle.", metavar="FOLDER")
Temperatures = options.temperatures("0, 1")
MaxDraft = options.max_draft("up to 5")
PlanStore, PlanPrompts = options.store(), options.prompts()
PlanOut = options.out("the head's")
PlanReply, PlanDraft = options.max_new_tokens("128"), options.max_draft("up to 6")
Batch = option(
    list[str], "Batch size; repeat it or separate by commas.", metavar="NUMBER", default="1, 8, 32"
)
Dtype = option(
    str,
    "Number type of target and head; auto: float32 on a CPU.",
    metavar="auto|float32|bfloat16|float16",
    default="auto",
)
CompareStore, CompareOut = options.store("runs/store"), options.out("runs/compare")
Families = option(str, "Only these entries, e.g. eagle3,medusa.", metavar="NAMES", default="all")
DraftTokens = options.draft_tokens("5")
RacePrompts = option(int, "Prompts in the race.", "--race-prompts", default="24")
CheckPrompts = options.prompts("the shipped prompts")
CheckLimit = option(int, options.LIMIT, default="20")
CheckNewTokens = options.max_new_tokens("64")
CheckRows = option(int, options.ROWS, default="1")
CheckTemperature = option(float, options.TEMPERATURE, default="0.7")


def draft_vocab(
    ctx: typer.Context,
    target: Target = None,
    store: VocabStore = None,
    heldout_store: HeldoutStore = None,
    sizes: Sizes = None,
    sample: Sample = None,
    out: VocabOut = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Show what draft vocabularies of several sizes would hold.

    \b
    What is outside is always rejected. Nothing is captured or trained.
    Example:
      spectrain draft-vocab --store runs/store --sizes 4096,16384
    """
    given = ctx.params | {"sizes": running.split(sizes)}
    running.run("draft_vocab", "draft-vocab", "DraftVocabConfig", given)


def eval_alpha(
    ctx: typer.Context,
    target: Target = None,
    store: EvalStore = None,
    head: Head = None,
    out: EvalOut = None,
    temperature: Temperatures = None,
    limit: Limit = None,
    max_draft: MaxDraft = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Measure acceptance on the held-out conversations of a store.

    \b
    Example:
      spectrain eval-alpha --store runs/store --head runs/train/head \\
          --temperature 0,1 --json runs/train/eval-alpha.json
    """
    given = ctx.params | {"temperature": running.split(temperature)}
    running.run("evaluate", "eval", "EvalConfig", given)


def plan(
    ctx: typer.Context,
    target: Target = None,
    head: Head = None,
    store: PlanStore = None,
    prompts: PlanPrompts = None,
    limit: Limit = None,
    on_bad_row: OnBadRow = None,
    max_new_tokens: PlanReply = None,
    batch: Batch = None,
    max_draft: PlanDraft = None,
    out: PlanOut = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Choose how to draft on this machine: chain, tree, or not at all.

    \b
    Measures acceptance and costs, and writes plan.json into the head's folder.
    Example:
      spectrain plan --head runs/train/head --store runs/store --batch 1,8,32
    """
    given = ctx.params | {"batch": running.split(batch)}
    running.run("plan", "plan", "PlanConfig", given)


def compare(
    ctx: typer.Context,
    target: Target = None,
    store: CompareStore = None,
    out: CompareOut = None,
    families: Families = None,
    draft_tokens: DraftTokens = None,
    prompts: RacePrompts = None,
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
    given = ctx.params | {"families": running.split([families] if families else None)}
    running.run("compare", "compare", "CompareConfig", given)


def check(
    ctx: typer.Context,
    target: Target = None,
    head: generate.Head = None,
    prompts: CheckPrompts = None,
    limit: CheckLimit = None,
    max_new_tokens: CheckNewTokens = None,
    rows: CheckRows = None,
    draft_tokens: generate.DraftTokens = None,
    tree: generate.Tree = None,
    lookup: generate.Lookup = None,
    proposal: generate.Proposal = None,
    typical: generate.Typical = None,
    temperature: CheckTemperature = None,
    dtype: Dtype = None,
    seed: Seed = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    json: Json = None,
) -> None:
    """Prove that drafting changes nothing, with this target and head.

    Exits with 1 if a part does not hold; the odds of a false alarm are shown.

    \b
    Examples:
      spectrain check --head runs/train/head
      spectrain check --head runs/train/head --tree grown --dtype bfloat16
    """
    running.run("check", "check", "CheckConfig", ctx.params)

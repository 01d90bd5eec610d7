"""`spectrain plan`: how to draft with a head on this machine, from measured numbers alone.

Measured: which of the head's choices the target takes (held-out replies), and what verifying and
drafting take by width at each batch size. The choices go to `plan.json` in the head's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, field_validator, model_validator

from spectrain.core.config import Config, as_list
from spectrain.core.environment import describe
from spectrain.core.errors import SpectrainError
from spectrain.core.files import require_writable
from spectrain.core.target import Target
from spectrain.data.online import with_features
from spectrain.data.reading import read_conversations
from spectrain.data.shard import RowInfo
from spectrain.data.store import FeatureStore
from spectrain.data.tokenise import Refused, prompt_ids, require_template
from spectrain.evaluation.measure import Source, measure, rows_for
from spectrain.evaluation.onpolicy import OnPolicy
from spectrain.evaluation.plan_report import DEFINITIONS, render
from spectrain.evaluation.planner import NODES, Plan, Way, plan
from spectrain.evaluation.ranks import rank_table, walked
from spectrain.generator import costs
from spectrain.generator.saved_plan import Choice, SavedPlan, plan_name
from spectrain.heads.base import DraftHead
from spectrain.heads.io import find_head
from spectrain.recipes.drafting import make_ready
from spectrain.recipes.given_head import given_head

MAX_DRAFT = 6
# Of a position that was reached less often the ranks are chance; the one before it goes on instead.
_REACHED = 20
_DRAFT_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class PlanConfig(Config):
    """Settings of `plan`."""

    target: str = Field("smollm2-135m", description="target: embedded name, folder or hub id")
    head: Path = Field(description="folder of the trained head")
    store: Path | None = Field(None, description="feature store: its held-out rows are measured")
    prompts: Path | None = Field(
        None, description="JSONL of prompts instead of a store; they are answered greedily first"
    )
    limit: int | None = Field(None, ge=1, description="only the first so many conversations")
    on_bad_row: Literal["stop", "skip"] = Field("stop", description="at a line that is no prompt")
    max_new_tokens: int = Field(128, ge=2, description="longest reply to a prompt in tokens")
    batch: Annotated[list[int], BeforeValidator(as_list)] = Field(
        [1, 8, 32], description="batch sizes to plan for"
    )
    max_draft: int | None = Field(
        None,
        ge=1,
        le=16,
        description="longest draft in tokens; default: 6, or as many as the head can",
    )
    nodes: int = Field(32, ge=2, le=64, description="largest tree")
    context: int = Field(256, ge=1, description="tokens behind which the costs are measured")
    repeats: int = Field(9, ge=1, description="timings of each width; their median counts")
    out: Path | None = Field(None, description="folder for plan.json; default: that of the head")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number type of target and head; auto: float32 on a CPU"
    )
    quantize: str | None = Field(
        None, description="keep the target's weights as int8 or int4: faster, and another target"
    )

    @field_validator("batch")
    @classmethod
    def _each_once(cls, value: list[int]) -> list[int]:
        if not value or min(value) < 1 or len(set(value)) < len(value):
            raise ValueError("give one or more different batch sizes, each 1 or more")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> PlanConfig:
        if (self.store is None) == (self.prompts is None):
            raise ValueError("give either --store FOLDER or --prompts FILE")
        return self


__all__ = ["PlanConfig", "render", "run"]


def run(config: PlanConfig) -> dict[str, Any]:
    """Measure, choose, write plan.json; returns the report as plain JSON values."""
    head = given_head(config.head, config.target)
    path = _place(config)
    target = Target.load(config.target, dtype=config.dtype, quantize=config.quantize)
    head.check_target(target, str(config.head))
    make_ready(head, target)
    longest = _longest(config, head, target)

    source, rows = _rows(config, target, head)
    greedy = all(row.temperature == 0 for row in rows)
    conversations = measure(target, head, source, {0.0: rows}, longest)[0.0]
    table = rank_table(conversations, longest)
    accepted = _measured(table)
    if not accepted:
        raise SpectrainError(
            "no reply has two tokens or more, so nothing can be measured",
            where=str(config.store or config.prompts),
            fix="give more conversations",
        )
    # Text that the target did not write itself would cut the walks short where it differs.
    tau = walked(conversations) if greedy else None

    plans, measured = {}, {}
    for batch in config.batch:
        measured[batch] = _costs(config, target, head, batch, longest)
        sizes = [size for size in NODES if size <= config.nodes]
        plans[batch] = plan(accepted, measured[batch], longest, sizes, tau)
    _save(path, target, accepted, plans, measured)
    return {
        "target": target.name,
        "head": str(config.head),
        "source": str(config.store or config.prompts),
        "conversations": len(conversations),
        "tau_from": "walks" if greedy else "product",
        "ranks": table,
        "batches": [_batch(plans[batch], measured[batch]) for batch in config.batch],
        "plan": str(path),
        "definitions": DEFINITIONS,
        "environment": describe(target.device),
    }


def _place(config: PlanConfig) -> Path:
    """Where plan.json goes; asked before anything is measured."""
    folder = config.out or find_head(config.head)
    if config.out is None and not folder.is_dir():  # the name of a model that is kept elsewhere
        raise SpectrainError(
            "this head has no folder to put the plan into",
            where=str(config.head),
            fix="give --out FOLDER",
        )
    path = folder / plan_name(config.quantize)
    require_writable(path)
    return path


def _longest(config: PlanConfig, head: DraftHead, target: Target) -> int:
    longest = config.max_draft or min(MAX_DRAFT, head.longest_draft)
    if longest > head.longest_draft:
        raise SpectrainError(
            f"{longest} is more than {head.longest_draft}, the longest draft of this head",
            where="--max-draft",
            fix="plan shorter drafts",
        )
    if config.context + config.nodes + 1 > target.max_length:
        raise SpectrainError(
            f"{config.context} tokens and a tree of {config.nodes} do not fit into the "
            f"{target.max_length} that the target reads",
            where="context",
            fix="measure behind a shorter context: --set context=…",
        )
    return longest


def _rows(config: PlanConfig, target: Target, head: DraftHead) -> tuple[Source, list[RowInfo]]:
    """What the acceptance is measured on: stored rows, or prompts answered now."""
    if config.store:
        store = FeatureStore.open(config.store)
        store.require_target(target.fingerprint)
        source = with_features(store, target, head.needs)
        return source, rows_for(0.0, store.rows("heldout"))[: config.limit]
    require_template(target.tokenizer)
    found = read_conversations(config.prompts, "last", config.on_bad_row, keep_order=True)
    prompts, rows = [], []
    for conversation in found[: config.limit]:
        try:
            ids = prompt_ids(target.tokenizer, conversation, target.max_length)
        except Refused as refused:
            raise SpectrainError(
                f"prompt {len(rows) + 1} cannot be used: {refused.reason}",
                where=str(config.prompts),
                fix="mend or leave out the prompt",
            ) from None
        prompts.append(torch.tensor(ids))
        rows.append(
            RowInfo(
                id=conversation.id,
                split="heldout",
                domain=conversation.domain,
                temperature=0.0,
                finish=None,
                truncated=False,
                length=len(ids) + config.max_new_tokens,
                supervised=config.max_new_tokens,
                index=len(rows),
            )
        )
    answered = OnPolicy(target, prompts, rows, head.needs)
    return answered, answered.rows


def _measured(table: dict[str, Any]) -> list[list[float]]:
    """The rows of the table up to the last position that was reached often enough."""
    accepted: list[list[float]] = []
    for row, reached in zip(table["accepted"], table["reached"], strict=True):
        if row is None or (accepted and reached < _REACHED):
            break
        accepted.append(row)
    return accepted


def _costs(
    config: PlanConfig, target: Target, head: DraftHead, batch: int, longest: int
) -> costs.Costs:
    """At the widths that trees of up to `nodes` nodes need."""
    largest = max(config.nodes, longest)
    sizes = {0, *(size for size in (1, *NODES) if size < largest), largest}
    # A node that is expanded has a child: at most half of a tree's nodes are on one such level.
    widest = max(longest + 1, config.nodes // 2)
    draft = [*(width for width in _DRAFT_WIDTHS if width < widest), widest]
    verify = sorted(size + 1 for size in sizes)
    return costs.measure(target, head, batch, config.context, verify, config.repeats, draft)


def _save(
    path: Path,
    target: Target,
    accepted: list[list[float]],
    plans: dict[int, Plan],
    measured: dict[int, costs.Costs],
) -> None:
    first = next(iter(measured.values()))
    SavedPlan(
        target=target.fingerprint,
        dtype=first.dtype,
        device=first.device,
        threads=first.threads,
        accepted=tuple(map(tuple, accepted)),
        choices={
            batch: Choice(
                tree=None if found.best.plain else found.best.shape,
                speedup=found.best.speedup,
                formula=found.best.formula,
                costs=measured[batch],
            )
            for batch, found in plans.items()
        },
    ).save(path)


def _batch(found: Plan, own: costs.Costs) -> dict[str, Any]:
    def row(way: Way) -> dict[str, Any]:
        return {
            "way": way.name,
            "nodes": way.shape.nodes,
            "depth": way.shape.depth,
            "tau": way.tau,
            "draft_ms": way.draft,
            "verify_ms": way.verify,
            "speedup": way.speedup,
            "formula": way.formula,
            "paths": way.shape.paths,
        }

    return {
        "batch": own.batch,
        "ways": [row(way) for way in found.ways],
        "choice": found.best.name,
        "costs": own.model_dump(mode="json"),
    }

"""`spectrain eval-alpha`: teacher-forced acceptance and τ of a head on the rows of a store."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from spectrain.core.config import Config, as_list
from spectrain.core.errors import SpectrainError
from spectrain.core.files import atomic_write
from spectrain.core.target import Target
from spectrain.data.online import with_features
from spectrain.data.shard import RowInfo
from spectrain.data.store import FeatureStore
from spectrain.evaluation.measure import measure, rows_for
from spectrain.evaluation.plot import draw
from spectrain.evaluation.ranks import DEFINITION, rank_table
from spectrain.evaluation.report import render
from spectrain.evaluation.summary import DEFINITIONS, by_domain, summarise
from spectrain.heads.io import weights_digest
from spectrain.recipes.given_head import given_head

PLOT = "alpha.png"
MAX_DRAFT = 5


class EvalConfig(Config):
    """Settings of `eval-alpha`."""

    target: str = Field("smollm2-135m", description="target: embedded name, folder or hub id")
    store: Path = Field(description="feature store that `prepare` wrote")
    head: Path = Field(description="folder of the trained head")
    split: Literal["heldout", "train"] = Field("heldout", description="rows to measure on")
    limit: int | None = Field(
        None,
        ge=1,
        description="conversations measured at each temperature, the first in the store's order",
    )
    temperature: Annotated[list[float], BeforeValidator(as_list)] = Field(
        [0.0, 1.0], description="temperatures of target and draft; 0 is greedy"
    )
    max_draft: int | None = Field(
        None,
        ge=1,
        le=64,
        description="longest draft in tokens; default: 5, or as many as the head can",
    )
    seed: int = Field(0, ge=0, description="seed of the bootstrap")
    out: Path = Field(Path("runs/eval"), description="folder for the plot")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number type of target and head; auto: float32 on a CPU"
    )

    @field_validator("temperature")
    @classmethod
    def _each_once_from_zero(cls, value: list[float]) -> list[float]:
        if not value or min(value) < 0 or len(set(value)) < len(value):
            raise ValueError("give one or more different temperatures, each 0 or more")
        return value


__all__ = ["EvalConfig", "render", "run"]


def run(config: EvalConfig) -> dict[str, Any]:
    """Measure and write the plot; returns the report as plain JSON values."""
    store = FeatureStore.open(config.store)
    head = given_head(config.head, config.target)
    rows = store.rows(config.split)
    target = Target.load(config.target, dtype=config.dtype)
    store.require_target(target.fingerprint)
    head.check_target(target, str(config.head))
    source = with_features(store, target, head.needs)
    head.bind(target.readout).to(target.device, target.dtype)

    steps = config.max_draft or min(MAX_DRAFT, head.longest_draft)
    if steps > head.longest_draft:
        raise SpectrainError(
            f"{steps} is more than {head.longest_draft}, the longest draft of this head",
            where="--max-draft",
            fix="measure fewer positions",
        )
    usable = {t: rows_for(t, rows) for t in config.temperature}
    used = {t: own[: config.limit] for t, own in usable.items()}
    top_p = store.manifest["settings"].get("top_p", 1.0)  # absent: no reply was drawn
    measured = measure(target, head, source, used, steps)
    if not any(found.replies for group in measured.values() for found in group):
        raise SpectrainError(
            f"no {config.split} row has a reply of two tokens or more, so nothing can be measured",
            where=str(config.store),
            fix="prepare a store with more conversations",
        )
    report = {
        "target": target.name,
        "head": str(config.head),
        "weights": weights_digest(config.head),
        "store": str(config.store),
        "split": config.split,
        "limit": config.limit,
        "max_draft": steps,
        "seed": config.seed,
        "temperatures": [
            {
                "temperature": temperature,
                "rows": len(rows),
                "usable": len(usable[temperature]),
                "note": _note(temperature, used[temperature], len(usable[temperature]), top_p),
                **summarise(conversations, steps, config.seed),
                "ranks": None if temperature else rank_table(conversations, steps),
                "domains": by_domain(conversations, steps, config.seed),
            }
            for temperature, conversations in measured.items()
        ],
        "definitions": DEFINITIONS | {"ranks (in --json)": DEFINITION},
        "plot": str(config.out / PLOT),
    }
    try:
        atomic_write(config.out / PLOT, draw(report))
    except SpectrainError as error:  # the numbers have been paid for; they are not lost with it
        print(f"no plot: {error}", file=sys.stderr)
        report["plot"] = None
    return report


def _note(temperature: float, rows: list[RowInfo], usable: int, top_p: float) -> str | None:
    """What the reader must know when these are not all rows that could be measured, or their text
    was not drawn from the distribution measured."""
    notes, parts = [], []
    if len(rows) < usable:
        notes.append(f"a part of the rows: the first {len(rows):,} of {usable:,}")
    if any(row.temperature != temperature for row in rows):
        parts.append(f"replies sampled at {_temperatures(rows)}, not at {temperature:g}")
    # At temperature 0 a nucleus changes nothing, neither in the text nor in the measure.
    if top_p < 1 and temperature > 0 and any(row.temperature for row in rows):
        parts.append(f"replies drawn with top_p {top_p:g}, measured without it")
    if parts:
        notes.append(
            f"{'; '.join(parts)}: the numbers are teacher-forced on text that was not drawn from "
            "the distribution measured"
        )
    return "; ".join(notes) or None


def _temperatures(rows: list[RowInfo]) -> str:
    """Temperatures that the rows were sampled at and how many at each."""
    counts = Counter("unknown" if r.temperature is None else f"{r.temperature:g}" for r in rows)
    return ", ".join(f"{name} ({count} rows)" for name, count in sorted(counts.items()))

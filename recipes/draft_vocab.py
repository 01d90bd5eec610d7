"""`spectrain draft-vocab`: what draft vocabularies of several sizes would hold, from a store alone.

C conversations, S sizes, V rows of the target's lm_head, P sampled rows, H hidden.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from spectrain.core.config import Config, as_list
from spectrain.core.errors import SpectrainError
from spectrain.core.files import atomic_write
from spectrain.core.progress import progress
from spectrain.core.target import Target
from spectrain.data.store import SPLITS, FeatureStore
from spectrain.evaluation.coverage import mass_inside, members, shares, smallest
from spectrain.evaluation.coverage_report import DEFINITIONS, SHARES, draw, render
from spectrain.heads import vocab

__all__ = ["DraftVocabConfig", "render", "run"]

PLOT = "draft-vocab.png"
_LOGIT_ROWS = 256  # rows of logits that exist at one time
Size = Annotated[int, Field(ge=1)] | Literal["all"]


class DraftVocabConfig(Config):
    """Settings of `draft-vocab`."""

    target: str = Field("smollm2-135m", description="target: embedded name, folder or hub id")
    store: Path = Field(description="feature store that `prepare` wrote")
    heldout_store: Path | None = Field(
        None, description="store whose held-out rows to use; default: those of `store`"
    )
    sizes: Annotated[tuple[Size, ...], BeforeValidator(as_list)] = Field(
        (2048, 4096, 8192, 16384, 32000, "all"),
        min_length=1,
        description="tokens of each vocabulary; the whole one is measured in any case, and stands "
        "for every larger size",
    )
    sample: int = Field(
        4096, ge=0, description="positions of a split whose whole distribution is looked at"
    )
    seed: int = Field(0, ge=0, description="seed of the sample and of the bootstrap")
    out: Path = Field(Path("runs/draft-vocab"), description="folder for the plot")


def run(config: DraftVocabConfig) -> dict[str, Any]:
    """Measure and write the plot; returns the report as plain JSON values."""
    store = FeatureStore.open(config.store)
    heldout = FeatureStore.open(config.heldout_store) if config.heldout_store else store
    # Only its output layer is used; but weights are found by the names of a loaded model.
    target = Target.load(config.target, pack_weights=False)
    for opened in (store, heldout):
        opened.require_target(target.fingerprint)
    usable = target.readout.usable
    counts = store.token_counts("train", target.vocab_size)
    if not counts.any():
        raise SpectrainError(
            "no training row has a reply, so there is nothing to choose a vocabulary by",
            where=str(config.store),
        )
    sizes = sorted({usable if size == "all" else min(size, usable) for size in config.sizes})
    sizes += [usable] * (sizes[-1] < usable)
    chosen = [vocab.choose(size, target, counts) for size in sizes]
    held = members(chosen, target.vocab_size)
    found = {
        split: _measure(opened, split, target, held, config)
        for split, opened in zip(SPLITS, (store, heldout), strict=True)
    }
    state = target.hidden_size * target.dtype.itemsize
    report = {
        "target": target.name,
        "store": str(config.store),
        "heldout_store": str(config.heldout_store or config.store),
        "seed": config.seed,
        "vocabulary": usable,
        "seen": int((counts > 0).sum()),
        "dtype": str(target.dtype).removeprefix("torch."),
        "counts": {split: part["counts"] for split, part in found.items()},
        "sizes": [
            {
                "size": size,
                "pinned": len(vocab.always_in(target, size)),
                "lm_head_bytes": size * state,
                "never_seen": int((counts[ids] == 0).sum()),
                **{
                    split: {name: part[name][place] for name in SHARES}
                    for split, part in found.items()
                },
            }
            for place, (size, ids) in enumerate(zip(sizes, chosen, strict=True))
        ],
        "definitions": DEFINITIONS,
        "plot": str(config.out / PLOT),
    }
    report["recommended"] = _recommended(report)
    try:
        atomic_write(config.out / PLOT, draw(report))
    except SpectrainError as error:  # the numbers are not lost with it
        print(f"no plot: {error}", file=sys.stderr)
        report["plot"] = None
    return report


def _measure(
    store: FeatureStore, split: str, target: Target, held: Tensor, config: DraftVocabConfig
) -> dict[str, Any]:
    """Counts, and for each of the shares one interval for each size; None where it is unknown."""
    rows = store.rows(split)
    ids = {"tokens": [store.reply_tokens(row) for row in rows]}
    if store.features:
        ids["argmax"] = [store.teacher(row)[0] for row in rows]
    result: dict[str, Any] = dict.fromkeys(SHARES, [None] * held.shape[1])
    counts = {"conversations": len(rows), "tokens": sum(map(len, ids["tokens"])), "sampled": 0}
    for name, of_rows in ids.items():
        total = np.array([[len(own)] for own in of_rows], dtype=float)
        if total.any():
            inside = torch.stack([held[own].sum(0) for own in of_rows]).double().numpy()
            result[name] = shares(inside, total, config.seed)
            if name == "argmax" and config.sample:
                inside, total = _mass(store, split, target, held, config)
                result["mass"] = shares(inside, total, config.seed)
                counts["sampled"] = int(total.sum())
    return result | {"counts": counts}


@torch.inference_mode()
def _mass(
    store: FeatureStore, split: str, target: Target, held: Tensor, config: DraftVocabConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Probability inside each vocabulary, summed over the sampled positions of each conversation
    [C, S], and how many those are [C, 1]."""
    rows = store.rows(split)
    ends = np.cumsum([len(store.teacher(row)[0]) for row in rows])
    random = np.random.default_rng(config.seed)
    chosen = random.choice(ends[-1], min(config.sample, ends[-1]), replace=False, shuffle=False)
    chosen.sort()
    of_row = np.searchsorted(ends, chosen, side="right")
    states = []
    for place in np.unique(of_row):
        batch = store.batch([rows[place]], with_aux=False)
        own = chosen[of_row == place] - (ends[place - 1] if place else 0)
        states.append(batch.last[0][batch.argmax[0] >= 0][own])
    inside = np.zeros((len(rows), held.shape[1]))
    held = held.to(target.device)
    parts = torch.cat(states).split(_LOGIT_ROWS)
    with progress(len(chosen), f"{split} distributions", "rows") as bar:
        for number, part in enumerate(parts):
            logits = target.logits(part.to(target.device, target.dtype))
            own = of_row[number * _LOGIT_ROWS :][: len(part)]
            np.add.at(inside, own, mass_inside(logits, held).cpu().numpy())
            bar.update(len(part))
    return inside, np.bincount(of_row, minlength=len(rows))[:, None].astype(float)


def _recommended(report: dict[str, Any]) -> dict[str, Any] | None:
    """The smallest size that covers held-out text about as well as the whole vocabulary; by the
    target's choices where they are known. None without held-out text."""
    sizes = {row["size"]: row["heldout"] for row in report["sizes"]}
    for name in ("argmax", "tokens"):
        covered = [of[name] for of in sizes.values()]
        if None not in covered:
            size = smallest(list(sizes), [share["value"] for share in covered])
            return {"size": size, "by": name, "covered": sizes[size][name]}
    return None

"""What a training run reports: for a file, and for a person."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from spectrain.core.environment import describe, peak_rss_mb
from spectrain.data.store import SPLITS, FeatureStore
from spectrain.heads.base import DraftHead
from spectrain.recipes.heldout import BEST, read_best
from spectrain.trainer.loop import State
from spectrain.trainer.metrics import acceptance, read_heldout, read_metrics
from spectrain.trainer.quality import Loss, change
from spectrain.trainer.trunk import ADAPTER, TARGET

if TYPE_CHECKING:
    from spectrain.recipes.train_config import TrainConfig

HEAD = "head"
ENOUGH = 0.95  # coverage of held-out text below which a draft vocabulary is worth a remark
FINAL_SHARE = 0.1  # the report's loss and acceptance are means over this last part of the run


def make_report(
    settings: TrainConfig,
    state: State,
    store: FeatureStore,
    accelerator: Accelerator,
    weights: Sequence[float],
) -> dict[str, Any]:
    """Counts, speed, and the means over the last part of the run (on training data).

    weights: of the terms of the objective at the end of the run.
    """
    rows = read_metrics(settings.out)
    first = (1 - FINAL_SHARE) * settings.steps
    last = [row for row in rows if row["step"] > first]
    # A row whose steps were all skipped has no entries.
    hits = [sum(column) for column in zip(*(r["hits"] for r in last if r["hits"]), strict=True)]
    seen = [sum(column) for column in zip(*(r["seen"] for r in last if r["seen"]), strict=True)]
    return {
        "target": settings.target,
        "family": settings.family,
        "head": str(settings.out / HEAD),
        "store": store.manifest["fingerprint"],
        "online": settings.online,
        "steps": state.step,
        "supervised_tokens": state.supervised,
        "seconds": round(state.seconds, 3),
        "tokens_per_second": round(state.supervised / state.seconds, 1),
        "loss": _loss(last, weights),
        "first_loss": _first_loss(rows[0], weights) if rows[0]["step"] <= first else None,
        "first_steps": rows[0]["step"],
        # The first term of a joint training is the trunk's, which drafts nothing.
        "acceptance": acceptance(hits, seen)[1 if settings.trunk.trained else 0 :],
        "heldout": next(reversed(read_heldout(settings.out)), None),
        "best": read_best(settings.out),
        "best_head": str(settings.out / BEST),
        "skipped_steps": state.skipped,
        "ema": settings.ema,
        "processes": accelerator.num_processes,
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "environment": describe(accelerator.device),
        **about_store(store),
    }


def _loss(rows: Sequence[dict[str, Any]], weights: Sequence[float]) -> float | None:
    """Terms as means over all that some rows of metrics count, weighed; None without any."""
    sums, counts = [0.0] * len(weights), [0] * len(weights)
    for row in rows:
        pairs = zip(row["loss_terms"], row.get("counts", ()), strict=False)
        for k, (term, count) in enumerate(pairs):  # none where every step was skipped
            sums[k] += (term or 0.0) * count
            counts[k] += count
    terms = [w * s / n for w, s, n in zip(weights, sums, counts, strict=True) if n]
    return sum(terms) if terms else None


def _first_loss(row: dict[str, Any], weights: Sequence[float]) -> float | None:
    """What the final loss is to be compared with: the first logged row, weighed as the last ones
    are (weights may change on the way)."""
    pairs = zip(weights, row["loss_terms"], strict=False)  # no terms where every step was skipped
    weighed = [weight * term for weight, term in pairs if term is not None]
    return sum(weighed) if weighed else None


def about_store(store: FeatureStore) -> dict[str, Any]:
    """Where the head may be measured."""
    return {"store_path": str(store.path), "heldout_rows": len(store.rows("heldout"))}


def about_vocabulary(store: FeatureStore, head: DraftHead) -> dict[str, Any]:
    """What part of the target's own first choices a reduced draft vocabulary holds (of the reply
    tokens, where the store has no choices), by split; None where nothing is left out."""
    if head.config.draft_vocab_size >= head.readout.usable:
        return {"vocabulary": None}
    total = head.config.vocab_size
    counts = store.argmax_counts if store.features else store.token_counts
    every = head.guessable(torch.arange(total, device=head.readout.weight.device)).cpu()
    found: dict[str, Any] = {
        "size": head.config.draft_vocab_size,
        "of": head.readout.usable,
        "by": "target's choices" if store.features else "reply tokens",
    }
    for split in SPLITS:
        of_split = counts(split, total)
        found[split] = int(of_split[every].sum()) / int(of_split.sum()) if of_split.any() else None
    return {"vocabulary": found}


def vocabulary_line(found: dict[str, Any]) -> str:
    """One line; what is outside is rejected, so little of it should be."""
    line = (
        f"draft vocabulary of {found['size']:,} of {found['of']:,} tokens: "
        f"{found['train']:.1%} of the {found['by']} on training rows"
    )
    if found["heldout"] is not None:
        line += f", {found['heldout']:.1%} on held-out rows"
    if found["heldout"] is not None and found["heldout"] < ENOUGH:
        line += (
            f"; note: below {ENOUGH:.0%} on held-out rows, and what is outside is always rejected; "
            "`spectrain draft-vocab` shows what other sizes hold"
        )
    return line


def about_trunk(settings: TrainConfig, quality: list[Loss]) -> dict[str, Any]:
    """What a report says of a target that was trained along; quality: before and after."""
    folder = ADAPTER if settings.trunk.mode == "lora" else TARGET
    return {
        "trunk": settings.trunk.mode,
        "tuned_target": str(settings.out / folder),
        "quality": change(*quality),
    }


def render(report: dict[str, Any]) -> str:
    """What a person reads: where the head is, what it cost, how it did on its training data."""
    accepted = " ".join("–" if a is None else f"{a:.2f}" for a in report["acceptance"])
    loss = "–" if report["loss"] is None else f"{report['loss']:.3f}"
    if report.get("first_loss") is not None:  # a report of an earlier version has none
        loss += f" ({report['first_loss']:.3f} in the first {report['first_steps']} steps)"
    lines = [
        f"head {report['head']} ({report['family']} for {report['target']})",
        f"{report['steps']:,} steps, {report['supervised_tokens']:,} reply tokens in "
        f"{report['seconds']:,.0f} s ({report['tokens_per_second']:,.0f} tokens/s, "
        f"{report['processes']} process{'es' if report['processes'] > 1 else ''}), "
        f"{report['skipped_steps']} steps skipped, peak memory "
        f"{report['peak_rss_mb'] / 1e3:.1f} GB",
        f"last tenth of the run, on training data: loss {loss}, greedy acceptance by "
        f"position {accepted}",
    ]
    if report.get("ema"):
        lines.append(
            f"the head is the running mean of its weights (decay {report['ema']:g}); those of the "
            "last step are in its checkpoint"
        )
    lines += list(_on_heldout(report))
    if report.get("vocabulary"):
        lines.append(vocabulary_line(report["vocabulary"]))
    if "tuned_target" in report:
        quality, own = report["quality"], f"--target {report['tuned_target']}"
        shown = ["–" if v is None else f"{v:.3f}" for k, v in quality.items() if "perplex" in k]
        lines += [
            f"target trained along ({report['trunk']}): {report['tuned_target']}; the head drafts "
            "for it alone",
            f"perplexity of {quality['heldout_tokens']:,} held-out reply tokens: {shown[0]} "
            f"before, {shown[1]} after",
            f"what it is worth: spectrain prepare {own} to another --store, then eval-alpha {own}",
        ]
    else:
        lines.append(f"what it is worth: {_measure(report)}")
    return "\n".join(lines)


def _on_heldout(report: dict[str, Any]) -> Iterator[str]:
    """What was measured on the way; nothing where nothing was."""
    if not report.get("heldout"):  # a report of an earlier version has no such entry
        return
    step, last, best = report["heldout"]["step"], report["heldout"]["heldout"], report["best"]
    alpha = " ".join("–" if a is None else f"{a:.2f}" for a in last["conditional"])
    yield (
        f"held-out, {last['rows']} rows, greedy, drafts of {last['draft']}: τ "
        f"{_or_dash(last['tau'])}, α by position (conditional) {alpha}, loss "
        f"{_or_dash(last['loss'])}, after step {step:,}"
    )
    if best and best["step"] == step:
        yield "its τ is the best of the run"
    elif best:
        yield f"best τ {best['tau']:.3f} after step {best['step']:,}: {report['best_head']}"


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _measure(report: dict[str, Any]) -> str:
    """The command that measures the head; where the store has no rows for it, how to get some."""

    def command(verb: str, **flags: str) -> str:
        given = {"target": report["target"], **flags}
        return shlex.join(
            ["spectrain", verb, *(part for k, v in given.items() for part in (f"--{k}", v))]
        )

    if report["heldout_rows"]:
        return command("eval-alpha", store=report["store_path"], head=report["head"])
    prepare = command("prepare", prompts="OTHER.jsonl", heldout="1", store="HELDOUT")
    measure = command("eval-alpha", store="HELDOUT", head=report["head"])
    return f"{report['store_path']} has no held-out rows; {prepare}, then {measure}"

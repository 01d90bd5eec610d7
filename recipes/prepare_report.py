"""The report of `prepare`, and what a person reads of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spectrain.data.fates import PLACES, Fates
from spectrain.recipes.prepare_config import PrepareConfig

_MANY = 0.05  # share of replies from which a fault of theirs is worth a note


@dataclass
class Work:
    """What this process has done, and what it found done. seconds by stage; tokens produced and
    read, replies and shards kept from an earlier run, units asked and shards that were its own."""

    seconds: dict[str, float] = field(default_factory=dict)
    answered: int = 0
    captured: int = 0
    kept_replies: int = 0
    kept_shards: int = 0
    units: int = 0
    shards: int = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)


def make_report(
    config: PrepareConfig, manifest: dict, work: Work, fates: Fates, processes: int, facts: dict
) -> dict:
    """counts (rows, tokens, supervised_tokens by split; dropped by reason; truncated,
    length_stopped, loops), supervised_tokens by split, bytes, seconds by stage, tokens_per_second
    of this process's own work (None where there was none), its own units (asked now) and shards,
    kept from an earlier run, where the first dropped rows are, store, fingerprint, target; facts:
    sources (path, conversations found and used), given_heldout."""
    rates = {"answer": work.answered, "capture": work.captured}
    return {
        "store": str(config.store),
        "fingerprint": manifest["fingerprint"],
        "target": manifest["about"]["target"],
        "counts": manifest["counts"],
        "supervised_tokens": manifest["counts"]["supervised_tokens"],
        "bytes": sum(shard["bytes"] for shard in manifest["shards"]),
        "seconds": work.seconds,
        "tokens_per_second": {
            stage: round(tokens / max(work.seconds[stage], 1e-3), 1) if tokens else None
            for stage, tokens in rates.items()
        },
        "processes": processes,
        "own": {"units": work.units, "shards": work.shards},
        "kept": {"replies": work.kept_replies, "shards": work.kept_shards},
        "dropped_at": fates.places,
        **facts,
    }


def render(report: dict) -> str:
    """What a person reads: rows by split, what was dropped, what the work cost."""
    if "estimate" in report:
        return "\n".join(report["estimate"])
    counts, rates = report["counts"], report["tokens_per_second"]
    lines = [
        f"store {report['store']} ({report['bytes'] / 1e6:,.0f} MB) of {report['target']}",
        f"{'':<10}{'rows':>8}{'tokens':>12}{'supervised':>12}",
    ]
    for split in counts["rows"]:
        rows, tokens, supervised = (
            counts[key][split] for key in ("rows", "tokens", "supervised_tokens")
        )
        lines.append(f"{split:<10}{rows:>8,}{tokens:>12,}{supervised:>12,}")
    if len(report["sources"]) > 1 or any(s["used"] < s["found"] for s in report["sources"]):
        for source in report["sources"]:
            lines.append(f"{source['used']:,} of {source['found']:,} in {source['path']}")
    lines += _dropped(report)
    lines.append(
        f"replies cut off by their length: {counts['length_stopped']:,}, going round in circles: "
        f"{counts['loops']:,}; rows cut at max_length: {counts['truncated']:,}"
    )
    lines += _notes(report)
    kept = [f"{n:,} {what}" for what, n in report["kept"].items() if n]
    if kept:
        lines.append(f"kept from an earlier run: {', '.join(kept)}")
    stages = []
    for stage, seconds in report["seconds"].items():
        rate = f" ({rates[stage]:,.0f} tokens/s)" if rates.get(stage) else ""
        stages.append(f"{stage} {seconds:.0f}{rate}")
    by = f", process 1 of {report['processes']}" if report["processes"] > 1 else ""
    return "\n".join([*lines, f"seconds{by}: {', '.join(stages)}"])


def _dropped(report: dict) -> list[str]:
    """Counts by reason, and where the first of each are."""
    dropped = report["counts"]["dropped"]
    if not dropped:
        return ["dropped: nothing"]
    lines = ["dropped: " + ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items()))]
    for reason, places in sorted(report["dropped_at"].items()):
        more = ", …" if dropped[reason] > PLACES else ""
        lines.append(f"  {reason}: {', '.join(places[:PLACES])}{more}")
    return lines


def _notes(report: dict) -> list[str]:
    """What will hurt later."""
    counts, notes = report["counts"], []
    rows = counts["rows"]
    total = sum(rows.values())
    if counts["length_stopped"] > total / 2:
        notes.append(
            "most replies were cut off, so the head learns little of how they end; raise "
            "--max-new-tokens if you can"
        )
    if counts["loops"] > total * _MANY:
        notes.append(
            f"{counts['loops'] / total:.0%} of the replies go round in circles, which is easy to "
            "guess and seldom wanted: --set loops=drop leaves them out"
        )
    up, down = "raise --heldout", "lower --heldout to train on this store"
    if total == 1 or sum(source["used"] for source in report["sources"]) == 1:
        up = down = "give more prompts: one alone is trained on or held out, never both"
    if not rows["heldout"]:
        notes.append(f"no held-out rows, eval-alpha has nothing to measure; {up}")
    elif rows["heldout"] < 20:
        notes.append(f"{rows['heldout']} held-out rows measure little; {up}")
    if not rows["train"]:
        notes.append(f"no training rows; {down}")
    elif rows["train"] < 8:
        notes.append(f"{rows['train']} training rows teach a head little")
    if report["given_heldout"]:
        notes.append(
            f"{report['given_heldout']} held-out rows have replies that were given, not asked of "
            "the target: acceptance on them is not what decoding will show (--set regenerate=true)"
        )
    return [f"note: {note}" for note in notes]

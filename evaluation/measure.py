"""Acceptance of a head on rows of a feature store, in batches of rows of similar length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from spectrain.core.batch import Batch
from spectrain.core.progress import progress
from spectrain.core.target import Target
from spectrain.data.shard import RowInfo
from spectrain.evaluation.alpha import acceptance
from spectrain.evaluation.summary import Conversation
from spectrain.heads.base import DraftHead

_BATCH_TOKENS = 2048  # padded tokens of a batch, unless one row alone is longer
_BATCH_LOGITS = 1 << 26  # target logits kept for a batch: padded tokens × draft vocabulary


class Source(Protocol):
    """A feature store, or what stands for one."""

    def batch(self, rows: list[RowInfo], with_aux: bool) -> Batch: ...


def rows_for(temperature: float, rows: list[RowInfo]) -> list[RowInfo]:
    """Rows whose reply was sampled at this temperature; all of them when there is none."""
    return [row for row in rows if row.temperature == temperature] or rows


def measure(
    target: Target,
    head: DraftHead,
    source: Source,
    used: dict[float, list[RowInfo]],
    steps: int,
) -> dict[float, list[Conversation]]:
    """Conversations of each temperature; a row used at several of them is read once."""
    wanted: dict[int, tuple[float, ...]] = {}
    by_index: dict[int, RowInfo] = {}
    for temperature, rows in used.items():
        for row in rows:
            wanted[row.index] = (*wanted.get(row.index, ()), temperature)
            by_index[row.index] = row
    found: dict[float, dict[int, Conversation]] = {temperature: {} for temperature in used}
    with progress(len(wanted), "measure acceptance", "rows") as bar:
        for temperatures in sorted(set(wanted.values())):
            group = [by_index[index] for index, ts in wanted.items() if ts == temperatures]
            for part in batches(group, head):
                batch = source.batch(part, bool(head.needs.aux_layers)).to(
                    target.device, target.dtype
                )
                results = acceptance(target, head, batch, steps, temperatures)
                for temperature, replies in zip(temperatures, results, strict=True):
                    for row, own in zip(part, replies, strict=True):
                        found[temperature][row.index] = Conversation(row.domain or "other", own)
                bar.update(len(part))
    # In the store's order, so that the bootstrap does not depend on how rows were batched.
    return {t: [found[t][row.index] for row in used[t]] for t in used}


def batches(rows: list[RowInfo], head: DraftHead) -> Iterator[list[RowInfo]]:
    """Rows of similar length together, as many as `head` may be measured on at a time (or one)."""
    budget = min(_BATCH_TOKENS, _BATCH_LOGITS // head.config.draft_vocab_size)
    part: list[RowInfo] = []
    for row in sorted(rows, key=lambda row: (row.length, row.index)):
        if part and (len(part) + 1) * row.length > budget:
            yield part
            part = []
        part.append(row)
    if part:
        yield part

"""How well a target predicts the replies of held-out rows: its perplexity on their tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from spectrain.core.batch import Batch, predicting
from spectrain.core.target import Target
from spectrain.data.store import FeatureStore
from spectrain.heads.scoring import next_tokens
from spectrain.trainer.sharding import is_cut

# Reply tokens, and their mean negative log-likelihood (None without any).
Loss = tuple[int, float | None]
_BATCH_TOKENS = 2048  # padded tokens of a batch, unless one row alone is longer
_LOGITS = 1 << 24  # float32 logits that exist at a time


def heldout_loss(target: Target, store: FeatureStore, accelerator: Accelerator) -> Loss:
    """`reply_loss` of the store's held-out rows."""
    rows = store.rows("heldout")

    def load(places: list[int]) -> Batch:
        return store.batch([rows[place] for place in places], with_aux=False)

    return reply_loss(target, [row.length for row in rows], load, accelerator)


def change(before: Loss, after: Loss) -> dict[str, Any]:
    """What a report says of the same rows under a target before and after it was trained."""
    return {
        "heldout_tokens": before[0],
        "loss_before": before[1],
        "loss_after": after[1],
        "perplexity_before": perplexity(before[1]),
        "perplexity_after": perplexity(after[1]),
    }


@torch.no_grad()
def reply_loss(
    target: Target,
    lengths: Sequence[int],
    load: Callable[[list[int]], Batch],
    accelerator: Accelerator,
) -> Loss:
    """The loss of some rows.

    lengths: tokens of each row; load: some rows as a batch. The processes share the rows.
    """
    total = torch.zeros(2, dtype=torch.float64, device=target.device)
    size = max(1, _LOGITS // target.vocab_size)
    rank, world = accelerator.process_index, accelerator.num_processes
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    shares = [_by_length(order[place::world], lengths) for place in range(world)]
    cut = any(is_cut(value) for value in target.model.parameters())
    precision = accelerator.autocast if cut else nullcontext  # pieces are gathered in the run's own
    for part in shares[rank]:
        batch = load(part).to(target.device)
        rows = predicting(batch.reply)
        with precision():
            states = target.forward(batch.tokens).last[rows]
        labels = next_tokens(batch)[rows]
        for state, label in zip(states.split(size), labels.split(size), strict=True):
            total[0] += len(label)
            total[1] += F.cross_entropy(target.logits(state).float(), label, reduction="sum")
    # They compute only when all processes ask.
    for _ in range(len(shares[rank]), max(map(len, shares)) if cut else 0):
        with precision():
            target.forward(torch.zeros(1, 1, dtype=torch.long, device=target.device))
    tokens, loss = accelerator.reduce(total, "sum").tolist()
    return int(tokens), loss / tokens if tokens else None


def perplexity(loss: float | None) -> float | None:
    """exp of a mean negative log-likelihood; None where it is no number."""
    return None if loss is None or not loss < 700 else math.exp(loss)


def _by_length(rows: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Rows, shortest first, in batches of at most _BATCH_TOKENS padded tokens (or one row)."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and (len(parts[-1]) + 1) * lengths[row] <= _BATCH_TOKENS:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts

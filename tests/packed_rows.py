"""Conversations side by side in rows, the slow way: what packed batches are compared with.

Also: random conversations that end in a reply, so that a reply touches the next conversation.
"""

from __future__ import annotations

import torch
from tiny_models import make_batch, random_rows

from spectrain.core.batch import Batch

# What a place holds where there is nothing.
NOTHING = {"tokens": 0, "reply": 0, "aux": 0, "last": 0, "argmax": -1, "stored": -1}


def documents(target, head, seed: int, count: int = 5) -> list[Batch]:
    """Conversations of different lengths, each a batch of one row, alone."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        tokens, reply = random_rows(generator, rows=1)
        end = int(reply[0].nonzero().max()) + 1
        made.append(make_batch(target, head, tokens[:, :end], reply[:, :end]))
    return made


def pack(bins: list[list[Batch]], extra: int = 0) -> Batch:
    """Batches of one row each, those of a bin in one row; `extra`: more padding than needed."""
    longest = extra + max(sum(one.tokens.shape[1] for one in row) for row in bins)
    values = {}
    for name, empty in NOTHING.items():
        parts = [[getattr(one, name) for one in row] for row in bins]
        if parts[0][0] is None:
            values[name] = None
            continue
        rows = []
        for row, part in zip(bins, parts, strict=True):
            if name == "reply":
                part = numbered(row)
            filled = torch.cat(part, dim=1)
            rest = filled.new_full((1, longest - filled.shape[1], *filled.shape[2:]), empty)
            rows.append(torch.cat([filled, rest], dim=1))
        values[name] = torch.cat(rows)
    starts = torch.arange(longest).repeat(len(bins), 1)
    for place, row in enumerate(bins):
        begin = 0
        for one in row:
            end = begin + one.tokens.shape[1]
            starts[place, begin:end] = begin
            begin = end
    return Batch(**values, starts=starts)


def numbered(row: list[Batch]) -> list[torch.Tensor]:
    """Replies counted through the whole row."""
    highest, result = 0, []
    for one in row:
        result.append((one.reply + highest) * (one.reply > 0))
        highest = int(result[-1].max())
    return result


@torch.no_grad()
def require_same_sums(head, own: list[Batch]) -> None:
    """Five conversations give the same sums and counts one by one and in rows, in any order; `head`
    is a head or a joint head, and the noise of its training is that of one step."""

    def objective(batch):
        torch.manual_seed(77)
        return head.objective(batch)

    a, b, c, d, e = own
    alone = [objective(one) for one in own]
    ways = [[a, b, c, d, e]], [[e, c, a, b, d]], [[b], [c, a], [e, d]], [[d, a, e], [c, b]]
    for extra, bins in enumerate(ways):
        batch = pack(bins, extra)
        together = objective(batch)
        for name in ("loss", "count", "hits", "seen"):
            expected = sum(getattr(one, name) for one in alone)
            torch.testing.assert_close(getattr(together, name), expected, atol=1e-3, rtol=1e-5)
        assert head.counts(batch).tolist() == together.count.tolist()

"""Which conversations belong to which optimiser step: a pure function of seed, step and lengths.

The conversations form an endless stream of epochs, each a permutation of all of them; step s takes
the rows [s·B, (s+1)·B) of the stream. Nothing depends on the number of processes, on micro-batches
or on where a run was interrupted.

    stream   | epoch 0 …………………………… | epoch 1 ……………………………… |
    steps    | 0 | 1 | 2 | 3 |  4  | 5 | 6 | …        (step 4 takes the end of one and the start of
                                                        the next: every batch is full)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch

# Batches whose rows are sorted by length together. Larger: less padding, less random batches.
WINDOW = 16


def mixed_seed(*parts: int) -> int:
    """One 63-bit seed from several numbers; neighbouring inputs give unrelated seeds."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Order:
    """The order of rows with the given lengths (tokens), `batch_size` of them in each step."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed = tuple(lengths), batch_size, seed
        # Steps are asked for one after the other: two epochs are all that is ever needed.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def batch(self, step: int) -> list[int]:
        """Row indices of a step, shortest conversation first."""
        total = len(self.lengths)
        rows: list[int] = []
        position, stop = step * self.batch_size, (step + 1) * self.batch_size
        while position < stop:
            epoch, start = divmod(position, total)
            taken = self._epoch(epoch)[start : start + stop - position]
            rows += taken
            position += len(taken)
        return sorted(rows, key=lambda row: (self.lengths[row], row))

    def _make_epoch(self, epoch: int) -> list[int]:
        """A permutation of all rows in which the rows of one batch have similar lengths."""
        total, size = len(self.lengths), self.batch_size
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
        rows = torch.randperm(total, generator=generator).tolist()
        head = min(-epoch * total % size, total)  # completes the last batch of the epoch before
        tail = (total - head) % size  # begins the first batch of the epoch after
        full = rows[head : total - tail]
        batches: list[list[int]] = []
        for start in range(0, len(full), WINDOW * size):
            window = sorted(
                full[start : start + WINDOW * size], key=lambda row: (self.lengths[row], row)
            )
            batches += [window[i : i + size] for i in range(0, len(window), size)]
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        middle = [row for place in shuffled for row in batches[place]]
        return rows[:head] + middle + rows[total - tail :]


def share(
    batch: Sequence[int],
    lengths: Sequence[int],
    rank: int,
    world: int,
    micro_batch: int,
    pack: int = 0,
) -> list[list[list[int]]]:
    """The micro-batches of one process, as `shares` has them."""
    return shares(batch, lengths, world, micro_batch, pack)[rank]


def shares(
    batch: Sequence[int], lengths: Sequence[int], world: int, micro_batch: int, pack: int = 0
) -> list[list[list[list[int]]]]:
    """For each process its micro-batches, parts of its share of a batch sorted by length: each a
    list of rows, each row a list of conversations.

    The ranks take turns, so that all have much the same number of tokens. A row is a single
    conversation; with `pack` it has as many as fit into that many tokens. All processes have the
    same number of micro-batches: a model in pieces computes only when all of them ask. `world` has
    to divide the batch.
    """
    assert len(batch) % world == 0, "checked before the loop"
    found = []
    for rank in range(world):
        own = list(batch[rank::world])
        rows = _packed(own, lengths, pack) if pack else [[one] for one in own]
        found.append([rows[i : i + micro_batch] for i in range(0, len(rows), micro_batch)])
    most = max(map(len, found))
    return [_cut(parts, most) for parts in found]


def _cut(parts: list[list[list[int]]], count: int) -> list[list[list[int]]]:
    """The same conversations in `count` micro-batches: those with most of them are halved. Every
    process has as many conversations, so there are enough."""
    parts = list(parts)
    while len(parts) < count:
        place = max(range(len(parts)), key=lambda i: sum(map(len, parts[i])))
        rows = parts[place]
        if len(rows) > 1:
            halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        else:
            (row,) = rows
            halves = [row[: len(row) // 2]], [row[len(row) // 2 :]]
        parts[place : place + 1] = halves
    return parts


def _packed(own: list[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Conversations in rows of at most `most` tokens, shortest row first. A longer one has a row of
    its own. Longest first, each into the first row with room (first-fit decreasing)."""
    rows: list[list[int]] = []
    filled: list[int] = []
    for one in sorted(own, key=lambda one: (-lengths[one], one)):
        fits = (i for i, tokens in enumerate(filled) if tokens + lengths[one] <= most)
        place = next(fits, len(rows))
        if place == len(rows):
            rows.append([])
            filled.append(0)
        rows[place].append(one)
        filled[place] += lengths[one]
    return [row for _, row in sorted(zip(filled, rows, strict=True))]


def padding(
    batch: Sequence[int], lengths: Sequence[int], world: int, micro_batch: int, pack: int = 0
) -> float:
    """Share of positions that are padding when a batch is cut that way, over all processes."""
    parts = [part for own in shares(batch, lengths, world, micro_batch, pack) for part in own]
    positions = sum(len(part) * max(sum(lengths[i] for i in row) for row in part) for part in parts)
    return 1 - sum(lengths[row] for row in batch) / positions

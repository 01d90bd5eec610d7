"""A target and a head that are tables, so that every probability can be read off by hand.

The target's next token depends on the last token; the draft at step k on the last token fed, the
first token fed (the anchor's) and k. V tokens, D of them guessable, K steps.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spectrain.core.batch import Batch, counted, predicting
from spectrain.heads.base import DraftHead, HeadConfig, TargetFacts, Unrolled


class TableTarget:
    """logits of x[u+1] are table[x[u]]; the last hidden state is the logits themselves."""

    def __init__(self, table):
        self.table, self.vocab_size = table, len(table)

    def logits(self, last):
        return last


class TableHead(DraftHead):
    """logits at (t, k): own[k, x[t+1+k]] + anchor[x[t+1]] over the draft vocabulary `ids`."""

    def __init__(self, own, anchor, ids):
        facts = TargetFacts(
            name="table", fingerprint="0", hidden_size=1, num_layers=1, vocab_size=len(anchor)
        )
        super().__init__(
            HeadConfig(
                family="table",
                steps=len(own),
                vocab_size=len(anchor),
                draft_vocab_size=len(ids),
                target=facts,
            )
        )
        self.own, self.anchor, self.ids = own, anchor, ids

    def draft_logits(self, first, fed, step):
        return self.own[step, fed] + self.anchor[first]

    def unroll(self, batch, steps):
        tokens = batch.tokens.flatten()
        anchors = counted(batch.reply, 0).flatten().nonzero().flatten()
        for step in range(steps):
            fed = tokens[(anchors + 1 + step).clamp(max=len(tokens) - 1)]
            hidden = self.draft_logits(tokens[anchors + 1], fed, step)
            hidden[~counted(batch.reply, step).flatten()[anchors]] = float("nan")  # nobody's
            yield Unrolled(step, hidden, anchors)

    def logits(self, hidden, step):
        return hidden

    def to_target(self, ids):
        return self.ids[ids]


TableHead.__abstractmethods__ = frozenset()  # the drafting face is not needed here


def make(seed=0, vocab=7, steps=3, draft_ids=None, likeness=1.0, scale=2.0):
    """A random target and a head that resembles it; `draft_ids` are the tokens it can guess."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.tensor(list(range(vocab)) if draft_ids is None else draft_ids)
    table = scale * torch.randn(vocab, vocab, generator=random)
    own = scale * torch.randn(steps, vocab, len(ids), generator=random)
    own = likeness * table[:, ids] + (1 - likeness) * own
    own = own + 0.5 * torch.randn(steps, vocab, len(ids), generator=random)
    anchor = 0.5 * torch.randn(vocab, len(ids), generator=random)
    return TableTarget(table), TableHead(own, anchor, ids)


def batch_of(target, rows, pad=0):
    """rows: [(tokens, reply numbers)]; `pad` more columns than the longest needs."""
    size = max(len(tokens) for tokens, _ in rows) + pad
    tokens = torch.zeros(len(rows), size, dtype=torch.int64)
    reply = torch.zeros_like(tokens)
    for place, (row, numbers) in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
        reply[place, : len(row)] = torch.tensor(numbers)
    last = target.table[tokens] * predicting(reply)[..., None]
    argmax = torch.where(predicting(reply), last.argmax(-1), -1)
    return Batch(tokens=tokens, reply=reply, aux=None, last=last, argmax=argmax)


def random_rows(seed, vocab, shapes):
    """shapes: for each row, alternating lengths of (not reply, reply, not reply, …)."""
    random = np.random.default_rng(seed)
    rows = []
    for shape in shapes:
        numbers = []
        for place, length in enumerate(shape):
            numbers += [(place // 2 + 1) * (place % 2)] * length
        rows.append((random.integers(vocab, size=len(numbers)).tolist(), numbers))
    return rows


@pytest.fixture(scope="session")
def tables():
    """The helpers above, as attributes: test modules cannot import a conftest."""
    return SimpleNamespace(
        make=make, batch_of=batch_of, random_rows=random_rows, Target=TableTarget, Head=TableHead
    )

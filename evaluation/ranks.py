"""Which of the head's choices the target takes, at temperature 0: what static trees are built on.

n anchors of a reply, K draft steps, R ranks, M nodes of a tree (the root is node 0).

Every step of every anchor was fed the true tokens, so the ranks of one anchor r[0 … K−1] are its
whole path: a tree accepts as many drafts there as r[0], (r[0], r[1]), … are nodes of it, whether
these were first choices or not. Walking the known text with these runs (evaluation/walk.py) gives
the forwards that the generator needs for it, without a word about independence. That holds for text
that the target itself wrote greedily.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spectrain.evaluation.alpha import Acceptance, Ints
from spectrain.evaluation.summary import Conversation
from spectrain.evaluation.walk import counted_steps
from spectrain.heads.tree import TreeShape

RANKS = 10
DEFINITION = (
    "for each position, of the anchors where all before it were accepted (`reached` of them): how "
    f"often the target's token is the head's first, second … {RANKS}th choice. The first is the "
    "conditional. Temperature 0 only"
)


def rank_table(conversations: Sequence[Conversation], steps: int) -> dict[str, Any]:
    """{"accepted": [K][R], "reached": [K]}; None instead of a row of which nothing was reached."""
    hits, reached = np.zeros((steps, RANKS)), np.zeros(steps)
    for reply in (reply for found in conversations for reply in found.replies):
        before = np.cumprod(reply.kept, axis=1)[:, :-1] > 0
        counts = counted_steps(len(reply.kept), steps)
        counts[:, 1:] &= before
        reached += counts.sum(0)
        for rank in range(RANKS):
            hits[:, rank] += (counts & (reply.ranks == rank)).sum(0)
    return {
        "accepted": [
            (row / count).tolist() if count else None
            for row, count in zip(hits, reached, strict=True)
        ],
        "reached": reached.astype(int).tolist(),
    }


def runs(ranks: Ints, shape: TreeShape) -> Ints:
    """Drafts that the tree gets accepted at each anchor: ranks [n, K] → [n]."""
    lost = shape.nodes + 1  # the node after which nothing is accepted
    child = np.full((lost + 1, shape.choices + 1), lost)  # the last column: no rank of this tree
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        if node:
            child[parent, rank] = node
    at = np.zeros(len(ranks), dtype=np.int64)
    run = np.zeros(len(ranks), dtype=np.int64)
    for column in ranks.T:
        known = (column >= 0) & (column < shape.choices)
        at = child[at, np.where(known, column, shape.choices)]
        run += at < lost
    return run


def walked(conversations: Sequence[Conversation]) -> Callable[[TreeShape], float]:
    """shape → tokens per target forward τ over these conversations."""
    replies: list[Acceptance] = [reply for found in conversations for reply in found.replies]

    def tau(shape: TreeShape) -> float:
        forwards = 0
        for reply in replies:
            run = runs(reply.ranks, shape).tolist()
            anchor = 0
            while anchor < len(run):
                anchor += run[anchor] + 1
                forwards += 1
        return sum(len(reply.ranks) for reply in replies) / forwards

    return tau

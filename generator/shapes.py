"""Which static tree to draft: the one whose expected accepted length is greatest.

K depths, R ranks. accepted[k][r] is the probability that the r-th choice at depth k is the target's
token, given that everything before it on its path was right. The chance that a node is on the
accepted path is the product of these along its own path, and the expected tokens per forward are::

    τ = 1 + Σ over nodes of that product

for the accepted length is the number of nodes on the accepted path (Medusa, arXiv 2401.10774,
2.1.2, and Sequoia, arXiv 2402.12374, build trees from such estimates, too).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from spectrain.heads.tree import TreeShape

Accepted = Sequence[Sequence[float]]


def chance(path: Sequence[int], accepted: Accepted) -> float:
    """Probability that a node is on the accepted path; what was not measured counts as never."""
    if len(path) > len(accepted):
        return 0.0
    return math.prod(
        row[rank] if rank < len(row) else 0.0 for rank, row in zip(path, accepted, strict=False)
    )


def expected(shape: TreeShape, accepted: Accepted) -> float:
    """Tokens per target forward τ, the target's own included."""
    return 1.0 + sum(chance(path, accepted) for path in shape.paths)


def best_tree(accepted: Accepted, nodes: int) -> TreeShape:
    """The tree of at most `nodes` nodes, as deep as `accepted` has rows, with the greatest τ.

    Greedy is optimal: a node's chance is at most its parent's, so the `nodes` most probable of all
    nodes, parents first where chances are equal, are closed under parents, and no other set of that
    size has a greater sum. Of equal ones the shallower and then the lower rank. A node that never
    pays (chance 0) is left out.
    """
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, int, tuple[int, ...]]] = []

    def add_children(path: tuple[int, ...], value: float) -> None:
        if len(path) < len(accepted):
            for rank, probability in enumerate(accepted[len(path)]):
                if value * probability > 0:
                    child = (*path, rank)
                    heapq.heappush(waiting, (-value * probability, len(child), child))

    add_children((), 1.0)
    while waiting and len(paths) < nodes:
        value, _, path = heapq.heappop(waiting)
        paths.append(path)
        add_children(path, -value)
    return TreeShape(paths=tuple(paths))


def sparse_default(heads: int, top_k: int = 10, nodes: int = 16) -> TreeShape:
    """A tree for a head of which nothing was measured, of at most `heads` levels and `top_k`
    choices of each node.

    Assumed: at every depth the first choice is right in half of the cases, and each further one
    half as often as the one before it.
    """
    return best_tree([[0.5 ** (rank + 1) for rank in range(top_k)]] * heads, nodes)

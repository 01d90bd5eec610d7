"""How to draft on this machine: the way with the most tokens a second, from measured numbers.

K measured positions, R ranks, γ tokens of a chain. For a shape and a batch of B rows::

    tokens a second = B · τ / (draft + verify)     τ tokens per target forward (generator/shapes.py)

and plain decoding is the shape without nodes, which asks no head. Beside it, for chains, what the
usual formula says that knows one α and one draft time (Leviathan et al., arXiv 2211.17192, 3.3)::

    speedup = (1 − α^(γ+1)) / ((1 − α)(γc + 1))    c = draft step / target step

It takes acceptance as independent and a verification of γ+1 tokens as cheap as one. What the engine
does besides (rules, bookkeeping: about a hundredth of a step) is in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spectrain.generator.costs import Costs
from spectrain.generator.shapes import Accepted, best_tree, expected
from spectrain.heads.tree import TreeShape

NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Way:
    """One way to decode. Times in milliseconds a step; speedups are × plain decoding.

    formula: by the usual formula, chains only
    """

    name: str
    shape: TreeShape
    tau: float
    draft: float
    verify: float
    speedup: float
    formula: float | None

    @property
    def plain(self) -> bool:
        return not self.shape.nodes


@dataclass(frozen=True)
class Plan:
    """All ways that were weighed, plain decoding first, and the best one of them."""

    ways: tuple[Way, ...]
    best: Way


def continued(accepted: Accepted, depth: int) -> list[list[float]]:
    """The table to `depth` rows: beyond the measured positions the last one goes on."""
    rows = [list(row) for row in accepted[:depth]]
    return rows + [rows[-1]] * (depth - len(rows))


def plan(
    accepted: Accepted,
    costs: Costs,
    longest: int,
    nodes: Sequence[int] = NODES,
    tau: Callable[[TreeShape], float] | None = None,
) -> Plan:
    """Weigh every chain of 0 … longest tokens and, of each size in `nodes`, the fastest of the
    best trees of 2 … longest levels.

    accepted [K][R] is measured (generator/shapes.py); a draft longer than K goes on as at position
    K. tau: tokens per forward of a shape, where that is known better than as a product over
    `accepted`, for shapes as deep as `longest`.
    """
    table = continued(accepted, longest)
    tau = tau or (lambda shape: expected(shape, table))
    alone = costs.verify_ms(TreeShape.chain(0))

    def weigh(name: str, shape: TreeShape, formula: float | None = None) -> Way:
        draft, verify = costs.draft_ms(shape), costs.verify_ms(shape)
        tokens = tau(shape) if shape.nodes else 1.0
        return Way(name, shape, tokens, draft, verify, tokens * alone / (draft + verify), formula)

    chains = [
        weigh(
            f"chain {gamma}" if gamma else "plain",
            TreeShape.chain(gamma),
            by_formula(table[0][0], gamma, costs.expand[min(costs.expand)] / alone),
        )
        for gamma in range(longest + 1)
    ]
    trees = []
    for size in nodes:
        shapes = {best_tree(table[:depth], size) for depth in range(1, longest + 1)}
        grown = [shape for shape in shapes if shape.nodes == size and not shape.is_chain]
        if grown:
            trees.append(max((weigh(f"tree {size}", s) for s in grown), key=_rank))
    ways = (*chains, *trees)
    return Plan(ways, max(ways, key=_rank))


def _rank(way: Way) -> tuple:
    """The faster, of equals the smaller and shallower."""
    return way.speedup, -way.shape.nodes, -way.shape.depth


def by_formula(alpha: float, gamma: int, c: float) -> float:
    """Speedup under independent acceptance α."""
    tokens = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return tokens / (gamma * c + 1)

"""Trees of fixed shape (Medusa, arXiv 2401.10774, 2.1.2); a chain is one of width 1.

B batch, M nodes with the root, m expanded nodes of a level, c most children of one of them, n nodes
of the next level, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.generator import verify
from spectrain.generator.drafters import Accepted, Block, Drafter, Timed, ancestors_of
from spectrain.generator.randomness import ACCEPT, DRAFT, OWN, several, uniform
from spectrain.generator.rows import Rows
from spectrain.generator.rules import Rules
from spectrain.heads.base import DraftHead
from spectrain.heads.tree import TreeShape


@dataclass(frozen=True)
class Level:
    """How the nodes of one level come from those of the level above.

    nodes [m] that are expanded · within [m] their places among all nodes of their level · above [m]
    the places of their parents among those expanded before · most: choices looked at in each
    places [n] of the new nodes among the m·most choices
    """

    nodes: Tensor
    within: Tensor
    above: Tensor
    most: int
    places: Tensor


class Static(Drafter):
    """Child r of a node is the head's r-th choice there or, `drawn`, one of c tokens drawn without
    replacement from its distribution."""

    def __init__(
        self, head: DraftHead | None, shape: TreeShape, device: torch.device, drawn: bool = False
    ) -> None:
        # Slots that a head keeps are those of the nodes it was given to expand.
        room = sum(map(len, shape.frontiers[1:]))
        super().__init__(head, shape.depth, shape.nodes + 1, room)
        if head is not None:
            _require_possible(shape, head)
        self.shape, self.drawn = shape, drawn
        self.parents = torch.tensor(shape.parents, device=device)
        self.depths = torch.tensor(shape.depths, device=device)
        self.ancestors = (
            None if shape.is_chain else ancestors_of(self.parents[None], shape.depth)[0]
        )
        children, self._widths = verify.children_of(shape.parents)
        self._children = children.to(device)
        self._levels = [_level(shape, depth, drawn, device) for depth in range(shape.depth)]

    def draft(self, rows: Rows, rules: Rules, view: int, timed: Timed) -> Block:
        tokens, q = [rows.current[:, None]], []
        logits = self._read(rows, view, timed)[:, None] if self.depth else None
        for depth, level in enumerate(self._levels):
            if depth:
                above = level.above.expand(rows.count, -1)
                with timed():
                    logits = self.head.expand(self.state, tokens[-1][:, level.within], above)
            if self.drawn and not rules.sampling.greedy:
                probabilities = rules.sampling.warp(logits)
                ids = self._draw(probabilities, level, rows, depth)
                q.append(self.head.spread(probabilities))
            elif level.most == 1:
                ids = logits.argmax(-1)
            else:
                ids = logits.topk(level.most, dim=-1).indices.flatten(1)
            tokens.append(self.head.to_target(ids)[:, level.places])
        return Block(
            torch.cat(tokens, dim=1), self.depths, self.parents, self.ancestors, self._of_nodes(q)
        )

    def _draw(self, q: Tensor, level: Level, rows: Rows, depth: int) -> Tensor:
        """q [B, m, D] → draft ids [B, m·c]"""
        # Nodes of one level may share numbers: at most one of them is on the path that counts.
        number = several(rows.new + 1 + depth, level.most)[:, None].expand(-1, q.shape[1], -1)
        drawn = verify.without_replacement(q, level.most, uniform(rows.keys, DRAFT, number))
        return drawn.flatten(1)

    def _of_nodes(self, q: list[Tensor]) -> Tensor | None:
        """Per level [B, m, V] → [B, N, V] of the first N nodes, the last of which has children;
        zeros for those among them without."""
        if not q:
            return None
        spread = q[0].new_zeros(len(q[0]), max(self.shape.parents) + 1, q[0].shape[-1])
        return spread.index_copy(1, torch.cat([lv.nodes for lv in self._levels]), torch.cat(q, 1))

    def accept(self, logits: Tensor, block: Block, rows: Rows, rules: Rules) -> Accepted:
        if block.q is None:
            return super().accept(logits, block, rows, rules)
        p = rules.sampling.warp(logits)
        number = rows.new[:, None] + 1 + torch.arange(self.depth + 1, device=p.device)
        tests = uniform(rows.keys, ACCEPT, several(number[:, :-1], self._children.shape[1]))
        owns = uniform(rows.keys, OWN, number)
        tree = block.tokens, self._children, self._widths
        count, path, own = verify.drawn_tree(p, block.q, *tree, tests, owns)
        return self._accepted(block, count, own, path)


def _require_possible(shape: TreeShape, head: DraftHead) -> None:
    if shape.depth > head.longest_draft:
        raise SpectrainError(
            f"the tree is {shape.depth} deep, the longest draft of this head is "
            f"{head.longest_draft}",
            where="tree",
        )
    if shape.choices > head.config.draft_vocab_size:
        raise SpectrainError(
            f"the tree asks for the head's choice number {shape.choices}, it can guess "
            f"{head.config.draft_vocab_size} tokens",
            where="tree",
        )


def _level(shape: TreeShape, depth: int, drawn: bool, device: torch.device) -> Level:
    """The step from the nodes of `depth` to those below them."""
    nodes, level = shape.frontiers[depth], shape.levels[depth]
    parents, ranks = shape.parents, shape.ranks
    above = [shape.frontiers[depth - 1].index(parents[node]) for node in nodes] if depth else [0]
    children = {parent: [] for parent in nodes}
    for node in shape.levels[depth + 1]:
        children[parents[node]].append(node)
    if drawn:  # in the order of drawing, whatever rank stands in the shape
        most = max(map(len, children.values()))
        order = {node: place for own in children.values() for place, node in enumerate(own)}
    else:
        order = {node: ranks[node] for node in shape.levels[depth + 1]}
        most = max(order.values()) + 1
    places = [nodes.index(parents[node]) * most + order[node] for node in shape.levels[depth + 1]]

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)

    within = [level.index(node) for node in nodes]
    return Level(tensor(list(nodes)), tensor(within), tensor(above), most, tensor(places))

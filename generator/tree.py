"""A drafted tree as data, and how it is grown (EAGLE-2, arXiv 2406.16858, section 4).

Node 0 is the root: the token the target chose last. Every row of a batch has a tree of its own, all
of the same size, so that no shape depends on what was guessed::

    expand   the k most probable nodes of a level, by the product of the draft's probabilities on
             the path from the root; k children each; `depth` levels
    rerank   of all nodes ever drafted the most probable `nodes`; a child is never more probable
             than its parent and on equal terms comes after it, so parents of kept nodes are kept

B batch, C candidates (with the root), M = nodes + 1, m nodes expanded, k = top_k, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.generator.drafters import Block, Drafter, Timed, ancestors_of
from spectrain.generator.rows import Rows
from spectrain.generator.rules import Rules
from spectrain.heads.base import DraftHead
from spectrain.heads.tree import TreeDefaults

# Logits of the children [B, m, D] of the nodes with tokens and parents [B, m] (DraftHead.expand).
Expand = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Tree:
    """Parents come before their children; the children of one node are different tokens.

    tokens [B, M] target ids · parents [B, M] node numbers, the root is its own
    depths [B, M] levels below the root · ancestors [B, M, M] bool: n's path from the root, n itself
    scores [B, M] log-probability of the path by the draft
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    scores: Tensor


def grow(
    guess: Tensor,
    root: Tensor,
    shape: TreeDefaults,
    expand: Expand,
    to_target: Callable[[Tensor], Tensor],
    log_probabilities: Callable[[Tensor], Tensor],
) -> Tree:
    """The head's first guess [B, D] and the root's token [B] → a tree of shape.nodes + 1 nodes."""
    k = shape.top_k
    tokens, score = root[:, None], torch.zeros_like(root[:, None], dtype=torch.float32)
    parents = torch.zeros_like(tokens)
    levels = [(tokens, parents, score)]
    place, logits = parents, guess[:, None]  # the expanded nodes among all, their children's logits
    for level in range(1, shape.depth + 1):
        log_q, ids = log_probabilities(logits).topk(k, dim=-1)  # [B, m, k]
        scores = (score[..., None] + log_q.clamp(max=0)).flatten(1)
        tokens, parents = to_target(ids).flatten(1), place.repeat_interleave(k, dim=1)
        before = sum(part.shape[1] for part, _, _ in levels)
        levels.append((tokens, parents, scores))
        if level < shape.depth:
            chosen = _best(scores, k)
            score, place = scores.gather(1, chosen), before + chosen
            logits = expand(tokens.gather(1, chosen), chosen // k)
    return _rerank(levels, shape.nodes + 1)


def _rerank(levels: list[tuple[Tensor, Tensor, Tensor]], size: int) -> Tree:
    """The best `size` of all candidates, the root among them, in the order they were drafted."""
    tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    depths = [torch.full_like(part, level) for level, (part, _, _) in enumerate(levels)]
    kept = _best(scores, size).sort(dim=1).values
    number = torch.arange(size, device=kept.device).expand_as(kept)
    renamed = torch.zeros_like(tokens).scatter(1, kept, number)  # candidate → node
    above = renamed.gather(1, parents.gather(1, kept))
    return Tree(
        tokens.gather(1, kept),
        above,
        torch.cat(depths, dim=1).gather(1, kept),
        ancestors_of(above, len(levels) - 1),
        scores.gather(1, kept),
    )


def _best(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` highest of [B, n], best first; of equal ones the earlier."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


# ── in the loop ──────────────────────────────────────────────────────────────


class Grown(Drafter):
    """A tree of this shape, grown anew in every step."""

    def __init__(self, head: DraftHead, shape: TreeDefaults) -> None:
        require_possible(shape, head)
        # A node at depth d brings its d − 1 ancestors: no path is longer than there are nodes.
        depth = min(shape.depth, shape.nodes)
        super().__init__(head, depth, shape.nodes + 1, shape.top_k * (depth - 1))
        self.shape = shape.model_copy(update={"depth": depth})

    def draft(self, rows: Rows, rules: Rules, view: int, timed: Timed) -> Block:
        def expand(tokens: Tensor, parents: Tensor) -> Tensor:
            with timed():
                return self.head.expand(self.state, tokens, parents)

        guess = self._read(rows, view, timed)
        scores = rules.sampling.log_probabilities
        tree = grow(guess, rows.current, self.shape, expand, self.head.to_target, scores)
        return Block(tree.tokens, tree.depths, tree.parents, tree.ancestors)


# ── shapes ───────────────────────────────────────────────────────────────────


def shape_for(
    head: DraftHead,
    top_k: int | None = None,
    depth: int | None = None,
    nodes: int | None = None,
) -> TreeDefaults:
    """The tree to grow with `head`: as asked, otherwise as the head was published with, otherwise
    4 children, as deep as the head was trained, 16 nodes.

    What nobody asked for is clamped to what this head can draft; what was asked for is not.
    """
    own = head.tree or TreeDefaults(top_k=4, depth=min(head.config.steps, 16), nodes=16)
    top_k = top_k or min(own.top_k, head.config.draft_vocab_size)
    depth = depth or min(own.depth, head.longest_draft)
    nodes = nodes or min(own.nodes, candidates(top_k, depth))
    shape = TreeDefaults(top_k=top_k, depth=depth, nodes=nodes)
    require_possible(shape, head)
    return shape


def require_possible(shape: TreeDefaults, head: DraftHead) -> None:
    """Refuse a tree that this head cannot draft."""
    most = candidates(shape.top_k, shape.depth)
    for name, value, limit, reason in (
        ("depth", shape.depth, head.longest_draft, "the longest draft of this head"),
        ("top_k", shape.top_k, head.config.draft_vocab_size, "the tokens this head can guess"),
        ("nodes", shape.nodes, most, "all that is drafted with this top_k and depth"),
    ):
        if value > limit:
            raise SpectrainError(f"{value} is more than {limit}, {reason}", where=f"tree_{name}")


def candidates(top_k: int, depth: int) -> int:
    """Nodes that are drafted before the rerank, without the root."""
    return top_k + (depth - 1) * top_k**2

"""Two ways to draft and to accept: a chain of γ tokens, and a grown tree; one loop for both.

B batch, M tokens in a block (the token the target chose last and what was drafted), d longest
draft, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain.generator import verify
from spectrain.generator.sampling import Sampling, draw
from spectrain.generator.tree import Expand, Tree, grow, require_possible
from spectrain.heads.base import DraftHead
from spectrain.heads.tree import TreeDefaults


@dataclass(frozen=True)
class Block:
    """What the target reads in one forward: tokens [B, M]; depths, ancestors of a tree, else None.

    drafted: what `accept` of the same drafter wants to know (q of a chain, the tree)
    """

    tokens: Tensor
    depths: Tensor | None = None
    ancestors: Tensor | None = None
    drafted: Any = None


@dataclass(frozen=True)
class Accepted:
    """Of each row the first count+1 entries count, the rest means nothing.

    count [B] drafted tokens accepted · tokens [B, d+1] these, then the target's own
    path [B, d+1] places in the block of the root and the accepted tokens; None: 0, 1, 2 …
    """

    count: Tensor
    tokens: Tensor
    path: Tensor | None = None

    @property
    def own(self) -> Tensor:
        """The target's own token: [B]."""
        return self.tokens.gather(1, self.count[:, None]).squeeze(1)


class Chain:
    """γ tokens in a row: the most probable ones, or drawn from the draft's distribution.

    width: tokens the target reads · depth: drafts that can be accepted · room: drafted slots of the
    head's cache
    """

    def __init__(self, head: DraftHead | None, gamma: int) -> None:
        self.head = head
        self.depth, self.width, self.room = gamma, gamma + 1, max(0, gamma - 1)

    def draft(
        self,
        guess: Tensor | None,
        current: Tensor,
        expand: Expand,
        sampling: Sampling,
        random: torch.Generator,
    ) -> Block:
        """guess [B, D] of the first token (None without a head), current [B] the root."""
        tokens, q = [current[:, None]], []
        parents = torch.zeros_like(tokens[0])
        for step in range(self.depth):
            if step:
                guess = expand(tokens[-1], parents)[:, 0]
            if sampling.greedy:
                choice = guess.argmax(-1)
            else:
                probabilities = sampling.warp(guess)
                choice = draw(probabilities, random)
                q.append(self.head.spread(probabilities))
            tokens.append(self.head.to_target(choice)[:, None])
        return Block(torch.cat(tokens, dim=1), drafted=torch.stack(q, 1) if q else None)

    def accept(
        self, logits: Tensor, block: Block, sampling: Sampling, random: torch.Generator
    ) -> Accepted:
        """logits [B, M, V] of the target."""
        drafts = block.tokens[:, 1:]
        if not self.depth:
            count, own = drafts.new_zeros(len(drafts)), sampling.choose(logits[:, 0], random)
        elif sampling.greedy:
            count, own = verify.greedy(logits, drafts)
        else:
            count, own = verify.sampling(sampling.warp(logits), block.drafted, drafts, random)
        return Accepted(count, _committed(drafts, count, own))


class Grown:
    """A tree grown from the draft's probabilities (generator/tree.py); fields as in `Chain`."""

    def __init__(self, head: DraftHead, shape: TreeDefaults) -> None:
        require_possible(shape, head)
        # A node at depth d brings its d − 1 ancestors: no path is longer than there are nodes.
        self.shape = shape.model_copy(update={"depth": min(shape.depth, shape.nodes)})
        self.head = head
        self.depth, self.width = self.shape.depth, shape.nodes + 1
        self.room = shape.top_k * (self.depth - 1)

    def draft(
        self,
        guess: Tensor,
        current: Tensor,
        expand: Expand,
        sampling: Sampling,
        random: torch.Generator,
    ) -> Block:
        """guess [B, D] of the first token, current [B] the root."""
        tree = grow(
            guess, current, self.shape, expand, self.head.to_target, sampling.log_probabilities
        )
        return Block(tree.tokens, tree.depths, tree.ancestors, tree)

    def accept(
        self, logits: Tensor, block: Block, sampling: Sampling, random: torch.Generator
    ) -> Accepted:
        """logits [B, M, V] of the target."""
        tree: Tree = block.drafted
        choice = sampling.choose(logits, random)
        count, path = verify.tree(choice, tree.tokens, tree.parents, tree.ancestors)
        path = path[:, : self.depth + 1]
        own = choice.gather(1, path.gather(1, count[:, None])).squeeze(1)
        return Accepted(count, _committed(tree.tokens.gather(1, path[:, 1:]), count, own), path)


def _committed(drafts: Tensor, count: Tensor, own: Tensor) -> Tensor:
    """drafts [B, d], own [B] → [B, d+1], `own` behind the accepted ones"""
    return torch.cat([drafts, own[:, None]], dim=1).scatter(1, count[:, None], own[:, None])

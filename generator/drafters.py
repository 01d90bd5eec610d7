"""What all ways to draft have in common; the loop (generator/speculate.py) knows none by name.

    Static   a tree of fixed shape (static.py): a chain is one of width 1, plain decoding one of no
             nodes at all
    Grown    a tree grown from the draft's probabilities (tree.py, EAGLE-2)
    Lookup   what followed the same few tokens earlier in the text (lookup.py): no head

A drafter keeps its head's state. A step calls `draft` (the head first reads what the last step
committed) and `accept`; both are tensor operations whose shapes do not depend on values.

B batch, A admitted rows, M tokens in a block (the root, which is the token the target chose last,
and what was drafted), N nodes up to the last that has children, d longest draft, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain.core.batch import Features
from spectrain.generator import verify
from spectrain.generator.rows import Rows
from spectrain.generator.rules import Rules
from spectrain.heads.base import DraftHead

Timed = Callable[[], AbstractContextManager]  # around the head's own forwards


@dataclass(frozen=True)
class Block:
    """What the target reads in one forward.

    tokens [B, M] · depths [M] or [B, M] below the root · parents [M] or [B, M], the root is its own
    ancestors [M, M] or [B, M, M] bool, n's path from the root and n itself; None: a chain
    q [B, N, V]: what the children of the first N nodes were drawn from; None: they are the
    likeliest, and those behind have none
    """

    tokens: Tensor
    depths: Tensor
    parents: Tensor
    ancestors: Tensor | None = None
    q: Tensor | None = None


@dataclass(frozen=True)
class Accepted:
    """Of each row the first count+1 entries count, the rest means nothing.

    count [B] drafted tokens accepted · own [B] the target's token · tokens [B, d+1] the accepted
    ones, then the target's own
    path [B, d+1] places in the block of the root and the accepted tokens; None: 0, 1, 2 …
    """

    count: Tensor
    own: Tensor
    tokens: Tensor
    path: Tensor | None = None

    @classmethod
    def of(cls, tokens: Tensor, count: Tensor, own: Tensor, path: Tensor | None) -> Accepted:
        """tokens [B, M] of the block."""
        drafts = tokens[:, 1:] if path is None else tokens.gather(1, path[:, 1:])
        behind = torch.cat([drafts, own[:, None]], dim=1)
        return cls(count, own, behind.scatter(1, count[:, None], own[:, None]), path)


class Drafter:
    """A way to draft, and acceptance of the likeliest children.

    depth d: drafts that one step can accept · width M: tokens that the target reads · room: slots
    of the head's cache that drafted tokens take
    """

    def __init__(self, head: DraftHead | None, depth: int, width: int, room: int) -> None:
        self.head, self.depth, self.width, self.room = head, depth, width, room
        self.state: Any = None
        self._slots = 0

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.head.needs.aux_layers if self.head else ()

    # ── the head's state ─────────────────────────────────────────────────────

    def start(self, rows: int, slots: int) -> None:
        """Nothing read yet, in `rows` sequences of at most `slots` positions."""
        self._slots = slots
        self.state = self.head.start(rows, slots) if self.head else None

    def admit(
        self,
        rows: Tensor,
        tokens: Tensor,
        features: Features,
        counts: Tensor,
        known: int = 0,
        before: Any = None,
    ) -> Any:
        """Read prompts into `rows` [A], all but the last position, which the next step reads.
        Returns the state that has read them and nothing else, None without a head.

        tokens [A, n+1] right-padded prompts, the target's choice behind each; counts [A] of prompts
        before: a state that has read the `known` positions of a prompt's begin, which are left out
        of all the rest
        """
        if self.head is None:
            return None
        new = self.head.start(len(tokens), known + features.last.shape[1])
        if not known:
            self.head.begin(new, tokens, features, counts - 1)
        else:
            self.head.adopt(new, rows.new_zeros(1), before)
            self.head.extend(new, tokens[:, 1:], features, counts - 1)
        self.head.adopt(self.state, rows, new)
        return new

    def keep(self, rows: Tensor) -> None:
        """Only `rows` [B'] stay, in that order."""
        if self.head:
            old, self.state = self.state, self.head.start(len(rows), self._slots)
            self.head.adopt(self.state, torch.arange(len(rows), device=rows.device), old, rows)

    # ── a step ───────────────────────────────────────────────────────────────

    def look(self, texts: Sequence[Sequence[int] | None]) -> int:
        """On the host before a step: all tokens of each row so far (None: the row is empty).
        Returns the width M of the step's block."""
        return self.width

    def draft(self, rows: Rows, rules: Rules, view: int, timed: Timed) -> Block:
        """`view` bounds the slots of the head's cache that are looked at."""
        raise NotImplementedError

    def accept(self, logits: Tensor, block: Block, rows: Rows, rules: Rules) -> Accepted:
        """logits [B, M, V] of the target at the nodes."""
        if rules.typical and not rules.sampling.greedy:
            p, typical = rules.sampling.warp(logits), rules.typical
            bounds = typical.epsilon, typical.delta
            count, path, own = verify.typical(p, *_tree(block), *bounds)
            return self._accepted(block, count, own, path)
        choice = rules.choose(logits, rows.keys, rows.new[:, None] + 1 + block.depths)
        if block.ancestors is None:
            count, path = verify.chain(choice, block.tokens), None
            own = choice.gather(1, count[:, None]).squeeze(1)
        else:
            count, path = verify.tree(choice, *_tree(block))
            own = choice.gather(1, path.gather(1, count[:, None])).squeeze(1)
        return self._accepted(block, count, own, path)

    def _accepted(self, block: Block, count: Tensor, own: Tensor, path: Tensor | None) -> Accepted:
        if path is not None:
            path = None if block.ancestors is None else path[:, : self.depth + 1]
        return Accepted.of(block.tokens, count, own, path)

    def _read(self, rows: Rows, view: int, timed: Timed) -> Tensor:
        """The head reads what the last step committed: logits [B, D] of its first guess."""
        with timed():
            return self.head.extend(self.state, rows.tokens, rows.features, rows.kept, view)


def _tree(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents [B, M] and ancestors [B, M, M] of a block."""
    tokens, ancestors = block.tokens, block.ancestors
    batch, width = tokens.shape
    if ancestors is None:
        ancestors = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
    return tokens, block.parents.expand(batch, -1), ancestors.expand(batch, -1, -1)


def ancestors_of(parents: Tensor, depth: int) -> Tensor:
    """parents [B, M] of a tree of `depth` levels below the root → [B, M, M] bool"""
    size = parents.shape[1]
    own = torch.eye(size, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    seen, index = own, parents[..., None].expand(-1, -1, size)
    for _ in range(depth):
        seen = own | seen.gather(1, index)
    return seen

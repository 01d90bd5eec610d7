"""Verification rules; pure functions, no model inside.

B batch, γ tokens of a drafted chain, M nodes of a tree (the root is node 0), V vocabulary. Every
rule leaves the target's output distribution as it is (for chains Leviathan et al. 2211.17192, Chen
et al. 2302.01318).
"""

from __future__ import annotations

import torch
from torch import Tensor


def chain(choice: Tensor, tokens: Tensor) -> Tensor:
    """The target's choice [B, M] after each token of the block tokens [B, M] → accepted [B]: `tree`
    for a chain, the leading run of drafts that are what the target chose."""
    return _run(tokens[:, 1:] == choice[:, :-1])


def tree(
    choice: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's choice [B, M] after each node → accepted [B], path [B, M].

    tokens, parents [B, M], ancestors [B, M, M] as in `generator.tree.Tree`. The path begins with
    the root and the accepted nodes, in order; the rest of it means nothing. The next token is the
    choice after the last accepted node.

    Greedy: `choice` is the argmax, and the only path that equals it is accepted.
    Sampling: `choice` is one draw from each node's p. For children that are no draws themselves
    (the top k: point masses) this is the sequential rule, accept child c with p(c), on rejection
    set p(c) to 0 and renormalise, at last draw from what is left: child i is accepted with
    Π_{j<i} (1 − p_j / (1 − Σ_{l<j} p_l)) · p_i / (1 − Σ_{l<i} p_l) = p_i, and a token x that is no
    child comes with p(x). Lossless whatever the tree, as long as it was made without knowing the
    draws.
    """
    matches = tokens == choice.gather(1, parents)
    matches[:, 0] = True
    # Children of one node differ, so the nodes that match all the way form one path.
    alive = (matches[:, None] | ~ancestors).all(-1)
    path = (~alive).to(torch.int8).sort(dim=1, stable=True).indices
    return alive.sum(1) - 1, path


def _run(matches: Tensor) -> Tensor:
    """Length of the leading run of True: [B, γ] → [B]."""
    return matches.long().cumprod(1).sum(1)

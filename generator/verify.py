"""Verification rules; pure functions, no model inside.

B batch, M nodes of a tree (the root is node 0), d its levels below the
root, c most children of a node, V vocabulary. Every rule but `typical` leaves the target's output
distribution as it is (for chains Leviathan et al. 2211.17192, Chen et al. 2302.01318; for trees of
drawn children SpecInfer 2305.09781, without replacement Sequoia 2402.12374).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.generator.sampling import pick


def chain(choice: Tensor, tokens: Tensor) -> Tensor:
    """The target's choice [B, M] after each token of the block tokens [B, M] → accepted [B]: `tree`
    for a chain, the leading run of drafts that are what the target chose."""
    return _run(tokens[:, 1:] == choice[:, :-1])


def tree(
    choice: Tensor, tokens: Tensor, parents: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's choice [B, M] after each node → accepted [B], path [B, M].

    tokens, parents [B, M] or [M], ancestors [B, M, M] or [M, M] as in `generator.tree.Tree`. The
    path begins with the root and the accepted nodes, in order; the rest of it means nothing. The
    next token is the choice after the last accepted node.

    Greedy: `choice` is the argmax, and the only path that equals it is accepted.
    Coupled: `choice` is pick(p, uniform(keys, OWN, number)), `number` being that of the new token
    which a node's logits choose (its root's + 1 + its depth). Every committed token is the choice
    after the tokens before it, so the text is, token for token, that of plain decoding with the
    same keys, whatever the tree; even one made with knowledge of the draws.
    Sampling: `choice` is one draw from each node's p. For children that are no draws themselves
    (the top k: point masses) this is the sequential rule, accept child c with p(c), on rejection
    set p(c) to 0 and renormalise, at last draw from what is left: child i is accepted with
    Π_{j<i} (1 − p_j / (1 − Σ_{l<j} p_l)) · p_i / (1 − Σ_{l<i} p_l) = p_i, and a token x that is no
    child comes with p(x). Lossless whatever the tree.
    """
    matches = tokens == choice.gather(1, parents.expand_as(tokens))
    matches[:, 0] = True
    # Children of one node differ, so the nodes that match all the way form one path.
    alive = (matches[:, None] | ~ancestors).all(-1)
    return alive.sum(1) - 1, _in_order(alive)


def drawn_tree(
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    children: Tensor,
    widths: Sequence[int],
    accept_u: Tensor,
    own_u: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """For children drawn from q by `without_replacement` → accepted [B], path [B, d+1], own [B].

    p [B, M, V] probabilities after each node, q [B, N, V] those its children were drawn from, of
    the first N nodes (those behind have no children); tokens [B, M]; children [M, c] and widths (d)
    of `children_of`; uniform numbers accept_u [B, d, c], own_u [B, d+1].

    At a node its children are tested in the order they were drawn: c is accepted with probability
    min(1, p(c)/q(c)); on rejection p ← norm(max(0, p − q)), and c leaves q. After the last one the
    target's own token is drawn from what p has become. A child of probability 0 by q was not drawn
    from it (nothing was left to draw): it is passed over. A chain is the case c = 1. The path
    begins with the root and the accepted nodes; the rest of it means nothing.
    """
    rows = torch.arange(len(p), device=p.device)
    node = torch.zeros_like(rows)
    walking = torch.ones_like(node, dtype=torch.bool)
    count, path, own_p = node, [node], p[:, 0]
    for level, width in enumerate(widths):
        # What p and q become at this node. Rows that have stopped go along and change nothing.
        left, drafted = own_p, q[rows, node.clamp(max=q.shape[1] - 1)]
        below, found = children[node], torch.zeros_like(walking)
        for order in range(width):
            child = below[:, order]
            token = tokens[rows, child.clamp(min=0)][:, None]
            left = left / left.sum(1, keepdim=True)
            # Of a q with nothing left this is 0/0: not above 0, so no child is tested any more.
            drafted = drafted / drafted.sum(1, keepdim=True)
            p_child, q_child = left.gather(1, token), drafted.gather(1, token)
            tested = ~found[:, None] & (child >= 0)[:, None] & (q_child > 0)
            passed = accept_u[:, level, order, None] * q_child < p_child
            rejected = tested & ~passed
            rest = (left - drafted).clamp(min=0)
            # p = q to the last bit: nothing is left over, and a rejection has probability 0.
            left = torch.where(rejected & (rest.sum(1, keepdim=True) > 0), rest, left)
            drafted = torch.where(rejected, drafted.scatter(1, token, 0.0), drafted)
            accepted = (tested & passed).squeeze(1)
            node = torch.where(walking & accepted, child, node)
            found = found | accepted
        here = torch.where(found[:, None], p[rows, node], left)
        own_p = torch.where(walking[:, None], here, own_p)
        walking = walking & found
        count = count + walking
        path.append(node)
    own = pick(own_p, own_u.gather(1, count[:, None]).squeeze(1))
    return count, torch.stack(path, 1), own


def without_replacement(q: Tensor, count: int, uniform: Tensor) -> Tensor:
    """`count` different tokens, drawn one after the other: q [..., V], uniform [..., count] → ids

    ids [..., count]: each is drawn from q without those before it, renormalised. When nothing is
    left to draw, the rest is a token that `drawn_tree` passes over.
    """
    drawn = []
    for order in range(count):
        drawn.append(pick(q, uniform[..., order]))
        q = q.scatter(-1, drawn[-1][..., None], 0.0)
    return torch.stack(drawn, -1)


def children_of(parents: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
    """parents (M) of a static tree → children [M, c] in node order, −1 for none, and for each of
    the d levels the most children of a node above it."""
    children: list[list[int]] = [[] for _ in parents]
    depths = [0] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
        depths[node] = depths[parent] + 1
    widths = [0] * max(depths)
    for depth, own in zip(depths, children, strict=True):
        if own:
            widths[depth] = max(widths[depth], len(own))
    most = max(widths, default=0)
    table = [own + [-1] * (most - len(own)) for own in children]
    return torch.tensor(table, dtype=torch.long).reshape(len(parents), most), tuple(widths)


def typical(
    p: Tensor,
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> tuple[Tensor, Tensor, Tensor]:
    """Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1) → accepted [B], path [B, M],
    own [B]. LOSSY: the text is not distributed as the target's.

    p [B, M, V] probabilities after each node; tokens, parents, ancestors as in `tree`. A node x is
    accepted if p(x) > min(ε, δ·exp(−H(p))) and its parent is; H is the entropy of p in nats. The
    longest accepted path wins, of equal ones that of the first node. The target's own token is the
    argmax of p: so the first token of each step is the greedy one, as in the authors' program, and
    every drafted one has to pass the threshold alone.
    """
    choice = p.argmax(-1)
    parents = parents.expand_as(tokens)
    threshold = (delta * torch.exp(-torch.special.entr(p).sum(-1))).clamp(max=epsilon)
    # p of a node's token after its parent; [B, M, V] is not copied for it.
    rows = torch.arange(len(p), device=p.device)[:, None]
    accepted = p[rows, parents, tokens] > threshold.gather(1, parents)
    accepted[:, 0] = True
    alive = (accepted[:, None] | ~ancestors).all(-1)
    size = tokens.shape[1]
    length = torch.where(alive, ancestors.sum(-1), 0)
    number = torch.arange(size, device=p.device)
    best = (length * size - number).argmax(1)
    on_path = ancestors.expand(len(p), -1, -1)[rows.squeeze(1), best]
    return on_path.sum(1) - 1, _in_order(on_path), choice.gather(1, best[:, None]).squeeze(1)


def _in_order(chosen: Tensor) -> Tensor:
    """Places [B, M] of the chosen of bool [B, M], in order, before all others."""
    return (~chosen).to(torch.int8).sort(dim=1, stable=True).indices


def _run(matches: Tensor) -> Tensor:
    """Length of the leading run of True: [B, γ] → [B]."""
    return matches.long().cumprod(1).sum(1)

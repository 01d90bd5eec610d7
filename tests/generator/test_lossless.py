"""Whole texts from a made-up target and a different draft: distributed as plain decoding's, and,
where the rule is coupled, equal to it token for token.

B texts at once, V vocabulary, M nodes of a static tree, L new tokens. Next-token tables are
[V + 1, V], row V for the beginning. Every chi-square fails a correct rule once in 10,000 seeds; the
seeds are fixed.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from spectrain.generator import verify
from spectrain.generator.randomness import ACCEPT, DRAFT, OWN, several, uniform
from spectrain.generator.sampling import Sampling, pick
from spectrain.generator.tree import ancestors_of
from spectrain.generator.verify import children_of, without_replacement

FALSE_ALARM = 1e-4
VOCAB, LENGTH, DRAWS = 4, 3, 40_000
SHAPES = {
    "chain": [0, 0, 1],
    "pair": [0, 0, 0],
    "tree": [0, 0, 0, 1, 1, 2, 3],
    "wide": [0, 0, 0, 0, 1, 1, 2, 2, 4, 4],
}
WARPS = {
    "whole": Sampling(1.0),
    "two tokens": Sampling(0.8, top_k=2),  # the wide tree's children exhaust q
    "warped": Sampling(0.7, top_p=0.85, min_p=0.02),
}


def table(seed, sampling, vocab=VOCAB):
    generator = torch.Generator().manual_seed(seed)
    return sampling.warp(torch.randn(vocab + 1, vocab, generator=generator))


class Static:
    """A static tree: parents as a list, the rest as tensors."""

    def __init__(self, parents):
        self.children, self.widths = children_of(parents)
        self.parents = torch.tensor(parents)
        self.ancestors = ancestors_of(self.parents[None], len(parents))[0]
        self.depths = self.ancestors.sum(-1) - 1


def plain(p_next, keys, length):
    """[B, length]: token i by the i-th number of the row, given the one before."""
    text = [torch.full_like(keys, p_next.shape[1])]
    for number in range(length):
        u = uniform(keys, OWN, torch.full_like(keys, number))
        text.append(pick(p_next[text[-1]], u))
    return torch.stack(text[1:], 1)


def draft(kind, tree, q_next, p_next, root, new, keys):
    """Tokens [B, M] of the tree. drawn: without replacement from q; top: the most probable by q;
    peeking: the target's very choice first in every second row, as no draft could know it."""
    tokens = root[:, None].repeat(1, len(tree.parents))
    for node, below in enumerate(tree.children.tolist()):
        below = [child for child in below if child >= 0]
        if not below:
            continue
        q, number = q_next[tokens[:, node]], new + 1 + tree.depths[node]
        if kind == "drawn":
            u = uniform(keys, DRAFT, several(number, len(below)))
            tokens[:, below] = without_replacement(q, len(below), u)
        else:
            if kind == "peeking":
                choice = pick(p_next[tokens[:, node]], uniform(keys, OWN, number))
                known = torch.nn.functional.one_hot(choice, q.shape[1]) * (keys % 2)[:, None]
                q = q + known * uniform(keys, DRAFT, number)[:, None]
            tokens[:, below] = q.topk(len(below)).indices
    return tokens


def accept(rule, tree, p_next, q_next, tokens, new, keys):
    p = p_next[tokens]
    if rule == "drawn":
        depth, most = len(tree.widths), tree.children.shape[1]
        level = new[:, None] + 1 + torch.arange(depth + 1)
        accept_u = uniform(keys, ACCEPT, several(level[:, :-1], most))
        own_u = uniform(keys, OWN, level)
        q = q_next[tokens]
        return verify.drawn_tree(p, q, tokens, tree.children, tree.widths, accept_u, own_u)
    if rule == "typical":
        return verify.typical(p, tokens, tree.parents, tree.ancestors)
    choice = pick(p, uniform(keys, OWN, new[:, None] + 1 + tree.depths))
    count, path = verify.tree(choice, tokens, tree.parents, tree.ancestors)
    return count, path, choice.gather(1, path.gather(1, count[:, None])).squeeze(1)


def speculate(kind, rule, parents, p_next, q_next, keys, length):
    """[B, length] and the accepted drafts per step: the loop of generator/speculate.py."""
    tree = Static(parents)
    depth = len(tree.widths)
    text = torch.zeros(len(keys), length + depth + 1, dtype=torch.long)
    text[:, 0] = plain(p_next, keys, 1)[:, 0]
    new = torch.zeros_like(keys)  # the root is new token number `new`
    accepted = []
    while new.min() < length - 1:
        root = text.gather(1, new[:, None]).squeeze(1)
        tokens = draft(kind, tree, q_next, p_next, root, new, keys)
        count, path, own = accept(rule, tree, p_next, q_next, tokens, new, keys)
        block = torch.cat([tokens.gather(1, path[:, 1 : depth + 1]), own[:, None]], 1)
        block = block.scatter(1, count[:, None], own[:, None])
        for place in range(depth + 1):
            going = (place <= count) & (new < length - 1)
            text[going, new[going] + 1 + place] = block[going, place]
        accepted.append(count[new < length - 1].double().mean().item())
        new = torch.where(new < length - 1, new + count + 1, new)
    return text[:, :length], accepted


def p_value(text, p_next):
    """Of the texts' chi-square against P(a) P(b | a) P(c | b); texts that cannot be weigh all."""
    vocab = p_next.shape[1]
    first, then = p_next[vocab].double(), p_next[:vocab].double()
    joint = (first[:, None, None] * then[:, :, None] * then[None]).flatten()
    index = (text * torch.tensor([vocab**2, vocab, 1])).sum(1)
    observed = torch.bincount(index, minlength=vocab**3)
    possible = joint > 0
    if observed[~possible].any():
        return 0.0
    expected = joint[possible] / joint.sum() * len(text)
    assert expected.min() > 5
    return chisquare(observed[possible].numpy(), expected.numpy()).pvalue


CASES = list(itertools.product(SHAPES, WARPS))


@pytest.mark.parametrize(("shape", "warp"), CASES)
@pytest.mark.parametrize("kind", ["top", "drawn"])
def test_texts_are_distributed_as_the_target_s(kind, shape, warp):
    """40,000 texts of 3 tokens: point masses by `tree`, drawn children by `drawn_tree`. The drafts
    are neither all accepted nor all rejected, and the draft's own texts are told apart."""
    p_next, q_next = table(1, WARPS[warp]), table(2, WARPS[warp])
    keys = torch.arange(DRAWS) + 1_000_000
    rule = "drawn" if kind == "drawn" else "tree"
    if kind == "top" and warp == "two tokens" and shape == "wide":
        q_next = table(2, WARPS["whole"])  # three children that q can tell apart
    text, accepted = speculate(kind, rule, SHAPES[shape], p_next, q_next, keys, LENGTH)
    assert 0.1 < accepted[0] < len(children_of(SHAPES[shape])[1]) - 0.05
    assert p_value(text, p_next) > FALSE_ALARM
    assert p_value(plain(q_next, keys, LENGTH), p_next) < 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_typical_acceptance_is_lossy(shape):
    """The same test tells typical acceptance from the target: its texts are too probable."""
    p_next, q_next = table(1, WARPS["whole"]), table(2, WARPS["whole"])
    keys = torch.arange(DRAWS) + 1_000_000
    text, accepted = speculate("top", "typical", SHAPES[shape], p_next, q_next, keys, LENGTH)
    assert accepted[0] > 0.1
    assert p_value(text, p_next) < 1e-6


def test_drawn_children_are_accepted_more_often_than_a_coupled_test_would():
    """Of one child min(1, p/q) accepts Σ min(p, q), coupled draws Σ p·q: 5 standard errors of
    40,000 (odds 1e-6), each against its own closed form."""
    p_next, q_next = table(1, WARPS["whole"]), table(2, WARPS["whole"])
    keys = torch.arange(DRAWS)
    first = plain(p_next, keys, 1)[:, 0]
    p, q = p_next[first].double(), q_next[first].double()
    for rule, each in [("drawn", torch.minimum(p, q).sum(1)), ("tree", (p * q).sum(1))]:
        _, accepted = speculate("drawn", rule, [0, 0], p_next, q_next, keys, 2)
        assert abs(accepted[0] - each.mean()) < 5 * 0.5 / DRAWS**0.5


@st.composite
def trees(draw):
    """Parents of up to 10 nodes, at most 5 children each."""
    parents = [0]
    for node in range(1, draw(st.integers(1, 10))):
        free = [parent for parent in range(node) if parents[1:].count(parent) < 5]
        parents.append(draw(st.sampled_from(free)))
    return parents


@settings(deadline=None)
@given(
    trees(),
    st.sampled_from(["top", "drawn", "peeking"]),
    st.sampled_from(list(WARPS)),
    st.integers(0, 10_000),
)
def test_coupled_text_is_that_of_plain_decoding(parents, kind, warp, seed):
    """`tree` with choice = pick(p, uniform(keys, OWN, number)): token for token, whatever the tree,
    however it was made, and wherever its steps fall. (Drawn children may repeat when q has run
    dry; then `tree` has no single path, so q is whole.)"""
    p_next, q_next = table(seed, WARPS[warp], 5), table(seed + 1, Sampling(1.0), 5)
    keys = torch.arange(20) + 100 * seed
    text, _ = speculate(kind, "tree", parents, p_next, q_next, keys, 12)
    assert torch.equal(text, plain(p_next, keys, 12))
    # A row alone draws what it draws among others.
    alone, _ = speculate(kind, "tree", parents, p_next, q_next, keys[7:8], 12)
    assert torch.equal(alone, text[7:8])

"""Trees of drawn children and typical acceptance: against slow, obvious walks of one row."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from spectrain.generator import verify
from spectrain.generator.tree import ancestors_of

FALSE_ALARM = 1e-4
VOCAB = 4


@st.composite
def parents_of_a_tree(draw, most=8):
    size = draw(st.integers(1, most))
    return [0] + [draw(st.integers(0, node - 1)) for node in range(1, size)]


def by_level(parents):
    """The same tree, its nodes numbered by depth, as static trees are."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    order = sorted(range(len(parents)), key=lambda node: (depths[node], node))
    return [order.index(parents[node]) for node in order]


def distributions(rows, nodes, generator, zeros=0.3):
    """[rows, nodes, V] float64, some entries 0."""
    p = torch.rand(rows, nodes, VOCAB, generator=generator, dtype=torch.float64)
    p = p * (torch.rand(p.shape, generator=generator) > zeros) + 1e-3 * torch.eye(VOCAB)[0]
    return p / p.sum(-1, keepdim=True)


def slow_drawn_tree(p, q, tokens, parents, accept_u, own_u):
    """One row by the words of the rule: lists and whole loops, every step normalised."""
    node, path = 0, [0]
    while True:
        level = len(path) - 1
        left, drafted = list(p[node]), list(q[node])
        found = None
        children = [child for child in range(1, len(parents)) if parents[child] == node]
        for order, child in enumerate(children):
            token = tokens[child]
            if drafted[token] == 0:
                continue
            if accept_u[level][order] < min(1, left[token] / drafted[token]):
                found = child
                break
            rest = [max(0.0, a - b) for a, b in zip(left, drafted, strict=True)]
            left = [value / sum(rest) for value in rest]
            drafted[token] = 0.0
            total = sum(drafted)
            drafted = [value / total if total else 0.0 for value in drafted]
        if found is None:
            height, own = own_u[level] * sum(left), 0
            while sum(left[: own + 1]) <= height:
                own += 1
            return len(path) - 1, path, own
        path.append(found)
        node = found


@given(parents_of_a_tree(), st.integers(0, 10_000), st.booleans())
def test_drawn_tree_equals_the_rule_step_by_step(parents, seed, by_draw):
    """On the same uniform numbers, in float64: the same path and the same own token. Children are
    drawn from q, or any tokens at all (the rule is then not lossless, but defined)."""
    rows, generator = 8, torch.Generator().manual_seed(seed)
    if by_draw:
        parents = by_level(parents)
    p = distributions(rows, len(parents), generator)
    q = distributions(rows, len(parents), generator)
    tokens = torch.randint(VOCAB, (rows, len(parents)), generator=generator)
    children, widths = verify.children_of(parents)
    if by_draw:
        uniform = torch.rand(*tokens.shape, children.shape[1], generator=generator)
        for node, below in enumerate(children.tolist()):
            below = [child for child in below if child >= 0]
            if below:
                tokens[:, below] = verify.without_replacement(
                    q[:, node], len(below), uniform[:, node].double()
                )
    depth, most = len(widths), children.shape[1]
    accept_u = torch.rand(rows, depth, most, dtype=torch.float64, generator=generator)
    own_u = torch.rand(rows, depth + 1, dtype=torch.float64, generator=generator)
    # Where nodes are numbered by depth, q of the last level's leaves can be left out.
    last = max(parents) + 1
    given_q = q[:, :last] if by_draw else q
    count, path, own = verify.drawn_tree(p, given_q, tokens, children, widths, accept_u, own_u)
    assert path.shape == (rows, depth + 1)
    for row in range(rows):
        expected = slow_drawn_tree(
            *(part[row].tolist() for part in (p, q, tokens)),
            parents,
            *(part[row].tolist() for part in (accept_u, own_u)),
        )
        got = path[row, : count[row] + 1].tolist()
        assert (count[row].item(), got, own[row].item()) == expected


def test_a_child_that_q_cannot_give_is_passed_over():
    """q has two tokens, the node three children: the third repeats one, and neither it nor its
    rejection changes anything. p without these two: its own draw is what comes."""
    p = torch.tensor([[0.0, 0.0, 0.5, 0.5]]).expand(1, 4, -1)
    q = torch.tensor([[[0.6, 0.4, 0.0, 0.0]]])
    children, widths = verify.children_of([0, 0, 0, 0])
    for third in range(VOCAB):
        tokens = torch.tensor([[0, 0, 1, third]])
        zero = torch.zeros(1, 1, 3, dtype=torch.float64)
        own_u = torch.full((1, 2), 0.75, dtype=torch.float64)
        count, _, own = verify.drawn_tree(p, q, tokens, children, widths, zero, own_u)
        assert (count.item(), own.item()) == (0, 3)


def test_an_equal_draft_is_always_accepted():
    """p = q to the last bit: the largest uniform number accepts a drawn child."""
    p = distributions(500, 1, torch.Generator().manual_seed(0)).float()
    u = torch.full((500, 1, 1), 1 - 2.0**-53, dtype=torch.float64)
    half = torch.rand(500, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens = torch.cat(
        [torch.zeros(500, 1).long(), verify.without_replacement(p[:, 0], 1, half)], 1
    )
    children, widths = verify.children_of([0, 0])
    own_u = torch.zeros(500, 2, dtype=torch.float64)
    count, _, _ = verify.drawn_tree(p.expand(-1, 2, -1), p, tokens, children, widths, u, own_u)
    assert (count == 1).all()


def test_without_replacement_draws_one_after_the_other():
    """Three of four tokens, 40,000 times: P(a, b, c) = q_a · q_b/(1−q_a) · q_c/(1−q_a−q_b)."""
    q, draws = torch.tensor([0.5, 0.3, 0.15, 0.05]), 40_000
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(draws, 3, dtype=torch.float64, generator=generator)
    drawn = verify.without_replacement(q.expand(draws, -1), 3, uniform)
    observed = torch.bincount((drawn * torch.tensor([16, 4, 1])).sum(-1), minlength=64)
    expected = torch.zeros(64, dtype=torch.float64)
    for a, b, c in itertools.permutations(range(4), 3):
        one, two, three = (q[i].item() for i in (a, b, c))
        expected[16 * a + 4 * b + c] = one * two / (1 - one) * three / (1 - one - two)
    assert math.isclose(expected.sum(), 1, abs_tol=1e-6)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    share = expected[possible] / expected.sum() * draws
    assert chisquare(observed[possible].numpy(), share.numpy()).pvalue > FALSE_ALARM


def test_without_replacement_runs_dry():
    """More than q can give: first all it has, each once, then a token that is no longer in q."""
    q = torch.tensor([[0.0, 0.7, 0.3, 0.0, 0.0]]).expand(50, -1)
    uniform = torch.rand(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = verify.without_replacement(q, 4, uniform)
    assert drawn[:, :2].sort(1).values.tolist() == [[1, 2]] * 50
    assert (drawn[:, 2:] == 4).all()


def test_children_of():
    children, widths = verify.children_of([0, 0, 0, 1, 1, 1, 3])
    none = [-1, -1, -1]
    assert children.tolist() == [[1, 2, -1], [3, 4, 5], none, [6, -1, -1], none, none, none]
    assert widths == (2, 3, 1)
    children, widths = verify.children_of([0])
    assert children.shape == (1, 0)
    assert widths == ()


# ── typical acceptance ───────────────────────────────────────────────────────


def slow_typical(p, tokens, parents, epsilon, delta):
    best = [0]
    for node in range(1, len(parents)):
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        good = True
        for above, below in itertools.pairwise(path):
            entropy = -sum(value * math.log(value) for value in p[above] if value > 0)
            good &= p[above][tokens[below]] > min(epsilon, delta * math.exp(-entropy))
        if good and len(path) > len(best):
            best = path
    own = p[best[-1]]
    return len(best) - 1, best, own.index(max(own))


@given(
    parents_of_a_tree(),
    st.integers(0, 10_000),
    st.sampled_from([(0.09, 0.3), (0.5, 0.9), (0.3, 0.5)]),
)
def test_typical_equals_the_rule_path_by_path(parents, seed, thresholds):
    rows, generator = 8, torch.Generator().manual_seed(seed)
    p = distributions(rows, len(parents), generator)
    tokens = torch.randint(VOCAB, (rows, len(parents)), generator=generator)
    tree = torch.tensor(parents)
    ancestors = ancestors_of(tree[None], len(parents))[0]
    count, path, own = verify.typical(p, tokens, tree, ancestors, *thresholds)
    each = verify.typical(
        p, tokens, tree.expand(rows, -1), ancestors.expand(rows, -1, -1), *thresholds
    )
    assert all(torch.equal(*pair) for pair in zip((count, path, own), each, strict=True))
    for row in range(rows):
        expected = slow_typical(p[row].tolist(), tokens[row].tolist(), parents, *thresholds)
        got = path[row, : count[row] + 1].tolist()
        assert (count[row].item(), got, own[row].item()) == expected


@pytest.mark.parametrize(("epsilon", "accepted"), [(0.09, 1), (0.25, 0)])
def test_typical_by_hand(epsilon, accepted):
    """H of (0.6, 0.2, 0.2) is 0.95 nats, 0.3·exp(−H) = 0.116: min(0.09, 0.116) lets 0.2 pass; a
    threshold of min(0.25, 0.9·exp(−H) = 0.348) does not."""
    p = torch.tensor([[[0.6, 0.2, 0.2]] * 2])
    delta = 0.3 if accepted else 0.9
    settings = {"epsilon": epsilon, "delta": delta}
    ancestors = torch.tensor([[True, False], [True, True]])
    parents = torch.tensor([0, 0])
    count, _, own = verify.typical(p, torch.tensor([[0, 2]]), parents, ancestors, **settings)
    assert (count.item(), own.item()) == (accepted, 0)

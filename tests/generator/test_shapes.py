"""The greedy tree is the best one: against every tree there is, on small cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spectrain.generator.shapes import best_tree, expected, sparse_default
from spectrain.heads.tree import TreeShape


def every_tree(ranks: int, depth: int, nodes: int):
    """All sets of `nodes` paths that hold the parent of each of them."""
    paths = [p for d in range(1, depth + 1) for p in itertools.product(range(ranks), repeat=d)]
    for chosen in itertools.combinations(paths, nodes):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield TreeShape(paths=chosen)


def simulated(shape: TreeShape, accepted, rounds: int, random) -> float:
    """Mean tokens per forward when the target's token at each depth is drawn: rank r with
    accepted[k][r], no choice of the head otherwise."""
    total = 0
    for _ in range(rounds):
        path, known = (), set(shape.paths)
        for row in accepted:
            rank = int(np.searchsorted(np.cumsum(row), random.random(), side="right"))
            if (*path, rank) not in known:
                break
            path = (*path, rank)
        total += len(path) + 1
    return total / rounds


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_no_tree_of_that_size_is_better(seed: int, nodes: int):
    """Random chances, of which later ranks may be the greater ones, as measured ones may be."""
    accepted = np.random.default_rng(seed).dirichlet([1.0, 0.6, 0.4], size=3)[:, :2].tolist()
    shape = best_tree(accepted, nodes)
    best = max(expected(each, accepted) for each in every_tree(2, 3, nodes))
    assert shape.nodes == nodes
    assert expected(shape, accepted) == pytest.approx(best, abs=1e-12)


def test_expected_is_the_mean_of_a_simulation():
    """20 000 rounds, a standard error below 0.01: 0.04 is beyond four of them (odds 6e-5)."""
    random = np.random.default_rng(0)
    accepted = [[0.5, 0.2, 0.1], [0.6, 0.1, 0.1], [0.3, 0.3, 0.1]]
    for shape in (TreeShape.chain(3), best_tree(accepted, 7), TreeShape(paths=((1,), (1, 2)))):
        mean = simulated(shape, accepted, 20_000, random)
        assert expected(shape, accepted) == pytest.approx(mean, abs=0.04)


def test_a_chain_by_hand():
    accepted = [[0.5], [0.4]]
    assert expected(TreeShape.chain(0), accepted) == 1
    assert expected(TreeShape.chain(2), accepted) == pytest.approx(1 + 0.5 + 0.2)
    assert expected(TreeShape.chain(3), accepted) == pytest.approx(1 + 0.5 + 0.2)  # not measured


def test_certain_choices_make_a_chain_and_hopeless_ones_nothing():
    """Chances of 1 are equal all the way down: a parent still comes before its child."""
    assert best_tree([[1.0, 0.0]] * 3, 3) == TreeShape.chain(3)
    assert best_tree([[1.0, 0.0]] * 3, 9) == TreeShape.chain(3)  # no node that cannot pay
    assert best_tree([[0.0, 0.0]], 4) == TreeShape.chain(0)
    assert best_tree([], 4) == TreeShape.chain(0)


def test_the_default_keeps_its_bounds():
    """By the assumption a second choice is worth as much as a first one a level deeper; the
    shallower of two equals is taken."""
    assert sparse_default(2, top_k=2, nodes=3).paths == ((0,), (1,), (0, 0))
    shape = sparse_default(4, top_k=3, nodes=64)
    assert (shape.nodes, shape.depth, shape.choices) == (64, 4, 3)
    assert sparse_default(1, top_k=5).paths == ((0,), (1,), (2,), (3,), (4,))

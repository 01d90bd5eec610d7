"""The planner's choice from injected numbers: what it adds up, and when it advises against a head.

No timings: costs are given.
"""

from __future__ import annotations

import itertools

import pytest

from spectrain.evaluation.planner import by_formula, continued, plan
from spectrain.generator.costs import Costs
from spectrain.generator.shapes import best_tree, expected
from spectrain.heads.tree import TreeShape

ACCEPTED = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.4, 0.2, 0.1]]
WIDTHS = range(1, 66)


def costs(verify=lambda n: 10.0, extend=lambda n: 1.0, expand=lambda m: 1.0) -> Costs:
    return Costs(
        dtype="float32",
        device="a machine",
        threads=1,
        batch=1,
        context=8,
        verify={n: verify(n) for n in WIDTHS},
        extend={n: extend(n) for n in WIDTHS},
        expand={m: expand(m) for m in WIDTHS},
    )


def way(found, name):
    (one,) = [each for each in found.ways if each.name == name]
    return one


def test_a_chain_by_hand():
    found = plan(ACCEPTED, costs(verify=lambda n: 9.0 + n), longest=3)
    chain = way(found, "chain 2")
    assert chain.tau == pytest.approx(1 + 0.6 + 0.6 * 0.5)
    assert (chain.draft, chain.verify) == (1 + 1, 9 + 3)
    assert chain.speedup == pytest.approx(1.9 * 10 / 14)
    # The formula: α = 0.6, c = 1 ms / 10 ms, and verifying three tokens costs what one does.
    assert chain.formula == pytest.approx((1 + 0.6 + 0.36) / (2 * 0.1 + 1))
    plain = way(found, "plain")
    assert (plain.tau, plain.draft, plain.speedup, plain.formula) == (1, 0, 1, 1)


def test_the_best_way_is_the_fastest_of_all_chains_and_trees_of_these_sizes():
    """Against every chain and every depth-limited best tree, weighed here once more."""
    prices = costs(verify=lambda n: 8.0 + 2 * n, expand=lambda m: 1 + 0.5 * m)
    found = plan(ACCEPTED, prices, longest=3, nodes=(2, 5, 9))

    def rate(shape):
        return expected(shape, ACCEPTED) / (prices.draft_ms(shape) + prices.verify_ms(shape))

    shapes = [TreeShape.chain(gamma) for gamma in range(4)]
    shapes += [
        best_tree(ACCEPTED[:depth], size)
        for depth, size in itertools.product((1, 2, 3), (2, 5, 9))
        if size <= sum(3**level for level in range(1, depth + 1))
    ]
    assert rate(found.best.shape) == pytest.approx(max(map(rate, shapes)))
    assert found.best.speedup == pytest.approx(rate(found.best.shape) * 10)


def test_a_wide_verification_that_is_free_makes_a_tree_the_choice():
    found = plan(ACCEPTED, costs(extend=lambda n: 0.01, expand=lambda m: 0.01), longest=3)
    assert not found.best.shape.is_chain
    assert found.best.shape.nodes == max(each.shape.nodes for each in found.ways)


@pytest.mark.parametrize(
    "prices",
    [
        costs(verify=lambda n: 10.0 * n),  # every token verified costs a step of its own
        costs(extend=lambda n: 30.0),  # a head slower than its target
    ],
)
def test_where_nothing_pays_plain_decoding_is_the_choice(prices):
    found = plan(ACCEPTED, prices, longest=3)
    assert found.best.plain
    assert found.best.speedup == 1


def test_a_head_that_is_never_right_is_not_used():
    found = plan([[0.0, 0.0]], costs(), longest=2)
    assert found.best.plain
    assert not [each for each in found.ways if each.name.startswith("tree")]


def test_beyond_the_measured_positions_the_last_one_goes_on():
    assert continued([[0.5, 0.1], [0.4, 0.2]], 4) == [[0.5, 0.1]] + [[0.4, 0.2]] * 3
    assert continued([[0.5, 0.1], [0.4, 0.2]], 1) == [[0.5, 0.1]]
    chain = way(plan([[0.5]], costs(), longest=3), "chain 3")
    assert chain.tau == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_tokens_that_are_known_better_than_as_a_product_are_used():
    found = plan(ACCEPTED, costs(), longest=1, nodes=(2,), tau=lambda shape: 3.0 + shape.nodes)
    assert [each.tau for each in found.ways] == [1.0, 4.0, 5.0]


def test_equally_fast_ways_leave_the_smaller_one():
    found = plan(ACCEPTED, costs(expand=lambda m: 0.0), longest=3, nodes=(), tau=lambda shape: 2.0)
    assert found.best.name == "chain 1"


def test_the_formula_at_its_ends():
    assert by_formula(0.0, 4, 0.0) == 1
    assert by_formula(1.0, 4, 0.0) == 5
    assert by_formula(0.5, 0, 0.3) == 1

"""A static tree is what its paths say, and nothing that is no tree is taken."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from spectrain.heads.tree import TreeShape


def test_numbers_of_a_small_tree_by_hand():
    shape = TreeShape(paths=((0, 1), (1,), (0,), (0, 1, 0), (0, 0)))
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1), (0, 1, 0))
    assert (shape.nodes, shape.depth, shape.most_children, shape.choices) == (5, 3, 2, 2)
    assert shape.parents == (0, 0, 0, 1, 1, 4)
    assert shape.ranks == (0, 0, 1, 0, 1, 0)
    assert shape.depths == (0, 1, 1, 2, 2, 3)
    assert shape.levels == ((0,), (1, 2), (3, 4), (5,))
    assert shape.frontiers == ((0,), (1,), (4,))
    assert not shape.is_chain


def test_a_gap_in_the_ranks_needs_more_choices_than_children():
    shape = TreeShape(paths=((0,), (3,)))
    assert (shape.most_children, shape.choices, shape.is_chain) == (2, 4, False)
    assert not TreeShape(paths=((1,),)).is_chain  # one child, but not the first choice


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_a_chain_is_a_tree_of_first_choices(gamma: int):
    shape = TreeShape.chain(gamma)
    assert (shape.nodes, shape.depth, shape.is_chain) == (gamma, gamma, True)
    assert shape.parents == (0, *range(gamma))
    assert shape.levels == tuple((node,) for node in range(gamma + 1))
    assert shape.most_children == shape.choices == min(gamma, 1)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0, 0]], "has no parent"),
        ([[0], [0]], "given twice"),
        ([[]], "no path"),
        ([[0], [-1]], "no path"),
        ([["a"]], "valid integer"),
    ],
)
def test_what_is_no_tree_is_refused(paths: list, message: str):
    with pytest.raises(ValidationError, match=message):
        TreeShape(paths=paths)


def test_json_there_and_back_and_nothing_unknown():
    shape = TreeShape(paths=((0,), (2,), (0, 1)))
    assert TreeShape.from_json(shape.to_json()) == shape
    assert shape.to_json() == '{"paths":[[0],[2],[0,1]]}'
    with pytest.raises(ValidationError, match="extra"):
        TreeShape.from_json('{"paths":[[0]],"name":"mine"}')

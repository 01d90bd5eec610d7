"""Costs: what they add up to for a tree, and that measuring runs for every family. No timings."""

from __future__ import annotations

import pytest
import torch
from head_kinds import KINDS
from pydantic import ValidationError

from spectrain.generator import costs as module
from spectrain.generator.costs import Costs, measure
from spectrain.heads.tree import TreeShape

KNOWN = {"dtype": "float32", "device": "a machine", "threads": 1, "batch": 1, "context": 9}
COSTS = Costs(
    **KNOWN,
    verify={1: 10.0, 4: 16.0, 8: 20.0},
    extend={1: 1.0, 5: 3.0},
    expand={1: 2.0, 4: 5.0},
)


def test_sums_by_hand():
    assert COSTS.draft_ms(TreeShape.chain(0)) == 0  # no head is asked
    assert COSTS.verify_ms(TreeShape.chain(0)) == 10
    assert COSTS.draft_ms(TreeShape.chain(1)) == 1.5  # reads two positions, expands nothing
    assert COSTS.draft_ms(TreeShape.chain(3)) == 2.5 + 2 + 2
    shape = TreeShape(paths=((0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0)))
    assert COSTS.verify_ms(shape) == 20
    # Levels below the root with children: two nodes, then one.
    assert COSTS.draft_ms(shape) == 2.5 + 3 + 2


def test_beyond_what_was_measured_there_is_no_answer():
    with pytest.raises(ValueError, match="width 9 is not between 1 and 8"):
        COSTS.verify_ms(TreeShape.chain(8))


def test_json_there_and_back_and_strict():
    assert Costs.model_validate_json(COSTS.model_dump_json()) == COSTS
    with pytest.raises(ValidationError, match="extra"):
        Costs(**COSTS.model_dump(), more=1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_is_measured_with_its_caches_left_alone(tiny, kind, monkeypatch):
    """What is timed sees the same caches each time: equal logits in each repeat."""
    head = KINDS[kind](tiny, 120)
    seen: dict[tuple, list] = {}

    def keep(logits):
        seen.setdefault((logits.dim(), logits.shape), []).append(logits)

    monkeypatch.setattr(module, "_choose", keep)
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")
    found = measure(tiny, head, 2, 20, (1, 2, 5), 2, (1, 3))
    assert list(found.verify) == [1, 2, 5]
    assert list(found.extend) == list(found.expand) == [1, 3]
    assert min([*found.verify.values(), *found.extend.values(), *found.expand.values()]) > 0
    assert (found.batch, found.context, found.dtype) == (2, 20, "float32")
    assert {shape for dim, shape in seen if dim == 3} >= {(2, 1, head.config.draft_vocab_size)}
    for (dim, _), logits in seen.items():
        if dim == 3:  # children; first guesses of nothing read have no meaning
            assert len(logits) == 3
            assert all(torch.equal(logits[0], each) for each in logits)

"""Where two replies part, and what rounding may excuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spectrain.evaluation.identity import (
    ROUNDING,
    Difference,
    draw_margin,
    first_difference,
    greedy_margin,
    next_logits,
    parted,
)


@pytest.mark.parametrize(
    ("ours", "theirs", "position", "tokens"),
    [
        ([1, 2, 3], [1, 2, 3], None, None),
        ([1, 2, 3], [1, 5, 3], 1, (2, 5)),
        ([1, 2], [1, 2, 3], 2, (None, 3)),
        ([1, 2, 3], [1], 1, (2, None)),
        ([], [4], 0, (None, 4)),
        ([], [], None, None),
    ],
)
def test_where_replies_part(ours, theirs, position, tokens):
    assert first_difference(ours, theirs) == position
    found = parted(7, ours, theirs)
    if position is None:
        assert found is None
    else:
        assert found == Difference(7, position, *tokens)
        assert not found.tolerated, "what was not measured is not excused"


def test_margin_of_greedy_choices():
    """That of the worse token: a third one is no tie, however close the first two are."""
    logits = torch.tensor([-4.0, 1.0, 2.0, 1.99])
    assert greedy_margin(logits, 2, 3) == pytest.approx(0.0025)
    assert greedy_margin(logits, 3, 2) == pytest.approx(0.0025)
    assert greedy_margin(logits, 1, 3) == pytest.approx(0.25)


def test_margin_of_draws():
    p = torch.tensor([0.25, 0.0, 0.5, 0.25])
    assert draw_margin(p, 0.5, 2) == 0
    assert draw_margin(p, 0.2, 2) == pytest.approx(0.05)
    assert draw_margin(p, 0.8, 2) == pytest.approx(0.05)
    assert draw_margin(p, 0.3, 0) == pytest.approx(0.05)
    assert draw_margin(p, 0.3, 1) == pytest.approx(0.05)


def test_bounds():
    found = Difference(0, 3, 5, 6, margin=0.01)
    for dtype, excused in [(torch.float32, False), (torch.bfloat16, True), (torch.float16, False)]:
        assert replace(found, bound=ROUNDING[dtype]).tolerated is excused
    # Float32: not even a tie.
    assert not replace(found, margin=0.0, bound=ROUNDING[torch.float32]).tolerated


def test_logits_of_the_library(tiny):
    texts = torch.randint(3, 380, (3, 5), generator=torch.Generator().manual_seed(1))
    expected = tiny.logits(tiny.forward(texts).last[:, -1])
    got = next_logits(tiny.model.eval(), texts.tolist())
    torch.testing.assert_close(got, expected)

"""Behaviour of a head on replies written now: the same numbers as elsewhere, and what is changed
for a likely cause changes the head's inputs and never the question."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from head_kinds import KINDS

from spectrain.core.batch import counted
from spectrain.data.online import read
from spectrain.evaluation import behaviour
from spectrain.evaluation.behaviour import First
from spectrain.evaluation.causes import causes


@pytest.fixture(scope="module")
def replies(tiny):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 380, (n,), generator=generator) for n in range(4, 14)]
    return behaviour.answered(tiny, prompts, 20)


def test_replies_are_what_the_target_says(tiny, replies):
    """Each reply token is the target's argmax behind all before it, and nothing else is marked."""
    batch = read(tiny, replies, ())
    shown = batch.reply > 0
    assert torch.equal(batch.tokens[:, 1:][shown[:, 1:]], batch.argmax[:, :-1][shown[:, 1:]])
    assert shown.sum(1).max() == 20
    assert not shown[:, :4].any()


@pytest.mark.parametrize("name", KINDS)
def test_position_1_is_that_of_the_evaluation(tiny, replies, name):
    head = KINDS[name](tiny, 120)
    batch = read(tiny, replies, head.needs.aux_layers)
    measured = behaviour.measured(tiny, head, batch, 2, 0)["positions"][0]
    first = behaviour.first(head, batch)
    assert first.value == pytest.approx(measured["conditional"]["value"], abs=1e-12)
    assert first.asked.sum() == measured["anchors"]


def test_a_blind_guess_is_the_most_frequent_token(tiny, replies):
    batch = read(tiny, replies, ())
    wanted = Counter(
        int(batch.argmax[row, place + 1])
        for row, place in counted(batch.reply, 0).nonzero().tolist()
    )
    assert behaviour.blind(batch) == wanted.most_common(1)[0][1] / wanted.total()
    assert behaviour.blind(replace(batch, reply=torch.zeros_like(batch.reply))) is None


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "medusa"])
def test_what_is_tried_asks_the_same(tiny, replies, name):
    head = KINDS[name](tiny, 120)
    batch = read(tiny, replies, head.needs.aux_layers)
    tried = list(causes(tiny, head, batch))
    assert len({cause.name for cause in tried}) == len(tried) >= 4
    for cause in tried:
        assert torch.equal(cause.batch.argmax, batch.argmax)
        assert torch.equal(cause.batch.reply, batch.reply)
        same = [
            torch.equal(getattr(cause.batch, part), getattr(batch, part))
            for part in ("tokens", "last", *(["aux"] if head.needs.aux_layers else []))
        ]
        assert same.count(False) <= 1  # one thing at a time (normed twice is once, where w = 1)


def test_layers_and_states_are_those_that_are_named(tiny, replies):
    head = KINDS["eagle3-two-layers"](tiny, 120)  # reads 1 and 3
    batch = read(tiny, replies, head.needs.aux_layers)
    tried = {cause.name: cause.batch for cause in causes(tiny, head, batch)}
    assert torch.equal(
        tried["the layers read are one too high"].aux, read(tiny, replies, (0, 2)).aux
    )
    assert "the layers read are one too low" not in tried  # the target has no layer 4
    low, high = batch.aux.chunk(2, dim=-1)
    assert torch.equal(
        tried["fc reads the states from high to low"].aux, torch.cat([high, low], -1)
    )
    head = KINDS["medusa"](tiny, 120)
    tried = {cause.name: cause.batch for cause in causes(tiny, head, batch)}
    raw = tried["trained on the last state without the final norm"].last
    assert not torch.allclose(raw, batch.last)
    torch.testing.assert_close(tiny.decoder.norm(raw), batch.last)


@pytest.mark.parametrize(
    ("plain", "changed", "likely"),
    [
        ([0] * 10, [5] * 10, True),
        ([4] * 10, [4] * 10, False),
        ([5] * 10, [4] * 10, False),  # worse
        ([0] * 10, [0] * 9 + [3], False),  # by one reply alone: not sure
        ([90] * 10, [93] * 10, False),  # sure, and too little beside what there is
        ([0] * 4, [50] * 4, False),  # too few replies for an interval
    ],
)
def test_what_counts_as_a_likely_cause(plain, changed, likely):
    """Of 100 asked in each reply."""
    asked = np.full(len(plain), 100.0)
    one, other = (First(np.array(hits, dtype=float), asked) for hits in (plain, changed))
    assert behaviour.lifts(one, behaviour.lift(one, other, 0)) is likely


@pytest.mark.parametrize(
    ("plain", "fed", "leaked"),
    [
        (5, 95, True),
        (25, 39, False),  # lifted, as is all that repeats its input
        (50, 100, False),  # it guesses without
        (5, 80, False),
    ],
)
def test_what_only_a_head_does_that_learnt_with_the_answer(plain, fed, leaked):
    """Of 100 asked in each reply, where a blind guess has 0.04."""
    one, other = (First(np.full(10, float(hits)), np.full(10, 100.0)) for hits in (plain, fed))
    assert behaviour.leaked(one, other, 0.04) is leaked


def test_least_is_above_a_blind_guess():
    assert behaviour.least(0.0) == pytest.approx(0.05)
    assert behaviour.least(0.5) == pytest.approx(0.525)

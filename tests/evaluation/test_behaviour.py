"""Behaviour of a head on replies written now: the same numbers as elsewhere, and what is changed
for a likely cause changes the head's inputs and never the question."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from head_kinds import KINDS

from spectrain.core.batch import counted
from spectrain.data.online import read
from spectrain.evaluation import behaviour
from spectrain.evaluation.behaviour import Seen
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
def test_positions_are_those_of_the_evaluation(tiny, replies, name):
    head = KINDS[name](tiny, 120)
    batch = read(tiny, replies, head.needs.aux_layers)
    measured = behaviour.measured(tiny, head, batch, 2, 0)["positions"]
    seen = behaviour.seen(head, batch, 2)
    for one, row in zip(seen, measured, strict=True):
        assert one.asked.sum() == row["reached"]
        assert one.value == pytest.approx(row["conditional"]["value"], abs=1e-12)
        assert one.broken == 0
    assert seen[0].asked.sum() == measured[0]["anchors"]


def test_later_positions_are_those_of_the_evaluation(tables):
    """Of a head that resembles its target, so that many drafts go on."""
    target, head = tables.make(1, likeness=0.9)
    batch = tables.batch_of(target, greedy(tables, target))
    measured = behaviour.measured(target, head, batch, 3, 0)["positions"]
    for one, row in zip(behaviour.seen(head, batch, 3), measured, strict=True):
        assert one.asked.sum() == row["reached"] > 20
        assert one.value == pytest.approx(row["conditional"]["value"], abs=1e-12)


def test_a_blind_guess_is_the_most_frequent_token(tiny, replies):
    batch = read(tiny, replies, ())
    wanted = Counter(
        int(batch.argmax[row, place + 1])
        for row, place in counted(batch.reply, 0).nonzero().tolist()
    )
    head = KINDS["medusa"](tiny, 120)
    (seen,) = behaviour.seen(head, batch)
    assert seen.blind_value == wanted.most_common(1)[0][1] / wanted.total()
    (seen,) = behaviour.seen(head, replace(batch, reply=torch.zeros_like(batch.reply)))
    assert seen.blind_value is None
    assert behaviour.knows(seen, behaviour.over_blind(seen, 0)) is None


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


def test_a_state_normed_twice(monkeypatch, tiny, replies):
    """By the target's norm, whose weights are ones in a new target and change nothing then."""
    weight = torch.linspace(0.5, 2.0, tiny.hidden_size)
    monkeypatch.setitem(tiny.decoder.norm._parameters, "weight", torch.nn.Parameter(weight))
    batch = read(tiny, replies, ())
    (twice,) = (c for c in causes(tiny, KINDS["eagle1"](tiny, 120), batch) if "twice" in c.name)
    raw = next(c for c in causes(tiny, KINDS["eagle1"](tiny, 120), batch) if "without" in c.name)
    eps = tiny.config.rms_norm_eps

    def norm(state):
        return weight * state / (state.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    torch.testing.assert_close(twice.batch.last, norm(norm(raw.batch.last)))
    assert not torch.allclose(twice.batch.last, batch.last, rtol=0.1)


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
    one, other = (Seen(np.array(hits, dtype=float), asked, 0 * asked) for hits in (plain, changed))
    assert behaviour.lifts(one, behaviour.lift(one, other, 0)) is likely


# ── does it know more than a blind guess? ────────────────────────────────────


def greedy(tables, target, conversations=20, length=30, seed=0):
    """What a table says, so that its replies hold few different tokens."""
    rows = tables.random_rows(seed, target.vocab_size, [(3, length)] * conversations)
    for tokens, numbers in rows:
        for place in range(1, len(tokens)):
            if numbers[place]:
                tokens[place] = int(target.table[tokens[place - 1]].argmax())
    return rows


def lopsided(tables, seed, share=0.7):
    """Texts in which one token of 12 has this share, at random places of random conversations."""
    random = np.random.default_rng(seed)
    rows = tables.random_rows(seed, 12, [(3, int(n)) for n in random.integers(15, 45, size=12)])
    for tokens, _ in rows:
        part = np.clip(random.normal(share, 0.25), 0, 1)  # replies differ
        for place in np.flatnonzero(random.random(len(tokens)) < part):
            tokens[place] = 5
    return rows


def judged(tables, seed, change, rows=slice(None), share=0.7):
    """What is said of a head that `change` made of one that knows `target`: the next token is the
    text's, as if the target had written it."""
    target, head = tables.make(seed, vocab=12, steps=1)
    batch = tables.batch_of(target, lopsided(tables, seed, share)[rows])
    following = batch.tokens.roll(-1, dims=1)
    batch = replace(batch, argmax=torch.where(batch.argmax >= 0, following, -1))
    change(head, batch, torch.Generator().manual_seed(seed))
    (seen,) = behaviour.seen(head, batch)
    return behaviour.knows(seen, behaviour.over_blind(seen, 0)), seen


def constant(head, batch, generator, token=5):
    head.own, head.anchor = torch.zeros_like(head.own), torch.zeros_like(head.anchor)
    head.anchor[:, token] = 1


def noise(head, batch, generator):
    """Other tables have nothing to do with the text."""
    head.own = torch.randn(head.own.shape, generator=generator)


def partly(part):
    """A head that knows this part of the answers and else guesses the most frequent token."""

    def change(head, batch, generator):
        constant(head, batch, generator)
        told = torch.rand(batch.tokens.numel(), generator=generator) < part
        plain = head.logits

        def unroll(batch, steps):
            for step in type(head).unroll(head, batch, steps):
                wanted = batch.argmax.flatten()[step.anchors + 1]
                hidden = step.hidden.clone()
                hidden[told[step.anchors], wanted[told[step.anchors]]] = 9
                yield replace(step, hidden=hidden)

        head.unroll, head.logits = unroll, plain

    return change


@pytest.mark.parametrize("share", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("seed", range(8))
def test_a_head_that_knows_nothing_never_passes(tables, seed, share):
    """However often its one token is right, and however few the replies are."""
    for change in (constant, noise, partial(constant, token=3)):
        for rows in (slice(None), slice(3)):
            verdict, _ = judged(tables, seed, change, rows, share)
            assert verdict is (False if rows == slice(None) else None)


def test_a_head_that_knows_passes_whatever_the_share(tables):
    """What it knows is all that it has over a blind guess; 8 seeds each."""
    verdicts = {
        part: [judged(tables, seed, partly(part))[0] for seed in range(8)]
        for part in (0.0, 0.1, 0.5, 1.0)
    }
    assert verdicts[0.0] == [False] * 8
    assert False not in verdicts[0.1]
    assert verdicts[0.5] == verdicts[1.0] == [True] * 8


def test_one_token_alone_tells_nothing(tables):
    """Where every reply is of one token, whoever guesses it is right."""
    verdict, seen = judged(tables, 0, constant, share=2.0)
    assert seen.value == seen.blind_value == 1
    assert verdict is None


def test_logits_that_are_no_numbers_are_counted(tables):
    def spoil(head, batch, generator):
        head.own[0, 5, 1] = float("nan")
        head.own[0, 5, 2] = float("-inf")

    _, seen = judged(tables, 0, spoil)
    # The reply's first token, behind three of the prompt, is fed first; its last one only guessed.
    fed = sum(t == 5 for tokens, _ in lopsided(tables, 0) for t in tokens[3:-1])
    assert 0 < seen.broken == fed < seen.asked.sum()


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
    hundred = np.full(10, 100.0)
    one, other = (Seen(np.full(10, float(n)), hundred, hundred * 0.04) for n in (plain, fed))
    assert behaviour.leaked(one, other, 0) is leaked

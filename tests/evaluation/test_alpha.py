"""The fast path against a slow and obvious one, and what must not change it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from spectrain.core.batch import predicting
from spectrain.evaluation.alpha import acceptance
from spectrain.evaluation.summary import Conversation, summarise

SHAPES = [(2, 6), (1, 1, 2, 5), (3, 2, 1, 4, 1, 3), (0, 4), (2, 3, 0, 3), (4, 1)]


def softmax(values):
    exps = [math.exp(value - max(values)) for value in values]
    return [value / sum(exps) for value in exps]


def slow_reply(target, head, tokens, start, stop, steps, temperature):
    """beta and kept of one reply tokens[start:stop] as {(anchor, step): value}, by the book."""
    beta, kept = {}, {}
    for t in range(max(start - 1, 0), stop - 1):
        for k in range(steps):
            u = t + 1 + k
            if u + 1 >= stop:
                continue
            p_logits = target.table[tokens[u]].tolist()
            raw = head.draft_logits(tokens[t + 1], tokens[u], k).tolist()
            x = tokens[u + 1]
            if temperature == 0:
                choice = head.ids[int(np.argmax(raw))].item()
                best = int(np.argmax(p_logits))
                beta[t, k] = float(choice == best)
                kept[t, k] = float(choice == best == x)
                continue
            p = softmax([value / temperature for value in p_logits])
            q = [0.0] * len(p)
            for token, value in zip(
                head.ids.tolist(), softmax([v / temperature for v in raw]), strict=True
            ):
                q[token] = value
            beta[t, k] = sum(min(a, b) for a, b in zip(p, q, strict=True))
            kept[t, k] = min(1.0, q[x] / p[x])
    return beta, kept


def slow_ranks(target, head, tokens, start, stop, steps):
    """{(anchor, step): rank}: how many tokens the head prefers to the target's argmax, −1 where
    the head cannot guess it."""
    ranks = {}
    for t in range(max(start - 1, 0), stop - 1):
        for k in range(steps):
            u = t + 1 + k
            if u + 1 < stop:
                best = int(np.argmax(target.table[tokens[u]].tolist()))
                raw = head.draft_logits(tokens[t + 1], tokens[u], k).tolist()
                order = sorted(range(len(raw)), key=lambda i: -raw[i])  # stable
                ids = [head.ids[i].item() for i in order]
                ranks[t, k] = ids.index(best) if best in ids else -1
    return ranks


def slow_forwards(kept, anchor, end, gamma):
    """Expected forwards from an anchor on, as a plain recursion over what can happen next."""
    if anchor >= end:
        return 0.0
    total, reached = 1.0, 1.0
    for k in range(gamma):
        chance = kept.get((anchor, k), 0.0)
        total += reached * (1 - chance) * slow_forwards(kept, anchor + k + 1, end, gamma)
        reached *= chance
    return total + reached * slow_forwards(kept, anchor + gamma + 1, end, gamma)


def replies_of(numbers):
    """[(start, stop)] of the replies in a row that hold an anchor: x[t+1] and x[t+2], t ≥ 0."""
    spans = []
    for number in sorted(set(numbers) - {0}):
        places = [i for i, n in enumerate(numbers) if n == number]
        start, stop = places[0], places[-1] + 1
        if max(start, 1) + 1 < stop:
            spans.append((start, stop))
    return spans


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("draft_ids", [None, [0, 2, 3, 5], [5, 1, 3]])
def test_equals_the_slow_reference(tables, temperature, draft_ids):
    """Every number of the summary, from loops that use nothing of ours but the tables."""
    steps = 4
    target, head = tables.make(seed=3, steps=steps, draft_ids=draft_ids)
    rows = tables.random_rows(1, target.vocab_size, SHAPES)
    (fast,) = acceptance(target, head, tables.batch_of(target, rows), steps, [temperature])
    sums = {name: [0.0] * steps for name in ("anchors", "beta", "reached", "both", "forwards")}
    tokens = 0
    for (row, numbers), replies in zip(rows, fast, strict=True):
        spans = replies_of(numbers)
        assert len(replies) == len(spans)
        for (start, stop), reply in zip(spans, replies, strict=True):
            beta, kept = slow_reply(target, head, row, start, stop, steps, temperature)
            first = max(start - 1, 0)
            for (t, k), value in beta.items():
                assert reply.beta[t - first, k] == pytest.approx(value, abs=1e-6)
                assert reply.kept[t - first, k] == pytest.approx(kept[t, k], abs=1e-6)
                weight = math.prod(kept[t, j] for j in range(k))
                sums["anchors"][k] += 1
                sums["beta"][k] += value
                sums["reached"][k] += weight
                sums["both"][k] += weight * value
            tokens += stop - 2 - first
            for g in range(steps):
                sums["forwards"][g] += slow_forwards(kept, first, stop - 2, g + 1)
    summary = summarise([Conversation("a", replies) for replies in fast], steps, seed=0)
    joint = 1.0
    for k, row in enumerate(summary["positions"]):
        assert row["anchors"] == sums["anchors"][k]
        assert row["marginal"]["value"] == pytest.approx(sums["beta"][k] / sums["anchors"][k])
        if sums["reached"][k]:
            conditional = sums["both"][k] / sums["reached"][k]
            assert row["conditional"]["value"] == pytest.approx(conditional)
            joint *= conditional
            assert row["joint"]["value"] == pytest.approx(joint)
    assert summary["tokens"] == tokens
    for g, row in enumerate(summary["tau"]):
        assert row["forwards"] == pytest.approx(sums["forwards"][g])
        assert row["value"] == pytest.approx(tokens / sums["forwards"][g])
        assert sum(row["runs"]) == pytest.approx(row["forwards"])


@pytest.mark.parametrize("draft_ids", [None, [0, 2, 3, 5]])
def test_ranks_equal_the_slow_reference(tables, draft_ids):
    """At temperature 0 alone, and a first choice is what `beta` calls an acceptance."""
    steps = 4
    target, head = tables.make(seed=3, steps=steps, draft_ids=draft_ids, likeness=0.5)
    rows = tables.random_rows(1, target.vocab_size, SHAPES)
    batch = tables.batch_of(target, rows)
    sampled, greedy = acceptance(target, head, batch, steps, [1.0, 0.0])
    assert all(reply.ranks is None for replies in sampled for reply in replies)
    seen = set()
    for (row, numbers), replies in zip(rows, greedy, strict=True):
        for (start, stop), reply in zip(replies_of(numbers), replies, strict=True):
            slow = slow_ranks(target, head, row, start, stop, steps)
            expected = np.full(reply.beta.shape, -1)
            for (t, k), rank in slow.items():
                expected[t - max(start - 1, 0), k] = rank
            assert (reply.ranks == expected).all()
            assert ((reply.ranks == 0) == (reply.beta == 1)).all()
            seen |= set(slow.values())
    assert len(seen) > 3  # not the first choice only


def test_of_equal_logits_the_first_is_the_choice(tables):
    """argmax takes the lower id, so does the rank: a tie is one choice, not two."""
    target, head = tables.make(vocab=4, steps=1)
    target.table[:] = torch.tensor([0.0, 0.0, 1.0, 0.0])
    head.own.zero_(), head.anchor.zero_()
    batch = tables.batch_of(target, [([1, 1, 1, 1], [1, 1, 1, 1])])
    (((reply,),),) = acceptance(target, head, batch, 1, [0.0])
    assert reply.ranks.tolist() == [[2], [2]]


def test_a_token_the_head_cannot_guess_is_a_rejection(tables):
    """The target always says 6, the head is certain of 5, its best guess without 6: nothing fits,
    and every anchor still counts."""
    table = torch.zeros(7, 7)
    table[:, 6], table[:, 5] = 20.0, 10.0
    target = tables.Target(table)
    ids = torch.arange(6)
    head = tables.Head(table[None, :, :6].repeat(2, 1, 1), torch.zeros(7, 6), ids)
    batch = tables.batch_of(target, [([0, 0, 6, 6, 6, 6], [0, 1, 1, 1, 1, 1])])
    for (replies,) in acceptance(target, head, batch, 2, [0.0, 1.0]):
        assert replies[0].beta.max() < 1e-4
        assert replies[0].kept.max() == 0
        summary = summarise([Conversation("a", replies)], 2, seed=0)
        assert [row["anchors"] for row in summary["positions"]] == [4, 3]
        assert summary["tau"][1]["value"] == 1


def test_p_keeps_its_full_normalisation(tables):
    """Half of p lies outside the draft vocabulary, q is like p inside: Σ min(p, q) is ½, not 1."""
    target = tables.Target(torch.zeros(8, 8))
    head = tables.Head(torch.zeros(1, 8, 4), torch.zeros(8, 4), torch.tensor([0, 2, 4, 6]))
    batch = tables.batch_of(target, [([0, 1, 2, 3], [0, 1, 1, 1])])
    ((replies,),) = acceptance(target, head, batch, 1, [1.0])
    assert replies[0].beta[:, 0] == pytest.approx([0.5, 0.5])


def test_known_independent_acceptance(tables):
    """p uniform over 4 tokens, q uniform over 2 of them: every draft is accepted with chance ½
    whatever came before, so conditional = ½, joint = ½^k and τ = (1 − ½^(γ+1)) / ½.

    τ is over 40 replies of 200 tokens: its standard error is 0.012, the end of a reply costs less
    than 0.01; the tolerance of 0.07 is five of them.
    """
    steps = 4
    target = tables.Target(torch.zeros(4, 4))
    head = tables.Head(torch.zeros(steps, 4, 2), torch.zeros(4, 2), torch.tensor([1, 3]))
    rows = tables.random_rows(5, 4, [(1, 200)] * 40)
    (found,) = acceptance(target, head, tables.batch_of(target, rows), steps, [1.0])
    summary = summarise([Conversation("a", replies) for replies in found], steps, seed=0)
    for k, row in enumerate(summary["positions"]):
        assert row["marginal"]["value"] == pytest.approx(0.5)
        assert row["conditional"]["value"] == pytest.approx(0.5)
        assert row["joint"]["value"] == pytest.approx(0.5 ** (k + 1))
    for row in summary["tau"]:
        ideal = (1 - 0.5 ** (row["draft"] + 1)) / 0.5
        assert row["value"] == pytest.approx(ideal, abs=0.07)


@pytest.mark.parametrize("pad", [0, 1, 9])
def test_padding_and_batching_change_nothing(tables, pad):
    """Rows alone, together and padded give the same acceptances: no position sees another row."""
    target, head = tables.make(seed=2, draft_ids=[1, 2, 4, 6])
    rows = tables.random_rows(3, target.vocab_size, SHAPES)
    together = acceptance(target, head, tables.batch_of(target, rows, pad), 3, [0.0, 0.8])
    for place, row in enumerate(rows):
        alone = acceptance(target, head, tables.batch_of(target, [row]), 3, [0.0, 0.8])
        for whole, single in zip(together, alone, strict=True):
            assert len(whole[place]) == len(single[0])
            for left, right in zip(whole[place], single[0], strict=True):
                np.testing.assert_allclose(left.beta, right.beta, atol=1e-6)
                np.testing.assert_allclose(left.kept, right.kept, atol=1e-6)


def test_the_argmax_is_the_captured_one(tables):
    """A store rounds the states: 20.03 and 20 are one number in bfloat16. At temperature 0 the
    target's choice is what it was before that; where it is not known, the state has to do."""
    table = torch.zeros(4, 4)
    table[:, 1], table[:, 2] = 20.0, 20.03
    target = tables.Target(table)
    head = tables.Head(table[None], torch.zeros(4, 4), torch.arange(4))
    batch = tables.batch_of(target, [([0, 2, 2, 2], [0, 1, 1, 1])])
    batch.last = batch.last.bfloat16().float()
    ((replies,),) = acceptance(target, head, batch, 1, [0.0])
    assert replies[0].beta.min() == replies[0].kept.min() == 1
    batch.argmax.fill_(-1)
    ((replies,),) = acceptance(target, head, batch, 1, [0.0])
    assert replies[0].beta.max() == 0


def test_greedy_alone_asks_the_target_nothing_that_it_has_said(tables):
    """Where every choice is known no logits are made, and the numbers are those of the long way."""
    target, head = tables.make(seed=5)
    batch = tables.batch_of(target, tables.random_rows(3, target.vocab_size, SHAPES))
    batch.argmax = torch.where(predicting(batch.reply), target.logits(batch.last).argmax(-1), -1)
    expected = acceptance(target, head, batch, 3, [0.0, 1.0])[0]
    target.logits = None
    for left, right in zip(expected, acceptance(target, head, batch, 3, [0.0])[0], strict=True):
        for a, b in zip(left, right, strict=True):
            for name in ("beta", "kept", "ranks"):
                assert np.array_equal(getattr(a, name), getattr(b, name))


def test_chunks_change_nothing(tables, monkeypatch):
    """Logits are made some rows at a time; how many does not matter."""
    target, head = tables.make(seed=4)
    batch = tables.batch_of(target, tables.random_rows(3, target.vocab_size, SHAPES))
    whole = acceptance(target, head, batch, 3, [1.0])
    monkeypatch.setattr("spectrain.evaluation.alpha._CHUNK", 2 * target.vocab_size)
    for left, right in zip(whole[0], acceptance(target, head, batch, 3, [1.0])[0], strict=True):
        for a, b in zip(left, right, strict=True):
            np.testing.assert_allclose(a.beta, b.beta, atol=1e-6)


def test_a_text_that_is_not_greedy_at_temperature_0(tables):
    """Head = target: every draft is the argmax, so beta is 1 everywhere; but where the text went
    on with another token the anchor leaves the set, and the run ends there."""
    table = torch.eye(3).roll(1, dims=1) * 5  # 0 → 1 → 2 → 0
    target = tables.Target(table)
    head = tables.Head(table[None].repeat(3, 1, 1), torch.zeros(3, 3), torch.arange(3))
    batch = tables.batch_of(target, [([0, 1, 2, 0, 0, 1, 2], [0, 1, 1, 1, 1, 1, 1])])
    ((replies,),) = acceptance(target, head, batch, 3, [0.0])
    summary = summarise([Conversation("a", replies)], 3, seed=0)
    assert [row["joint"]["value"] for row in summary["positions"]] == [1, 1, 1]
    assert summary["positions"][1]["reached"] < summary["positions"][1]["anchors"]
    # γ = 3: 1 → [2, 0, own 0]; 0 → [1, 2] and the end: two forwards for five tokens.
    assert summary["tau"][2]["value"] == pytest.approx(5 / 2)

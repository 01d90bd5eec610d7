"""The walk through a known text against decoding that really happens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectrain.evaluation.alpha import acceptance
from spectrain.evaluation.walk import walk

END = 0


def distributions(target, head, temperature):
    """p [V, V] by last token; q [K, V (first fed), V (last fed), V] over target ids."""
    p = torch.softmax(target.table / temperature, dim=-1).double().numpy()
    logits = head.own[:, None] + head.anchor[None, :, None]
    inside = torch.softmax(logits / temperature, dim=-1).double()
    q = torch.zeros(*logits.shape[:3], target.vocab_size, dtype=torch.float64)
    q[..., head.ids] = inside
    return p / p.sum(-1, keepdims=True), (q / q.sum(-1, keepdim=True)).numpy()


def speculate(p, q, first, gamma, limit, random):
    """The lossless rule, token by token. Returns the reply (its first token given) and the runs."""
    vocab, text, runs = len(p), [first], []

    def draw(weights):
        return int(random.choice(vocab, p=weights / weights.sum()))

    def done():
        return text[-1] == END or len(text) >= limit

    while not done():
        start, run = text[-1], 0
        for k in range(gamma):
            fed = text[-1]
            draft = draw(q[k, start, fed])
            if random.random() < min(1.0, p[fed, draft] / q[k, start, fed, draft]):
                text.append(draft)
                run += 1
                if done():
                    break
            else:
                text.append(draw(np.maximum(0, p[fed] - q[k, start, fed])))
                break
        else:
            text.append(draw(p[text[-1]]))
        runs.append(run)
    return text, runs


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_expectation_equals_decoding_by_the_lossless_rule(tables, gamma):
    """Forwards and run counts of real decodings, minus what the walk expects for the very text that
    came out, have mean zero. 1500 replies; |z| < 4.5 for each of γ+2 sums, which a right program
    misses with chance < 1e-5 each (and the seed is fixed)."""
    target, head = tables.make(seed=11, steps=4, draft_ids=[0, 1, 3, 4, 6], likeness=0.8, scale=1.2)
    temperature, limit, count = 0.9, 14, 1500
    p, q = distributions(target, head, temperature)
    random = np.random.default_rng(5)
    results = [speculate(p, q, 1 + n % 6, gamma, limit, random) for n in range(count)]
    rows = [([2, *text], [0] + [1] * len(text)) for text, _ in results]
    (found,) = acceptance(target, head, tables.batch_of(target, rows), 4, [temperature])
    actual = np.zeros((count, gamma + 2))
    expected = np.zeros_like(actual)
    for n, ((text, runs), replies) in enumerate(zip(results, found, strict=True)):
        actual[n, 0] = len(runs)
        actual[n, 1:] = np.bincount(runs, minlength=gamma + 1)
        path = walk(replies[0].kept)
        assert len(replies[0].kept) == len(text) - 1
        expected[n, 0] = path.forwards[gamma - 1]
        expected[n, 1:] = path.runs[gamma - 1, : gamma + 1]
    gap = actual - expected
    z = gap.sum(0) / np.sqrt((gap**2).sum(0))
    assert np.abs(z).max() < 4.5
    # The test has teeth: the sums are known to within a few percent.
    assert np.sqrt((gap**2).sum(0))[0] < 0.02 * actual[:, 0].sum()


def greedy_speculation(target, head, first, gamma, limit):
    """Greedy drafts and a greedy target. Returns the reply and the runs."""
    best = target.table.argmax(-1).tolist()
    text, runs = [first], []
    while text[-1] != END and len(text) < limit:
        drafts, start = [], text[-1]
        for k in range(gamma):
            fed = drafts[-1] if drafts else start
            drafts.append(int(head.ids[head.draft_logits(start, fed, k).argmax()]))
        own, committed = best[start], []
        for draft in drafts:
            if draft != own:
                break
            committed.append(draft)
            own = best[draft]
        run = len(committed)
        added = 0
        for token in [*committed, own]:
            text.append(token)
            added += 1
            if token == END or len(text) >= limit:
                break
        runs.append(min(run, added))
    return text, runs


@pytest.mark.parametrize("seed", range(6))
def test_greedy_walk_is_the_one_that_happens(tables, seed):
    """At temperature 0 forwards and runs are whole numbers, equal to a real loop's for every γ."""
    target, head = tables.make(seed=seed, vocab=40, steps=5, draft_ids=list(range(36)))
    accepted = 0
    for first in range(1, 12):
        texts = []
        for gamma in range(1, 6):
            text, runs = greedy_speculation(target, head, first, gamma, limit=25)
            texts.append(text)
            batch = tables.batch_of(target, [([7, *text], [0] + [1] * len(text))])
            ((replies,),) = acceptance(target, head, batch, 5, [0.0])
            path = walk(replies[0].kept)
            accepted += sum(runs)
            assert path.forwards[gamma - 1] == len(runs)
            assert path.runs[gamma - 1].tolist() == np.bincount(runs, minlength=6).tolist()
        assert all(text == texts[0] for text in texts)  # greedy output does not depend on γ
    assert accepted > 50


def test_all_kept_and_none_kept():
    """7 tokens to commit, γ = 3: 4 + 3 in two forwards; nothing kept: one each."""
    inside = np.arange(7)[:, None] + np.arange(3)[None] < 7
    assert walk(inside.astype(float)).forwards.tolist() == [4, 3, 2]
    assert walk(inside * 0.0).forwards.tolist() == [7, 7, 7]


def test_every_walk_commits_the_whole_reply():
    """Σ (run + 1) over forwards equals the tokens, but for an accepted last token's own."""
    random = np.random.default_rng(0)
    inside = np.arange(20)[:, None] + np.arange(4)[None] < 20
    kept = random.random((20, 4)) * inside
    path = walk(kept)
    committed = (path.runs * np.arange(1, 6)).sum(1)
    # At most one forward, the last, commits one token less than its run + 1.
    assert np.all(committed >= 20)
    assert np.all(committed <= 21)

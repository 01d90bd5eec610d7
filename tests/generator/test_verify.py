"""Lossless verification: exact distributions on tiny vocabularies, tested by chi-square."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from spectrain.generator import verify
from spectrain.generator.sampling import draw

# Every chi-square below fails a correct rule once in 10,000 seeds; the seeds are fixed.
FALSE_ALARM = 1e-4


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_greedy_accepts_the_leading_run(drafts, choices):
    choices = choices[: len(drafts) + 1]
    logits = torch.nn.functional.one_hot(torch.tensor([choices]), 3).float()
    accepted, following = verify.greedy(logits, torch.tensor([drafts]))
    expected = 0
    while expected < len(drafts) and drafts[expected] == choices[expected]:
        expected += 1
    assert accepted.tolist() == [expected]
    assert following.tolist() == [choices[expected]]


def chain(seed: int, vocab: int) -> torch.Tensor:
    """Next-token distributions [vocab + 1, vocab] given the previous token (row `vocab`: none)."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(vocab + 1, vocab, generator=generator) * 1.5).softmax(-1)


@pytest.mark.parametrize("case", ["close", "far", "reduced", "equal"])
def test_sampling_leaves_the_sequence_distribution(case):
    """Speculative text of 3 tokens is distributed as the target's own; vocabulary 4, γ = 2."""
    vocab, gamma, draws = 4, 2, 60_000
    p_next = chain(1, vocab)
    q_next = {"close": p_next * 0.7 + 0.3 / vocab, "equal": p_next}.get(case, chain(2, vocab))
    if case == "reduced":  # the head cannot guess token 3 at all
        q_next = q_next.clone()
        q_next[:, 3] = 0
        q_next = q_next / q_next.sum(-1, keepdim=True)
    generator = torch.Generator().manual_seed(7)
    previous = torch.full((draws,), vocab)
    # Prefill: the first token is the target's own.
    previous = draw(p_next[previous], generator)
    rows = [[int(token)] for token in previous]
    while min(map(len, rows)) < 3:
        drafts, q = [], []
        last = previous
        for _ in range(gamma):
            q.append(q_next[last])
            last = draw(q_next[last], generator)
            drafts.append(last)
        drafts = torch.stack(drafts, 1)
        context = torch.cat([previous[:, None], drafts], dim=1)
        accepted, following = verify.sampling(p_next[context], torch.stack(q, 1), drafts, generator)
        for row, guesses, count, own in zip(
            rows, drafts.tolist(), accepted.tolist(), following.tolist(), strict=True
        ):
            row.extend([*guesses[:count], own])
        previous = following
    text = torch.tensor([row[:3] for row in rows])
    index = (text * torch.tensor([vocab**2, vocab, 1])).sum(-1)
    observed = torch.bincount(index, minlength=vocab**3)
    first = p_next[vocab]
    joint = first[:, None, None] * p_next[:vocab, :, None] * p_next[:vocab][None]
    expected = joint.flatten().double() / joint.double().sum() * draws
    assert expected.min() > 5
    assert chisquare(observed.numpy(), expected.numpy()).pvalue > FALSE_ALARM
    if case == "far":  # the test has teeth: the draft's own distribution is told apart
        wrong = q_next[vocab][:, None, None] * q_next[:vocab, :, None] * q_next[:vocab][None]
        wrong = wrong.flatten().double() / wrong.double().sum() * draws
        assert chisquare(observed.numpy(), wrong.numpy()).pvalue < 1e-12


def test_acceptance_rate_is_one_minus_total_variation():
    """β = Σ min(p, q): 200,000 draws, 5 standard errors (odds of a false alarm below 1e-6)."""
    p, q = chain(3, 5)[:1], chain(4, 5)[:1]
    draws = 200_000
    generator = torch.Generator().manual_seed(0)
    drafts = draw(q.expand(draws, -1), generator)[:, None]
    accepted, _ = verify.sampling(p.expand(draws, 2, -1), q.expand(draws, 1, -1), drafts, generator)
    beta = torch.minimum(p, q).sum().item()
    error = (beta * (1 - beta) / draws) ** 0.5
    assert abs(accepted.float().mean().item() - beta) < 5 * error

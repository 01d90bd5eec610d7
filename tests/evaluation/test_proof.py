"""The statistics of `check`: right odds of a false alarm, stated power; the self-test sees faults.

Seeds are fixed; odds in the docstrings are those of other seeds.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chisquare
from wrong_engines import (
    accepts_one_too_many,
    does_not_subtract_q,
    keeps_the_draft_s_token,
    reuses_its_random_numbers,
)

from spectrain.evaluation.lossless import sampling_exact
from spectrain.evaluation.proof import Fit, _groups, chi_square_tail, fit
from spectrain.evaluation.toy import LENGTH, PROMPT, VOCAB, WARPS, ToyTarget, exact
from spectrain.generator.rules import Typical
from spectrain.generator.sampling import Sampling


@pytest.mark.parametrize("freedom", [1, 7, 60.5, 300])
@pytest.mark.parametrize("times", [0.3, 1.0, 2.0, 4.0])
def test_tail(freedom, times):
    expected = chi2.sf(times * freedom, freedom)
    assert chi_square_tail(times * freedom, freedom) == pytest.approx(expected, rel=1e-6)


def test_fit_by_hand():
    """Two frequent outcomes; three rare ones, which count as one."""
    p = torch.tensor([0.5, 0.3, 0.08, 0.08, 0.04, 0.0])
    found = fit(torch.tensor([30, 14, 2, 4, 0, 0]), p)
    assert found.statistic == pytest.approx(chisquare([30, 14, 6], [25, 15, 10]).statistic)
    assert (found.mean, found.draws, found.impossible) == (2, 50, 0)


@pytest.mark.parametrize("n", [3, 11, 60, 1000])
def test_groups_of_rare_outcomes(n):
    """Each is expected five times or more, and none is so large that it could be two."""
    random = torch.Generator().manual_seed(n)
    for outcomes in (1, 2, 9, 300):
        p = torch.rand(outcomes, generator=random, dtype=torch.float64) ** 4
        expected = (n * p / p.sum()).sort(descending=True).values
        groups = _groups(expected)
        sums = torch.zeros(int(groups[-1]) + 1, dtype=torch.float64).index_add(0, groups, expected)
        assert len(sums) == 1 or sums.min() >= 5
        assert float(sums.sum()) == pytest.approx(n)
        sizes = torch.bincount(groups)
        assert sizes.min() >= 1
        assert (sums[sizes > 1] < 5 + 15 + 5).all() or len(sums) == 1


def test_flat_probabilities_have_groups():
    """Each of 300 outcomes is rare; that only one of them comes is seen."""
    counts = torch.zeros(300)
    counts[7] = 60
    found = fit(counts, torch.linspace(1.1, 1.0, 300))
    assert found.p_value < 1e-10


def test_what_cannot_be_weighs_all():
    found = fit(torch.tensor([5, 5, 1]), torch.tensor([0.5, 0.5, 0.0]))
    assert (found.impossible, found.p_value) == (1, 0.0)
    # Also where there is nothing to compare, and when put together with what fits.
    sure = fit(torch.tensor([0, 1]), torch.tensor([1.0, 0.0]))
    assert Fit.together([sure, fit(torch.tensor([50, 50]), torch.ones(2))]).p_value == 0.0


def test_nothing_to_compare_says_nothing():
    for counts, p in [([7, 0], [1.0, 0.0]), ([3, 2], [0.5, 0.5])]:
        found = fit(torch.tensor(counts), torch.tensor(p))
        assert (found.p_value, found.mean, found.detectable(1e-4)) == (1.0, 0, None)


def draws(times, n=60, outcomes=14, seed=1):
    """Counts of n draws, and their probabilities: half of the outcomes rare."""
    p = 0.7 ** np.arange(outcomes)
    p /= p.sum()
    return np.random.default_rng(seed).multinomial(n, p, size=times), p


def test_mean_and_variance_are_those_of_the_statistic():
    """8,000 samples: 5 standard errors of either (odds 1e-6)."""
    counts, p = draws(8_000)
    fits = [fit(torch.tensor(row), torch.tensor(p)) for row in counts]
    statistics = np.array([found.statistic for found in fits])
    assert abs(statistics.mean() - fits[0].mean) < 5 * statistics.std() / 8_000**0.5
    squares = (statistics - fits[0].mean) ** 2
    assert abs(squares.mean() - fits[0].variance) < 5 * squares.std() / 8_000**0.5


def test_odds_of_a_false_alarm():
    """Of 8,000 sums of three samples each, of 60, 15 and 150 draws, 8 are expected below 1e-3 (1 to
    25: odds 4e-4 and 1e-6), none below 1e-7."""
    parts = []
    for n, outcomes, seed in [(60, 14, 2), (15, 5, 3), (150, 40, 4)]:
        counts, p = draws(8_000, n, outcomes, seed)
        parts.append([fit(torch.tensor(row), torch.tensor(p)) for row in counts])
    p_values = np.array([Fit.together(fits).p_value for fits in zip(*parts, strict=True)])
    assert 1 <= (p_values < 1e-3).sum() <= 25
    assert p_values.min() > 1e-7
    assert abs(np.mean(p_values < 0.5) - 0.5) < 0.03


def test_the_stated_deviation_is_seen():
    """The hardest form: two equal outcomes, off by ε. At the stated ε the odds of seeing it are
    90 % (between 85 and 95 of 100 in 1,000 tries: odds 1e-6), at a third of it they are poor."""
    fits = [fit(torch.tensor([100, 100]), torch.ones(2))] * 10
    off = Fit.together(fits).detectable(1e-3)
    random = np.random.default_rng(5)

    def seen(epsilon):
        found = 0
        for _ in range(1000):
            rows = random.multinomial(200, [0.5 + epsilon, 0.5 - epsilon], size=10)
            whole = Fit.together(fit(torch.tensor(row), torch.ones(2)) for row in rows)
            found += whole.p_value < 1e-3
        return found / 1000

    assert 0.85 < seen(off) < 0.95
    assert seen(off / 3) < 0.2
    assert fit(torch.tensor([5, 5]), torch.ones(2)).detectable(1e-9) is None


# ── the self-test ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("warp", WARPS)
def test_exact_probabilities(warp):
    sampling = WARPS[warp]
    table = ToyTarget().table
    chances = exact(table, sampling)
    assert float(chances.sum()) == pytest.approx(1)
    whole = chances.reshape(VOCAB, VOCAB, VOCAB)
    for token in sampling.suppress:
        for place in range(LENGTH):
            assert not whole.select(place, token).any()
    if sampling.repetition_penalty == 1:
        p = sampling.warp(table).double()
        torch.testing.assert_close(whole, p[PROMPT[-1]][:, None, None] * p[:, :, None] * p[None])


def test_a_mistake_in_our_own_warp_is_seen(monkeypatch):
    """The probabilities that replies are held against are warped by the library, not by us."""
    right = Sampling.warp
    monkeypatch.setattr(Sampling, "warp", lambda self, logits: right(self, logits / 2))
    report = sampling_exact(1500, 0, None)
    assert report["verdict"] == "fails"
    assert any(case.startswith("plain") for case in report["failed"])


def test_the_engine_passes_and_every_path_is_taken():
    """1 of 10,000 seeds would fail."""
    report = sampling_exact(1500, 0, None)
    assert (report["verdict"], report["failed"]) == ("holds", [])
    assert len(report["cases"]) == 21
    for case in report["cases"]:
        assert case["accepted"] == 0 if case["case"].startswith("plain") else case["accepted"] > 0.1
        assert case["accepted"] < 1.5


@pytest.mark.parametrize(
    ("fault", "seen_by"),
    [
        (accepts_one_too_many, {"lookup, chain", "top-k, chain", "top-k, static", "top-k, grown"}),
        (keeps_the_draft_s_token, {"lookup, chain", "top-k, chain"}),
        (does_not_subtract_q, {"drawn, chain", "drawn, static"}),
        (reuses_its_random_numbers, {"drawn, chain", "drawn, static"}),
    ],
)
def test_faults_are_seen(fault, seen_by, monkeypatch):
    """By the cases they concern, and by no other."""
    fault(monkeypatch)
    report = sampling_exact(1500, 0, None)
    assert report["verdict"] == "fails"
    ways = {" ".join(case.split()[:2]).rstrip(",") for case in report["failed"]}
    assert ways == seen_by


def test_typical_acceptance_is_seen():
    report = sampling_exact(600, 0, Typical(delta=1.0))
    assert report["verdict"] == "fails"
    assert len(report["failed"]) == len(report["cases"]) == 12


def test_a_draw_from_the_wrong_temperature_is_seen(monkeypatch):
    """The target, not only the drafts: a warp that is not what was asked for."""
    warp = Sampling.warp

    def wrong(self, logits):
        return warp(self, logits * 1.15) if logits.dim() > 1 else warp(self, logits)

    monkeypatch.setattr(Sampling, "warp", wrong)
    assert sampling_exact(1500, 0, None)["verdict"] == "fails"

"""Statistics of `spectrain check`: do counts follow stated probabilities, and what would be seen.

K outcomes, n draws. Needs no more than torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Outcomes expected less often are counted together with others like them.
_RARE = 5.0


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-square of one or more independent samples, each against its own probabilities.

    statistic: the sum · mean, variance: of the sum, if the probabilities are true · draws: in all
    impossible: draws whose probability is 0
    """

    statistic: float = 0.0
    mean: float = 0.0
    variance: float = 0.0
    draws: int = 0
    impossible: int = 0

    @property
    def p_value(self) -> float:
        """P(a statistic at least as large, if the probabilities are true); 1 without any sample.

        By a scaled chi-square with the statistic's own mean and variance, which, unlike the usual
        one's, are right for small counts, too.
        """
        if self.impossible:
            return 0.0
        if not self.mean:
            return 1.0
        scale = self.variance / (2 * self.mean)
        return chi_square_tail(self.statistic / scale, self.mean / scale)

    def detectable(self, level: float, power: float = 0.9) -> float | None:
        """The smallest total variation ε that is seen with odds `power` at this `level`, whatever
        its form, when every sample is off by ε; None: not even the largest.

        Σ (p' − p)² / p ≥ (Σ |p' − p|)² = 4ε² (Cauchy–Schwarz), so the statistic grows by 4nε² or
        more; its excess is taken as normal.
        """
        if not self.mean:
            return None
        grid = torch.linspace(0, 1, 1001, dtype=torch.float64)
        shift = 4 * self.draws * grid**2
        scale = self.variance / (2 * self.mean)
        edge = scale * _chi_square_edge(level, self.mean / scale)
        deviations = (self.mean + shift - edge) / (self.variance + 4 * shift).sqrt()
        seen = torch.special.ndtr(deviations) >= power
        return float(grid[seen][0]) if seen.any() else None

    @classmethod
    def together(cls, fits: Iterable[Fit]) -> Fit:
        fits = list(fits)
        return cls(*(sum(getattr(fit, name) for fit in fits) for name in cls.__annotations__))


def fit(counts: Tensor, probabilities: Tensor) -> Fit:
    """counts [K] of n draws against probabilities [K], which need not sum to 1.

    Rare outcomes are counted in groups of about equal probability. A sample too small for two of
    them says nothing, unless what it has cannot be.
    """
    counts, p = counts.double(), probabilities.double()
    p = p / p.sum()
    n = counts.sum()
    impossible = int(counts[p == 0].sum())
    counts, p = counts[p > 0], p[p > 0]
    order = p.argsort(descending=True)
    counts, p = counts[order], p[order]
    groups = _groups(p * n)
    counts = torch.zeros(groups[-1] + 1, dtype=torch.float64).index_add(0, groups, counts)
    p = torch.zeros_like(counts).index_add(0, groups, p)
    size = len(p)
    if size < 2:
        return Fit(impossible=impossible)
    statistic = float(((counts - n * p) ** 2 / (n * p)).sum())
    # Haldane 1937: exact moments for n multinomial draws.
    variance = 2 * (size - 1) + float((1 / p).sum() - size**2 - 2 * size + 2) / float(n)
    return Fit(statistic, size - 1, variance, int(n), impossible)


def _groups(expected: Tensor) -> Tensor:
    """expected [K], falling → numbers of groups [K], from 0 without gaps; each is expected _RARE
    times or more if all together are."""
    frequent = int((expected >= _RARE).sum())
    rest = expected[frequent:]
    # None of the rest reaches _RARE, so what begins in one stretch of twice as much adds up to it.
    place = ((rest.cumsum(0) - rest) / (2 * _RARE)).long()
    if len(rest) and rest[place == place[-1]].sum() < _RARE:
        place[place == place[-1]] -= 1
    groups = torch.cat([torch.arange(frequent), frequent + place]).clamp(min=0)
    return groups.unique_consecutive(return_inverse=True)[1]


def chi_square_tail(value: float, freedom: float) -> float:
    """P(χ² ≥ value) with `freedom` degrees of freedom."""
    half = torch.tensor([freedom / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half))


def _chi_square_edge(level: float, freedom: float) -> float:
    """The value whose tail is `level`, by halving."""
    low, high = 0.0, freedom + 100.0
    while chi_square_tail(high, freedom) > level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, freedom) > level else (low, middle)
    return high

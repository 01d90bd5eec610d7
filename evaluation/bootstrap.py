"""Percentile bootstrap of ratios of sums, resampled over conversations.

Tokens of one conversation are alike, so conversations are what is drawn; a long one brings all its
tokens along. C conversations, M quantities, S resamples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES = 1000
LEVEL = 0.95
# Resamples of a handful of conversations repeat a handful of values: the interval would be far too
# narrow, down to no width at all.
FEWEST = 8

Floats = NDArray[np.float64]


def intervals(
    sums: dict[str, Floats],
    statistic: Callable[[dict[str, Floats]], Floats],
    seed: int,
    samples: int = SAMPLES,
) -> list[dict[str, float | None]]:
    """Value and 95 % interval of each of the M quantities that `statistic` makes of summed columns.

    sums: name → [C, …], one row per conversation. statistic: name → [S, …] (rows summed over a
    resample) → [S, M]; NaN where a quantity is undefined. Returns M times {value, low, high};
    value is None where undefined, low and high also where fewer than FEWEST conversations have the
    quantity. Resamples in which it is undefined are left out.
    """
    count = len(next(iter(sums.values())))
    having = (~np.isnan(statistic(sums))).sum(0)  # each conversation as a sample of its own
    value = statistic({name: column.sum(0)[None] for name, column in sums.items()})[0]
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(count, np.full(count, 1 / count), size=samples).astype(float)
    resampled = {name: np.tensordot(drawn, column, axes=1) for name, column in sums.items()}
    values = statistic(resampled)
    return [
        _interval(value[m], values[:, m] if having[m] >= FEWEST else values[:0, m])
        for m in range(len(value))
    ]


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Elementwise; NaN where the denominator is 0."""
    empty = denominator == 0
    return np.where(empty, np.nan, numerator / np.where(empty, 1.0, denominator))


def _interval(value: float, draws: Floats) -> dict[str, Any]:
    if np.isnan(value):
        return {"value": None, "low": None, "high": None}
    draws = draws[~np.isnan(draws)]
    if not len(draws):
        return {"value": float(value), "low": None, "high": None}
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"value": float(value), "low": float(low), "high": float(high)}

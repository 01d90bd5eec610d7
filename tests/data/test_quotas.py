"""Weights: shares to the row, nobody asked for more than they have, and no row left needlessly."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrain.core.errors import SpectrainError
from spectrain.data.sources import quotas

# As a person writes them, so that they are exact in tenths of a thousandth.
WEIGHT = st.integers(1, 10**6).map(lambda n: n / 10**4)
SOURCES = st.lists(st.tuples(st.integers(0, 10**6), WEIGHT), min_size=1, max_size=6)


@given(SOURCES, st.none() | st.integers(1, 2 * 10**6))
def test_shares_are_as_the_weights_say(sources, limit):
    sizes, weights = (list(column) for column in zip(*sources, strict=True))
    taken = quotas(sizes, weights, limit)
    total, exact = sum(taken), [Fraction(str(w)) for w in weights]
    shares = [weight / sum(exact) for weight in exact]
    assert limit is None or total <= limit
    assert all(0 <= count <= size for count, size in zip(taken, sizes, strict=True))
    assert all(abs(n - total * share) < 1 for n, share in zip(taken, shares, strict=True))
    more = total + 1  # one more, and some source had less than its share of all
    assert more == (limit or 0) + 1 or any(
        more * share > size for share, size in zip(shares, sizes, strict=True)
    )


@pytest.mark.parametrize(
    ("sizes", "weights", "limit", "expected"),
    [
        ([70, 30], [0.7, 0.3], None, [70, 30]),
        ([700, 30], [0.7, 0.3], None, [70, 30]),
        ([700, 300], [7, 3], 10, [7, 3]),
        ([100, 100, 100], [1, 1, 1], 100, [34, 33, 33]),
        ([100, 0], [1, 1], None, [0, 0]),
        ([5], [0.1], None, [5]),
        ([10**6, 1], [1e5, 1e-5], None, [10**6, 0]),
    ],
)
def test_examples(sizes, weights, limit, expected):
    assert quotas(sizes, weights, limit) == expected


def test_without_weights_there_are_no_quotas():
    assert quotas([1, 2], [None, None], 1) is None
    with pytest.raises(SpectrainError, match="give every source a weight, or none"):
        quotas([1, 2], [None, 1.0], None)

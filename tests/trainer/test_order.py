"""Order: every epoch is a permutation, and no cut of a batch loses or doubles a row."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.trainer.order import Order, padding, share

lengths = st.lists(st.integers(1, 500), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 17), st.integers(0, 5))
def test_the_stream_is_one_permutation_after_the_other(lengths, batch_size, seed):
    order = Order(lengths, batch_size, seed)
    total = len(lengths)
    steps = -(-3 * total // batch_size)
    seen = [0] * total
    for step in range(steps):
        batch = order.batch(step)
        assert len(batch) == batch_size
        for row in batch:
            seen[row] += 1
        # A row comes again only after all others have come.
        assert max(seen) - min(seen) <= 2
    whole, rest = divmod(steps * batch_size, total)
    assert sum(seen) == whole * total + rest
    assert min(seen) >= whole


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(0, 40), st.integers(0, 5))
def test_a_step_does_not_depend_on_what_was_asked_before(lengths, step, seed):
    used = Order(lengths, 8, seed)
    for earlier in range(step):
        used.batch(earlier)
    assert used.batch(step) == Order(lengths, 8, seed).batch(step)


@settings(max_examples=100, deadline=None)
@given(
    lengths,
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.integers(1, 12),
    st.integers(0, 9),
    st.sampled_from([0, 1, 300, 1000, 9999]),
)
def test_ranks_micro_batches_and_rows_partition_the_batch(lengths, world, micro, step, pack):
    batch = Order(lengths, 12, 0).batch(step)
    parts = [share(batch, lengths, rank, world, micro, pack) for rank in range(world)]
    assert parts == [share(batch, lengths, rank, world, micro, pack) for rank in range(world)]
    rows = [row for own in parts for part in own for row in part]
    assert sorted(one for row in rows for one in row) == sorted(batch)
    assert all(0 < len(part) <= micro for own in parts for part in own)
    # Every process has something to do at every step, in as many micro-batches as the others: a
    # model in pieces computes only when all of them ask.
    assert all(parts)
    assert len({len(own) for own in parts}) == 1
    if not pack:
        assert all(len(row) == 1 for row in rows)
    for row in rows:
        assert len(row) == 1 or sum(lengths[one] for one in row) <= pack
    for own in parts:  # what was put into rows of its own does not fit together
        if len(own) > 1 and world > 1:
            continue  # unless it was cut to keep the others company
        filled = sorted(sum(lengths[one] for one in row) for part in own for row in part)
        assert not pack or len(filled) < 2 or filled[0] + filled[1] > pack
    positions = sum(
        len(part) * max(sum(lengths[one] for one in row) for row in part)
        for own in parts
        for part in own
    )
    used = sum(lengths[one] for one in batch)
    assert abs(padding(batch, lengths, world, micro, pack) - (1 - used / positions)) < 1e-12


def test_packed_rows_by_hand():
    lengths = [2, 3, 4, 5, 6, 12]
    assert share(range(6), lengths, 0, 1, 2, 10) == [[[3, 1, 0], [4, 2]], [[5]]]
    assert share(range(6), lengths, 0, 1, 2) == [[[0], [1]], [[2], [3]], [[4], [5]]]
    assert padding(range(6), lengths, 1, 2, 10) == 0


def test_a_share_of_fewer_rows_is_cut_to_as_many_micro_batches():
    """Conversations 0, 2, 4 would be one packed row, 1, 3, 5 are two."""
    lengths = [2, 7, 3, 8, 4, 9]
    assert share(range(6), lengths, 1, 2, 1, 15) == [[[5]], [[3, 1]]]
    assert share(range(6), lengths, 0, 2, 1, 15) == [[[4]], [[2, 0]]]
    assert share(range(6), lengths, 0, 2, 1, 9999) == [[[4, 2, 0]]]


def test_rows_of_one_batch_have_similar_lengths():
    draw = random.Random(0)
    lengths = [draw.randint(20, 2000) for _ in range(800)]
    order = Order(lengths, 8, 0)
    waste = [padding(order.batch(step), lengths, 1, 8) for step in range(100)]
    shuffled = [padding(draw.sample(range(800), 8), lengths, 1, 8) for _ in range(100)]
    assert sum(waste) / 100 < 0.1 < 0.3 < sum(shuffled) / 100


def test_the_seed_and_the_epoch_change_the_order():
    lengths = list(range(1, 65))
    first = [Order(lengths, 8, 0).batch(step) for step in range(8)]
    assert first != [Order(lengths, 8, 1).batch(step) for step in range(8)]
    assert first != [Order(lengths, 8, 0).batch(step) for step in range(8, 16)]

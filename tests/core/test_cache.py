"""The cache against lists of what each row holds."""

from __future__ import annotations

import torch

from spectrain.core.cache import KVCache

ROWS, SLOTS, GROUPS, SIZE = 4, 12, 2, 3


def entries(positions: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Keys [B, n, G, d] that say whose they are: 100 · row + position, the group and the place."""
    base = (100.0 * row[:, None] + positions)[..., None, None]
    return base + 0.1 * torch.arange(GROUPS)[:, None] + 0.01 * torch.arange(SIZE)


def write(cache: KVCache, count: int, row: torch.Tensor) -> None:
    slots = cache.lengths[:, None] + torch.arange(count)
    cache.place(slots, slots + 7)
    cache.write(0, slots, entries(slots, row), -entries(slots, row))


def held(cache: KVCache, row: int) -> list[float]:
    keys, values = cache.read(0, int(cache.lengths[row]))
    assert torch.equal(values, -keys)
    expected = keys[row, 0, :, 0]
    assert torch.allclose(keys[row], expected[None, :, None] + _offsets(), atol=1e-4)
    return expected.tolist()


def _offsets() -> torch.Tensor:
    return 0.1 * torch.arange(GROUPS)[:, None, None] + 0.01 * torch.arange(SIZE)


def test_rows_keep_what_is_theirs_however_the_cache_grows_and_narrows():
    cache, row = KVCache(ROWS, SLOTS), torch.arange(ROWS)
    cache.reserve(4)
    write(cache, 4, row)
    cache.commit(torch.tensor([4, 1, 3, 2]))
    cache.reserve(9)
    write(cache, 3, row)
    cache.commit(torch.tensor([3, 3, 0, 1]))
    cache.keep_rows(torch.tensor([3, 1]))
    assert cache.lengths.tolist() == [3, 4]
    assert cache.positions[0, :3].tolist() == [7, 8, 9]
    assert held(cache, 0) == [300.0, 301.0, 302.0]
    assert held(cache, 1) == [100.0, 101.0, 102.0, 103.0]
    write(cache, 2, torch.tensor([3, 1]))
    cache.commit(torch.tensor([2, 1]))
    assert held(cache, 0) == [300.0, 301.0, 302.0, 303.0, 304.0]


def test_positions_of_the_rows_that_stay():
    """A sliding window looks at them: rows of different positions, narrowed."""
    cache = KVCache(3, 4)
    cache.place(torch.arange(4).expand(3, 4), torch.arange(12).view(3, 4))
    cache.keep_rows(torch.tensor([2, 0]))
    assert cache.positions.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]


def test_an_accepted_path_moves_together():
    cache, row = KVCache(2, SLOTS), torch.arange(2)
    cache.reserve(8)
    write(cache, 2, row)
    cache.commit(torch.tensor([2, 1]))
    write(cache, 5, row)
    cache.commit(torch.tensor([3, 2]), torch.tensor([[0, 2, 4], [0, 3, 3]]))
    assert held(cache, 0) == [0.0, 1.0, 2.0, 4.0, 6.0]
    assert held(cache, 1) == [100.0, 101.0, 104.0]
    assert cache.positions[0, :5].tolist() == [7, 8, 9, 11, 13]
    assert cache.positions[1, :3].tolist() == [7, 8, 11]

"""Int8 features: the error is that of rounding to the scale of the group, on any numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fake_rows import SETTINGS, random_row

from spectrain.data.int8 import from_int8, group_of, to_int8
from spectrain.data.shard import DTYPES, bytes_needed, state_bytes
from spectrain.data.store import FeatureStore
from spectrain.data.writer import StoreWriter


def slowly(features: torch.Tensor, group: int) -> torch.Tensor:
    """Group by group, in Python's float64: what comes back from int8."""
    result = features.double().clone()
    for row in range(len(features)):
        for begin in range(0, features.shape[1], group):
            numbers = [float(x) for x in features[row, begin : begin + group]]
            scale = max(map(abs, numbers)) / 127
            scale = float(torch.tensor(scale).bfloat16()) or 1.0
            for i, x in enumerate(numbers):
                whole = max(-127, min(127, round(x / scale)))
                result[row, begin + i] = float(torch.tensor(whole * scale).bfloat16())
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_slow_way(dtype):
    """Groups of very different sizes, one all zeros, one of the smallest numbers."""
    random = torch.Generator().manual_seed(0)
    features = torch.randn(1500, 64, generator=random) * torch.tensor([900.0, 0.02]).repeat(32)
    features[3], features[4, :32] = 0, 1e-30
    features = features.to(dtype)
    values, scales = to_int8(features, 32)
    assert values.shape == features.shape
    assert scales.shape == (1500, 2)
    assert values.min() >= -127
    assert (scales > 0).all()
    some = [0, 1, 3, 4, 1023, 1024, 1499]
    found = from_int8(values, scales)
    assert torch.equal(found[some].double(), slowly(features[some], 32))


def test_error_is_half_a_step_and_the_rounding_of_bfloat16():
    """|x̂ − x| ≤ scale / 2 + |x| · 2⁻⁸: half a step of int8 (the largest number of a group, whose
    scale was rounded down by up to 2⁻⁸, is cut by no more), then one rounding of the product."""
    random = torch.Generator().manual_seed(1)
    features = torch.randn(400, 96, generator=random) * 10 ** torch.randn(400, 1, generator=random)
    values, scales = to_int8(features, 32)
    error = (from_int8(values, scales).float() - features).abs()
    bound = scales.float().repeat_interleave(32, 1) / 2 * (1 + 1e-5) + features.abs() * 2**-8
    assert (error <= bound).all()


@pytest.mark.parametrize("size", [1e-36, 1e-6, 65504.0, 1e9, 1e37])
def test_no_size_of_numbers_overflows_or_vanishes(size):
    """Scales of float16 would end at 127 · 65504 and lose small numbers; these do neither."""
    features = torch.linspace(-1, 1, 64)[None] * size
    back = from_int8(*to_int8(features, 32)).float()
    assert torch.isfinite(back).all()
    assert (back - features).double().norm() < 0.01 * features.double().norm()


def test_one_huge_dimension_costs_its_own_group_alone():
    """What groups are for: residual streams have a few dimensions far larger than the rest."""
    features = torch.randn(50, 96, generator=torch.Generator().manual_seed(2))
    features[:, 40] = 5000
    error = (from_int8(*to_int8(features, 32)).float() - features).norm(dim=0)
    others = [i for i in range(96) if not 32 <= i < 64]
    assert (error[others] < 0.02 * features.norm(dim=0)[others]).all()


@pytest.mark.parametrize(("hidden", "group"), [(576, 32), (4096, 32), (4, 4), (50, 2), (7, 1)])
def test_groups_never_cross_layers(hidden, group):
    assert group_of(hidden) == group
    assert hidden % group == 0


@pytest.fixture
def stored(tmp_path):
    """A store of int8 with every state, the pairs it was made from, and its path."""

    def write(everywhere: bool, name: str = "s"):
        pairs = []
        for seed, length in enumerate((12, 33, 7)):
            row, states = random_row(seed, length, hidden=64)
            if seed == 1:
                row.reply[20:24] = 0  # two replies: two stretches of the last state
                row.reply[24:] = 2
                states = replace(
                    states, **{k: getattr(states, k)[:-4] for k in ("argmax", "logprob", "lognorm")}
                )
                states = replace(states, last=states.last[:-4])
            if everywhere:
                states = replace(states, last=torch.randn(length, 64))
            pairs.append((row, states))
        settings = SETTINGS | {"dtype": "int8", "aux_layers": [0, 1, 2]}
        settings |= {"last_states": "everywhere" if everywhere else "replies"}
        path = tmp_path / name
        with StoreWriter.claim(path, settings) as writer:
            writer.write_shard(0, "a", pairs[:2])
            writer.write_shard(1, "b", pairs[2:])
            writer.finish(2)
        return path, pairs

    return write


@pytest.mark.parametrize("everywhere", [False, True])
def test_batch_of_an_int8_store(stored, everywhere):
    """Every row and position as `to_int8` and back, in bfloat16; zeros where nothing is kept."""
    path, pairs = stored(everywhere)
    store = FeatureStore.open(path)
    batch = store.batch(store.rows("train"))
    assert batch.aux.dtype == batch.last.dtype == torch.bfloat16
    for place, (row, states) in enumerate(pairs):
        n = len(row.tokens)
        kept = torch.ones(n, dtype=torch.bool)
        if not everywhere:
            kept = torch.cat([row.reply[1:] > 0, torch.tensor([False])])
        assert torch.equal(batch.aux[place, :n], from_int8(*to_int8(states.aux, 32)))
        assert torch.equal(batch.last[place, :n][kept], from_int8(*to_int8(states.last, 32)))
        assert not batch.last[place, :n][~kept].any()
        assert not batch.aux[place, n:].any()


def test_bytes_are_half_and_what_was_announced(stored):
    """34 bytes for 32 numbers; `require_space` and the tables ask the same function."""
    path, pairs = stored(True)
    store = FeatureStore.open(path)
    assert state_bytes(64, DTYPES["int8"]) == 68
    assert math.isclose(
        state_bytes(576, DTYPES["int8"]) / state_bytes(576, DTYPES["bfloat16"]), 17 / 32
    )
    tokens = sum(len(row.tokens) for row, _ in pairs)
    shards = [store._shard(number) for number in range(2)]
    held = sum(
        tensor.numel() * tensor.element_size()
        for shard in shards
        for name, tensor in shard.items()
        if name.startswith(("aux", "last"))
    )
    assert held == tokens * 4 * 68
    whole = sum(file.stat().st_size for file in path.glob("shard-*"))
    assert held < whole <= bytes_needed([row for row, _ in pairs], 64, 192, torch.int8, True)


def test_same_rows_same_bytes(stored):
    first, second = stored(False)[0], stored(False, "again")[0]
    for file in first.glob("shard-*"):
        assert (second / file.name).read_bytes() == file.read_bytes()

"""Uniform numbers by counter: uniform, unrelated, and a function of key, stream and index alone.

Every statistical test fails a perfect generator with the odds written at it; nothing is redrawn, so
it passes always or never.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare, kstest

from spectrain.generator import randomness
from spectrain.generator.randomness import ACCEPT, DRAFT, OWN, row_key, several, uniform

FALSE_ALARM = 1e-4
WRAP = 1 << 64


def slow_mix(state: int) -> int:
    """SplitMix64's output in whole numbers, which do not wrap by themselves."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WRAP
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % WRAP
    return state ^ (state >> 31)


def slow_uniform(key: int, stream: int, index: int) -> float:
    start = slow_mix((key + (stream + 1) * 0xD1B54A32D192ED03) % WRAP)
    return (slow_mix((start + (index + 1) * 0x9E3779B97F4A7C15) % WRAP) >> 11) / 2**53


def slow_key(seed: int, request: int) -> int:
    start = slow_mix((seed + 0x9E3779B97F4A7C15) % WRAP)
    return slow_mix((start + (request + 1) * 0x9E3779B97F4A7C15) % WRAP)


def test_the_mixing_is_splitmix64():
    """The first numbers of seed 1234567, as the generator's reference programs print them."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = 1234567 + torch.arange(1, 4) * randomness._STEP
    assert [int(value) % WRAP for value in randomness._mix(states)] == expected


def test_values_stay_what_they_are():
    """The same seed gives the same text in every later version."""
    assert [row_key(0, 0), row_key(0, 1), row_key(1, 0)] == [
        -6411193824288604561,
        -5511663747979980962,
        6791897765849424158,
    ]
    keys = torch.tensor([row_key(0, 0), row_key(7, 3)])
    assert uniform(keys, OWN, torch.tensor([[0, 1], [2, 1_000_000]])).tolist() == [
        [0.028252728065361832, 0.05721573314479611],
        [0.6055359212405889, 0.8881181282774704],
    ]
    assert uniform(keys, DRAFT, torch.tensor([0, 0])).tolist() == [
        0.0009034415816088215,
        0.3630261275337523,
    ]


def test_tensors_equal_whole_numbers():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (20,), generator=generator)
    index = torch.randint(0, 2**40, (20, 7), generator=generator)
    for stream in (OWN, DRAFT, ACCEPT):
        for key, places, got in zip(keys, index, uniform(keys, stream, index), strict=True):
            assert got.tolist() == [
                slow_uniform(int(key), stream, int(place)) for place in places.tolist()
            ]
    for seed, request in [(0, 0), (3, 2**40), (-1, 5), (2**64 + 9, 1)]:
        assert row_key(seed, request) % WRAP == slow_key(seed, request)


def test_a_number_does_not_depend_on_the_batch_around_it():
    keys = torch.tensor([row_key(1, request) for request in range(6)])
    index = torch.arange(24).reshape(6, 4)
    whole = uniform(keys, DRAFT, index)
    rows = torch.tensor([4, 0, 3])
    assert torch.equal(uniform(keys[rows], DRAFT, index[rows][:, [2, 0]]), whole[rows][:, [2, 0]])
    assert torch.equal(uniform(keys, DRAFT, index[..., None, None])[..., 0, 0], whole)
    assert torch.equal(uniform(keys, DRAFT, index[:, 1]), whole[:, 1])
    some, more = (uniform(keys, DRAFT, several(index, count)) for count in (2, 5))
    assert torch.equal(some, more[..., :2])
    assert more.unique().numel() == more.numel()


def samples() -> dict[str, torch.Tensor]:
    """[n, n] tables whose neighbours in a row, a column, or another stream must be unrelated."""
    keys = torch.tensor([row_key(5, request) for request in range(300)])
    index = torch.arange(300).expand(300, -1)
    plain = torch.arange(300)  # keys that are hardly mixed themselves
    return {
        "requests": uniform(keys, OWN, index),
        "drafts": uniform(keys, DRAFT, index),
        "children": uniform(keys, ACCEPT, several(index[:, :30], 10)).flatten(1),
        "small keys": uniform(plain, OWN, index),
    }


@pytest.mark.parametrize("name", ["requests", "drafts", "children", "small keys"])
def test_numbers_are_uniform(name):
    """Kolmogorov-Smirnov on 90,000 numbers, and the 53 bits one by one (5 standard errors: odds
    of 3e-5 for all of them)."""
    values = samples()[name].flatten()
    assert values.dtype == torch.float64
    assert values.min() >= 0
    assert values.max() < 1
    assert kstest(values.numpy(), "uniform").pvalue > FALSE_ALARM
    whole = (values * 2**53).long()
    assert torch.equal(whole.double() / 2**53, values)
    ones = torch.stack([whole >> bit & 1 for bit in range(53)]).double().mean(1)
    assert (ones - 0.5).abs().max() < 5 * 0.5 / len(values) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbours_are_unrelated(lag):
    """Pairs fill a 10 × 10 table evenly: of neighbouring indices, of neighbouring keys, and of two
    streams; chi-square, odds of a false alarm 1e-4 each."""
    tables = samples()
    pairs = {
        f"{name}, {axis}": (
            table.narrow(axis, 0, table.shape[axis] - lag),
            table.narrow(axis, lag, table.shape[axis] - lag),
        )
        for name, table in tables.items()
        for axis in (0, 1)
    }
    pairs["streams"] = tables["requests"], tables["drafts"].roll(lag - 1, 1)
    for name, (left, right) in pairs.items():
        cell = ((left * 10).long() * 10 + (right * 10).long()).flatten()
        observed = torch.bincount(cell, minlength=100).numpy()
        assert chisquare(observed).pvalue > FALSE_ALARM, name


def test_keys_do_not_repeat():
    keys = {row_key(seed, request) for seed in range(-20, 20) for request in range(40)}
    assert len(keys) == 1600

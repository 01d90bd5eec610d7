"""The schedule, which tensors go where, and the optimisers' memory on its way to disk."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from spectrain.core.errors import SpectrainError
from spectrain.trainer import optim
from spectrain.trainer.settings import TrainerSettings


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.9])
def test_the_rate_stays_between_zero_and_its_peak(schedule, steps, warmup):
    factors = [optim.factor(schedule, step, steps, warmup) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    warm = round(warmup * steps)
    assert factors[:warm] == sorted(factors[:warm])
    assert factors[warm:] == sorted(factors[warm:], reverse=True)


def test_schedules_have_their_shapes():
    def at(schedule, step):
        return optim.factor(schedule, step, 100, 0.1)

    assert at("cosine", 0) == pytest.approx(1 / 11)
    assert at("cosine", 10) == 1
    assert at("cosine", 55) == pytest.approx(0.5)
    assert at("constant", 99) == 1
    assert at("wsd", 78) == 1
    assert at("wsd", 99) == pytest.approx(1 / 21)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.table = nn.Linear(6, 32, bias=False)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        return self.table(self.norm(self.map(x)))


def settings(**changes):
    return TrainerSettings(steps=1, **changes)


def step(net, parts):
    optim.set_rate(parts, 0.5)
    net(torch.ones(2, 4)).square().sum().backward()
    for part in parts.values():
        part.optimizer.step()
        part.optimizer.zero_grad()


def test_vectors_are_not_decayed_and_frozen_tensors_are_left_out():
    net = Net()
    parts = optim.build(net, settings(weight_decay=0.5), {32})
    decay = {
        id(p): group["weight_decay"]
        for group in parts["adamw"].optimizer.param_groups
        for p in group["params"]
    }
    names = dict(net.named_parameters())
    assert {n: decay[id(p)] for n, p in names.items() if id(p) in decay} == {
        "map.weight": 0.5,
        "table.weight": 0.5,
        "map.bias": 0,
        "norm.weight": 0,
        "norm.bias": 0,
    }


def test_muon_takes_maps_and_leaves_tables_and_vectors():
    parts = optim.build(Net(), settings(optimizer="muon"), {32})
    assert parts["muon"].names == ["map.weight"]
    assert sorted(parts["adamw"].names) == [
        *("map.bias", "norm.bias", "norm.weight", "table.weight")
    ]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_memory_survives_the_disk_bit_for_bit(kind):
    torch.manual_seed(0)
    one = Net()
    parts = optim.build(one, settings(optimizer=kind), {32})
    step(one, parts)
    two = Net()
    two.load_state_dict(one.state_dict())
    again = optim.build(two, settings(optimizer=kind), {32})
    optim.restore(again, load(save(optim.flatten(parts))))
    for net, own in ((one, parts), (two, again)):
        step(net, own)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


def test_nothing_to_train_is_an_error():
    with pytest.raises(SpectrainError, match="no trainable tensor"):
        optim.build(Net().requires_grad_(False), settings(), set())

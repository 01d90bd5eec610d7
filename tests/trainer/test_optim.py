"""The schedule, which tensors go where, and the optimisers' memory on its way to disk."""

from __future__ import annotations

import pytest
import torch
from joint_heads import joint
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


def rates(parts):
    """name → rate of the step"""
    found = {}
    for part in parts.values():
        each = [g["lr"] for g in part.optimizer.param_groups for _ in g["params"]]
        found |= dict(zip(part.names, each, strict=True))
    return found


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_first_pattern_that_matches_sets_the_rate(kind):
    factors = {"map.bias": 3.0, "map.*": 0.5, "*.bias": 7.0}
    chosen = settings(optimizer=kind, lr=1e-3, matrix_lr=2e-2, lr_factors=factors)
    parts = optim.build(Net(), chosen, {32})
    optim.set_rate(parts, 0.1)
    assert rates(parts) == pytest.approx(
        {
            "map.weight": 0.5 * 0.1 * (2e-2 if kind == "muon" else 1e-3),
            "map.bias": 3e-4,
            "norm.weight": 1e-4,
            "norm.bias": 7e-4,
            "table.weight": 1e-4,
        }
    )


def test_names_stand_for_their_own_tensors_in_any_grouping():
    """Checkpoints and pauses go by these names."""
    net = Net()
    for factors in ({}, {"*.bias": 2.0}, {"table.*": 2.0, "norm.*": 3.0, "map.*": 2.0}):
        parts = optim.build(net, settings(lr_factors=factors), {32})
        named = dict(net.named_parameters())
        pairs = zip(parts["adamw"].names, parts["adamw"].parameters, strict=True)
        assert all(named[name] is value for name, value in pairs)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_factor_is_a_rate_of_that_size(kind):
    """With everything at 0.25 of the rate and with a quarter of the rate the same is learnt."""
    results = []
    for changes in (
        {"lr": 1e-2, "matrix_lr": 2e-2, "lr_factors": {"*": 0.25}},
        {"lr": 0.25e-2, "matrix_lr": 0.5e-2},
    ):
        torch.manual_seed(0)
        net = Net()
        parts = optim.build(net, settings(optimizer=kind, **changes), {32})
        optim.set_rate(parts, 1.0)
        for _ in range(3):
            step(net, parts)
        results.append(net.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_memory_is_kept_by_name_with_factors_too():
    torch.manual_seed(0)
    one = Net()
    parts = optim.build(one, settings(lr_factors={"*.bias": 2.0}), {32})
    step(one, parts)
    flat = optim.flatten(parts)
    two = optim.build(one, settings(), {32})  # other groups, so another order
    assert two["adamw"].names != parts["adamw"].names
    optim.restore(two, flat)
    again = optim.flatten(two)
    assert again.keys() == flat.keys()
    assert all(torch.equal(value, again[key]) for key, value in flat.items())


@pytest.mark.parametrize(
    "factors", [{"lm_head.*": 0.1}, {"map.*": 2, "map.bias": 3}, {"frozen.*": 2}]
)
def test_a_pattern_without_a_tensor_is_refused_with_the_tensors_there_are(factors):
    """Misspelt, of a frozen tensor, or behind a pattern that takes everything from it."""
    with pytest.raises(SpectrainError) as caught:
        optim.build(Net(), settings(lr_factors=factors), {32})
    assert f"the pattern {list(factors)[-1]!r}" in str(caught.value)
    assert "there are map.weight, map.bias, norm.weight" in str(caught.value)


def test_a_head_beside_its_trunk_keeps_its_names(tiny_path):
    """The same patterns as where the head is trained alone; layers are listed once."""
    head = joint(tiny_path, mode="full")
    chosen = settings(trunk=head.settings, lr=1e-3, lr_factors={"heads.0.*": 2.0, "trunk.*": 0.5})
    parts = optim.build(head, chosen, {392})
    optim.set_rate(parts, 1.0)
    for name, rate in rates(parts).items():
        if name.startswith("trunk."):
            assert rate == pytest.approx(1e-3 * head.settings.share(1e-3) * 0.5)
        else:
            assert rate == pytest.approx(2e-3 if name.startswith("head.heads.0.") else 1e-3)
    with pytest.raises(SpectrainError) as caught:
        optim.build(head, settings(trunk=head.settings, lr_factors={"nothing": 2.0}), {392})
    assert str(caught.value).count("q_proj") == 1


def test_nothing_to_train_is_an_error():
    with pytest.raises(SpectrainError, match="no trainable tensor"):
        optim.build(Net().requires_grad_(False), settings(), set())

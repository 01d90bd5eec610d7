"""The running mean of the weights: the formula, and that it survives whatever a run survives."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from joint_heads import joint

from spectrain.core.errors import SpectrainError
from spectrain.trainer import checkpoint
from spectrain.trainer.changes import digests, require_changes
from spectrain.trainer.ema import Ema
from spectrain.trainer.metrics import read_metrics


class Crash(Exception):
    pass


def at_load(number, action):
    loads = iter(range(1000))

    def before_load(batch):
        if next(loads) == number:
            action(batch)

    return before_load


def crash(_batch):
    raise Crash


def poison(batch):
    batch.aux[0, 3] = float("nan")


def values(head):
    return {name: value.detach().clone() for name, value in head.named_parameters()}


def watched(monkeypatch):
    """What the loop gives to the mean: the weights after each step that counts."""
    seen, real = [], Ema.update

    def update(self, head, earlier):
        seen.append(values(head))
        return real(self, head, earlier)

    monkeypatch.setattr(Ema, "update", update)
    return seen


def slow_mean(start, seen, decay):
    """As the definition says, in float64."""
    mean = {name: value.double() for name, value in start.items()}
    for n, now in enumerate(seen):
        d = min(decay, (1 + n) / (10 + n))
        mean = {name: d * value + (1 - d) * now[name].double() for name, value in mean.items()}
    return mean


@pytest.mark.parametrize(
    "decay", [0.3, 0.999]
)  # reached after three steps; never in so short a run
def test_the_result_is_the_mean_of_all_good_steps(
    make_head, make_data, fit, tmp_path, monkeypatch, decay
):
    """A step that is skipped is no step of it: neither its weights nor its number count."""
    head = make_head(train_lm_head=False)
    start, before = values(head), digests(head)
    seen = watched(monkeypatch)
    data = make_data(before_load=at_load(3, poison))
    state, _ = fit(head, data, tmp_path, steps=7, ema=decay, lr=1e-2)
    assert (state.skipped, len(seen)) == (1, 6)
    expected = slow_mean(start, seen, decay)
    frozen = {n for n, value in head.named_parameters() if not value.requires_grad}
    assert frozen
    for name, value in head.named_parameters():
        assert torch.allclose(value.double(), expected[name], atol=1e-6), name
        assert torch.equal(value, seen[-1][name]) == (name in frozen), name
    require_changes(head, before, "here", state.unreached)
    # The weights of the last step are what the run goes on from.
    raw = make_head(seed=1, train_lm_head=False)
    checkpoint.load_weights(raw, checkpoint.newest(tmp_path)[0] / "model.safetensors")
    assert all(torch.equal(value, seen[-1][name]) for name, value in raw.named_parameters())


def test_a_mean_changes_nothing_else(make_head, make_data, fit, tmp_path):
    """Losses and the weights of the last step are those of a run without it."""
    plain, _ = make_head(), fit(make_head(), make_data(), tmp_path / "a", ema=0.9)
    _, rows = fit(plain, make_data(), tmp_path / "b")
    raw = make_head(seed=1)
    checkpoint.load_weights(raw, checkpoint.newest(tmp_path / "a")[0] / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(raw.parameters(), plain.parameters(), strict=True))
    losses = [row["loss"] for row in read_metrics(tmp_path / "a")]
    assert losses == [row["loss"] for row in rows]


def test_resumed_the_mean_is_that_of_an_uninterrupted_run(make_head, make_data, fit, tmp_path):
    """Case 26, bit for bit, also behind a skipped step: the number of a step is not its count."""
    options = {"steps": 9, "save_every": 4, "ema": 0.999}
    whole = make_head()
    fit(whole, make_data(before_load=at_load(1, poison)), tmp_path / "whole", **options)

    first, second = at_load(1, poison), at_load(6, crash)

    def both(batch):
        first(batch)
        second(batch)

    with pytest.raises(Crash):
        fit(make_head(), make_data(before_load=both), tmp_path / "cut", **options)
    resumed = make_head(seed=1)
    fit(resumed, make_data(), tmp_path / "cut", **options)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize("decay", [None, 0.9])
def test_swapped_in_and_back(make_head, decay):
    head = make_head()
    ema = Ema(head, decay)
    with torch.no_grad():
        for value in head.parameters():
            value += 1
    ema.update(head, earlier=0)
    raw, means = copy.deepcopy(head.state_dict()), copy.deepcopy(ema.means)
    with suppress(Crash), ema.swapped_in(head):
        for name, value in head.named_parameters():
            assert torch.equal(value, means.get(name, raw[name]))
            assert torch.equal(value, raw[name]) == (decay is None)
        raise Crash  # an evaluation that fails leaves no mean behind
    assert all(torch.equal(value, raw[name]) for name, value in head.state_dict().items())
    assert all(torch.equal(value, means[name]) for name, value in ema.means.items())


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_trunk_that_is_trained_is_part_of_it(tiny_path, mode):
    head = joint(tiny_path, mode=mode)
    ema = Ema(head, 0.9)
    trained = {n for n, value in head.named_parameters() if value.requires_grad}
    assert ema.means.keys() == trained
    assert {n.partition(".")[0] for n in trained} == {"head", "trunk"}


def test_means_of_other_tensors_are_refused(make_head):
    ema = Ema(make_head(), 0.9)
    saved = {n: value for n, value in ema.means.items() if n != "fc.weight"}
    with pytest.raises(SpectrainError, match=r"means of other tensors: fc\.weight"):
        ema.restore(saved, "there")

"""A target in pieces over two processes computes, learns and is saved as the whole one is."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from ranks import run_on_ranks
from torch import nn

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads.eagle1 import Eagle1Head, Eagle1Options
from spectrain.trainer import optim, sharding, spread
from spectrain.trainer.muon import Muon
from spectrain.trainer.settings import TrainerSettings


def load(path, device="cpu"):
    return Target.load(path, dtype="float32", device=device, pack_weights=False)


def in_pieces(path, accelerator, trained=False):
    source = spread.first(accelerator, lambda: load(path))
    return spread.spread(source, accelerator, trained)


@pytest.fixture
def on_ranks(monkeypatch):
    """on_ranks(work, count=2) runs work(accelerator) in processes; fails when one of them does."""

    def run(work, count=2):
        def begin():
            accelerator = Accelerator(cpu=True)
            work(accelerator)
            accelerator.end_training()

        run_on_ranks(begin, monkeypatch, count)

    return run


@pytest.mark.parametrize(("name", "count"), [("tiny", 2), ("whole", 3)])
def test_a_spread_target_says_what_the_whole_one_does(request, on_ranks, name, count):
    """Tied tables (tiny) and untied ones; 3 does not divide the rows of any layer's matrix evenly.
    Each process reads other tokens. Only the first one has loaded it, and each holds its share."""
    path = request.getfixturevalue(name).name
    whole = load(path)
    layers = sum(value.numel() for value in whole.decoder.layers.parameters())
    others = sum(value.numel() for value in whole.model.parameters()) - layers

    def work(accelerator):
        rank, calls = accelerator.process_index, []

        def counted(device):
            calls.append(device)
            return load(path, device)

        target = spread.loaded(counted, accelerator)
        assert calls == (["cpu"] if rank == 0 else [])
        assert (target.fingerprint, target.name) == (whole.fingerprint, whole.name)
        assert target.stop_ids == whole.stop_ids
        assert not any(value.requires_grad for value in target.model.parameters())
        tokens = torch.randint(3, 380, (2, 9 + rank), generator=torch.Generator().manual_seed(rank))
        with torch.no_grad():
            got, expected = (t.forward(tokens, aux_layers=(0, 2)) for t in (target, whole))
        torch.testing.assert_close(got.last, expected.last)
        torch.testing.assert_close(got.aux, expected.aux)
        torch.testing.assert_close(target.logits(got.last), whole.logits(expected.last))

        pieces = [value.to_local() for value in target.model.parameters() if sharding.is_cut(value)]
        plain = [value for value in target.model.parameters() if not sharding.is_cut(value)]
        assert sum(value.numel() for value in plain) == others
        held = torch.tensor(sum(piece.numel() for piece in pieces))
        # Rounding up: a vector or matrix has at most one row more than its share.
        rows = sum(value[:1].numel() for value in whole.decoder.layers.parameters())
        assert held <= layers / count + rows
        dist.all_reduce(held)
        assert held == layers

    on_ranks(work, count)


def test_an_error_of_the_first_process_is_everybody_s(on_ranks):
    def work(accelerator):
        with pytest.raises(SpectrainError, match="/nowhere"):
            spread.loaded(partial(load, "/nowhere"), accelerator)

    on_ranks(work)


def test_a_head_from_the_target_s_own_layers_is_the_first_process_s(on_ranks, tiny):
    """EAGLE-1 starts from a layer of the target, which no other process ever has as a whole."""

    def make(device):
        target = load(tiny.name, device)
        counts = torch.arange(target.vocab_size, 0, -1)
        return target, Eagle1Head.create(Eagle1Options(steps=2), target, counts)

    torch.manual_seed(5)
    _, expected = make("cpu")
    following = torch.rand(3)

    def work(accelerator):
        torch.manual_seed(5 + accelerator.process_index)
        target, head = spread.target_and_head(make, accelerator, trained=False)
        assert target is None
        assert head.config == expected.config
        for name, value in expected.state_dict().items():
            assert torch.equal(head.state_dict()[name], value), name
        ids = torch.arange(7)
        assert torch.equal(head.readout.embed(ids), expected.readout.embed(ids))
        assert torch.equal(head.readout.rows(ids)[0], expected.readout.rows(ids)[0])
        assert not any(p.requires_grad for p in (head.readout.weight,))
        assert torch.equal(torch.rand(3), following)  # what is drawn next is the first's, too

    on_ranks(work)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_steps_on_pieces_are_steps_on_the_whole(on_ranks, tiny, optimizer):
    """Means of gradients, their common norm, the update and what a checkpoint takes of it; by one
    process that reads the rows of both."""
    rows = [torch.randint(3, 380, (1, 8 + 3 * r), generator=torch.Generator().manual_seed(r))
            for r in range(2)]  # fmt: skip
    settings = TrainerSettings(optimizer=optimizer, lr=1e-2, clip=0.5)

    def steps(model, target, own, main, count=2):
        model.requires_grad_(True)
        model.extra.requires_grad_(True)
        trainable = list(model.parameters())
        parts = optim.build(model, settings, {target.vocab_size})
        optim.set_rate(parts, 0.5)
        for _ in range(count):
            for tokens in own:
                (target.forward(tokens).last @ model.extra).square().sum().backward()
            if len(own) == 2:  # processes make means of what is here a sum
                for value in trainable:
                    value.grad /= 2
            sharding.average(model)
            norms = sharding.clip(trainable, settings.clip)
            for part in parts.values():
                part.optimizer.step()
            model.zero_grad()
        weights = sharding.gathered(model.state_dict(), main)
        return norms, weights, sharding.gathered(optim.flatten(parts), main), parts

    def model_of(target):
        model = nn.Module()
        model.inner, model.extra = target.model, nn.Parameter(torch.ones(target.hidden_size, 2))
        return model

    whole = load(tiny.name)
    start = {name: value.clone() for name, value in model_of(whole).state_dict().items()}
    norm, weights, memory, _ = steps(model_of(whole), whole, rows, True)
    assert norm > settings.clip

    def work(accelerator):
        rank, main = accelerator.process_index, accelerator.is_main_process
        target = in_pieces(tiny.name, accelerator, trained=True)
        model = model_of(target)
        norms, got, remembered, parts = steps(model, target, rows[rank : rank + 1], main)
        torch.testing.assert_close(norms, norm)
        assert got.keys() == (weights.keys() if main else set())
        assert remembered.keys() == (memory.keys() if main else set())
        # Muon makes small singular values large, their rounding (bfloat16, where there are units
        # for it) with them.
        most = 0.05 if optimizer == "muon" else 1e-3
        for name in got:
            gap, way = (got[name] - weights[name]).norm(), (weights[name] - start[name]).norm()
            assert gap <= most * way, (name, gap, way)
        for name in remembered:
            assert remembered[name].shape == memory[name].shape, name
            torch.testing.assert_close(remembered[name], memory[name], atol=1e-5, rtol=1e-3)
        # And back: what one process wrote is cut again.
        optim.restore(parts, memory)
        back = sharding.gathered(optim.flatten(parts), main)
        assert all(torch.equal(back[name], memory[name]) for name in back)

    on_ranks(work)


def test_muon_refuses_no_piece(on_ranks):
    """Rows that two processes cannot share evenly, and fewer rows than processes."""
    grads = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (5, 1)]
    layers = [nn.Linear(4, n, bias=False) for n in (5, 1)]
    before = [layer.weight.detach().clone() for layer in layers]
    for layer, grad in zip(layers, grads, strict=True):
        layer.weight.grad = grad.clone()
    Muon([layer.weight for layer in layers], lr=0.1).step()

    def work(accelerator):
        decoder = nn.Module()
        decoder.layers = nn.ModuleList(nn.Linear(4, n, bias=False) for n in (5, 1))
        for layer, start in zip(decoder.layers, before, strict=True):
            layer.weight.data.copy_(start)
        sharding.shard(decoder, accelerator.device, None)
        weights = [layer.weight for layer in decoder.layers]
        for weight, grad in zip(weights, grads, strict=True):
            assert sharding.is_cut(weight)
            weight.grad = sharding.like(grad, weight)
        Muon(weights, lr=0.1).step()
        for weight, layer in zip(weights, layers, strict=True):
            torch.testing.assert_close(sharding.whole(weight), layer.weight)

    on_ranks(work)


def test_nothing_is_spread_for_one_process(capsys):
    alone = Accelerator(cpu=True)
    assert not spread.wanted("auto", False, True, alone)
    assert capsys.readouterr().err == ""
    for choice, asked_for in ((True, False), ("auto", True)):
        assert not spread.wanted(choice, asked_for, True, alone)
        assert "there is one process" in capsys.readouterr().err
    assert not spread.wanted(False, True, True, alone)

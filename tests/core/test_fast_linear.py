"""fast_linear is F.linear, forward and backward, whichever product it uses."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F

from spectrain.core import fast_linear as module
from spectrain.core.fast_linear import FEWEST_ROWS, Linear, Weight, fast_linear, laid_out
from spectrain.core.packing import can_pack


@pytest.fixture
def onednn(monkeypatch):
    if not can_pack():
        pytest.skip("this torch has no oneDNN operators")
    monkeypatch.setattr(module, "preferred", lambda: True)


@pytest.mark.parametrize("rows", [1, FEWEST_ROWS, FEWEST_ROWS + 17, 256])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients(onednn, rows, with_bias):
    torch.manual_seed(0)
    results = []
    for function in (fast_linear, F.linear):
        torch.manual_seed(1)
        x = torch.randn(rows, 24, requires_grad=True)
        weight = torch.randn(40, 24, requires_grad=True)
        bias = torch.randn(40, requires_grad=True) if with_bias else None
        y = function(x, weight, bias)
        (y * torch.randn(rows, 40)).sum().backward()
        results.append([y.detach(), x.grad, weight.grad, bias.grad if with_bias else None])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-4)


def test_shapes_strides_and_frozen_tensors(onednn):
    torch.manual_seed(0)
    layer = Linear(24, 40).requires_grad_(False)
    x = torch.randn(3, 24, 200).transpose(1, 2).requires_grad_()
    y = layer(x)
    assert y.shape == (3, 200, 40)
    y.square().sum().backward()
    assert layer.weight.grad is None
    expected = x.detach().requires_grad_()
    F.linear(expected, layer.weight, layer.bias).square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad, rtol=1e-5, atol=1e-3)
    # A gradient that is an expanded scalar, as of a sum.
    assert torch.autograd.grad(layer(x).sum(), x)[0].shape == x.shape


def test_other_types_take_the_plain_way(onednn):
    x, weight = torch.randn(100, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    assert torch.equal(fast_linear(x, weight), F.linear(x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert fast_linear(x.float(), weight.float()).dtype == torch.bfloat16
    assert fast_linear(torch.randn(0, 8), torch.randn(4, 8)).shape == (0, 4)


def test_a_graph_keeps_no_layout_of_a_single_call(onednn, monkeypatch):
    """A copy of every weight would wait for the backward pass, which needs the other layout."""
    made, pack = [], module._pack

    def watched(right):
        made.append(pack(right))
        return made[-1]

    monkeypatch.setattr(module, "_pack", watched)
    y = fast_linear(torch.randn(100, 24, requires_grad=True), torch.randn(40, 24))
    alive = [weakref.ref(value) for value in made]
    made.clear()
    assert y.requires_grad
    assert len(alive) == 1
    assert alive[0]() is None


def test_a_weight_that_is_laid_out_once_gives_the_same(onednn):
    torch.manual_seed(0)
    layer, x = Linear(24, 40), torch.randn(100, 24, requires_grad=True)
    alone = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
    with laid_out(layer):
        for _ in range(2):  # the second time from what was kept
            again = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
            assert all(torch.equal(one, other) for one, other in zip(alone, again, strict=True))
    assert layer.laid_out is None


def test_a_weight_must_not_change_while_it_is_laid_out(onednn):
    layer, x = Linear(24, 40), torch.randn(100, 24)
    with laid_out(layer):
        layer(x)
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(AssertionError, match="changed"):
            layer(x)


def test_inference_mode(onednn):
    with torch.inference_mode():
        layer, x = Linear(24, 40), torch.randn(100, 24)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
        found = Weight(torch.ones(70, 3)).times(torch.ones(80, 3))
        assert torch.equal(found, torch.full((80, 70), 3.0))

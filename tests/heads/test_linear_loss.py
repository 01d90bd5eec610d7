"""The loss that keeps no logits says what the plain one says, gradients included."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from spectrain.heads.linear_loss import linear_cross_entropy, linear_row_loss
from spectrain.heads.losses import ROW_LOSSES

ROWS, HIDDEN, TOKENS = 7, 5, 11


def inputs(dtype=torch.float64, *, soft: bool):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    taught = draw(ROWS, TOKENS).softmax(-1) if soft else torch.arange(ROWS) % TOKENS
    keep = torch.tensor([True, True, False, True, True, False, True])
    weights = [draw(ROWS, HIDDEN), draw(TOKENS, HIDDEN), draw(TOKENS)]
    return [value.requires_grad_() for value in weights], taught, keep


def plain(hidden, weight, bias, taught, keep, softcap):
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    rows = F.cross_entropy(logits, taught, reduction="none")
    return rows[keep].sum(), logits.argmax(-1)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("chunk", [1, 3 * TOKENS, 1 << 20], ids=["one row", "three rows", "all"])
def test_loss_choices_and_gradients_are_the_plain_ones(softcap, soft, chunk):
    weights, taught, keep = inputs(soft=soft)
    expected, first = plain(*weights, taught, keep, softcap)
    wanted = torch.autograd.grad(expected * 3, weights)
    loss, choice = linear_cross_entropy(
        *weights, lambda start, stop: taught[start:stop], keep, softcap=softcap, chunk=chunk
    )
    torch.testing.assert_close(loss, expected)
    assert torch.equal(choice, first)
    for got, value in zip(torch.autograd.grad(loss * 3, weights), wanted, strict=True):
        torch.testing.assert_close(got, value)


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_gradients_equal_finite_differences(soft):
    weights, taught, keep = inputs(soft=soft)

    def loss(hidden, weight, bias):
        return linear_cross_entropy(
            hidden, weight, bias, lambda a, b: taught[a:b], keep, softcap=2.0, chunk=2 * TOKENS
        )[0]

    assert torch.autograd.gradcheck(loss, weights)


def test_teachers_that_do_not_sum_to_one():
    """A row without a teacher is a row of zeros: no loss, no gradient."""
    weights, taught, keep = inputs(soft=True)
    taught[0] = 0
    taught[1] *= 0.5
    loss, _ = linear_cross_entropy(*weights, lambda a, b: taught[a:b], keep)
    expected, _ = plain(*weights, taught, keep, None)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, weights)
    for got, value in zip(torch.autograd.grad(loss, weights), wanted, strict=True):
        torch.testing.assert_close(got, value)


def test_rows_that_are_left_out_may_hold_anything():
    weights, taught, keep = inputs(soft=False)
    hidden, weight, bias = weights
    with torch.no_grad():
        hidden[2] = float("inf")
    loss, _ = linear_cross_entropy(hidden, weight, bias, lambda a, b: taught[a:b], keep)
    gradient = torch.autograd.grad(loss, hidden)[0]
    assert loss.isfinite()
    assert gradient[keep].isfinite().all()


def test_no_rows_is_a_zero_with_a_graph():
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    weight = torch.zeros(TOKENS, HIDDEN)
    none = torch.zeros(0, dtype=torch.int64)
    loss, choice = linear_cross_entropy(hidden, weight, None, lambda a, b: none, none.bool())
    loss.backward()
    assert loss == 0
    assert hidden.grad.shape == hidden.shape
    assert choice.tolist() == []


def test_under_autocast_products_are_lower_and_sums_are_not():
    weights, taught, keep = inputs(torch.float32, soft=False)
    hidden, weight, bias = weights
    expected, _ = plain(hidden, weight, bias, taught, keep, None)
    wanted = torch.autograd.grad(expected, [hidden, weight])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, bias, lambda a, b: taught[a:b], keep)
    gradients = torch.autograd.grad(loss, [hidden, weight])
    assert loss.dtype == torch.float32
    assert loss != expected  # the product really was a bfloat16 one
    torch.testing.assert_close(loss, expected, atol=0.05, rtol=0.02)
    for got, value in zip(gradients, wanted, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, value, atol=0.05, rtol=0.05)


def test_a_frozen_weight_gets_no_gradient_and_costs_none():
    weights, taught, keep = inputs(soft=False)
    hidden, weight, _ = weights
    loss, _ = linear_cross_entropy(hidden, weight.detach(), None, lambda a, b: taught[a:b], keep)
    kept = [value for value in loss.grad_fn.saved_tensors if value is not None]
    assert [value.shape for value in kept] == [hidden.shape]


def test_only_one_chunk_of_logits_exists_at_a_time():
    """The largest tensor made on the way is one chunk of logits, not all rows of them."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(
                t.numel() for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t)
            )
            return out

    rows, tokens, chunk = 64, 1000, 8000
    hidden = torch.randn(rows, HIDDEN, requires_grad=True)
    weight = torch.randn(tokens, HIDDEN)
    labels, keep = torch.arange(rows), torch.ones(rows, dtype=torch.bool)
    with Watch():
        loss, _ = linear_cross_entropy(
            hidden, weight, None, lambda a, b: labels[a:b], keep, chunk=chunk
        )
        loss.backward()
    assert max(sizes) == chunk > weight.numel()


def test_the_memory_benchmark_compares_like_with_like():
    """Its methods give one loss and one gradient, and its table names them all."""
    path = Path(__file__).parents[2] / "scripts" / "bench_mtp_memory.py"
    spec = importlib.util.spec_from_file_location("bench_mtp_memory", path)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    weight, labels = torch.randn(TOKENS, HIDDEN), torch.arange(ROWS)
    start, results = torch.randn(3, ROWS, HIDDEN), []
    for method in bench.METHODS:
        hidden = start.clone().requires_grad_()
        results.append((bench.run(method, hidden, weight, labels), hidden.grad))
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        torch.testing.assert_close(gradient, results[0][1])
    options = argparse.Namespace(
        method="chunked",
        device="cpu",
        autocast=False,
        heads=2,
        rows=ROWS,
        vocabulary=TOKENS,
        hidden=5,
    )
    assert bench.measure(options)["peak_mb"] > 0
    rows = [{"method": name, "mb": 1.0, "loss": 2.0} for name in bench.METHODS]
    report = vars(options) | {"results": rows, "one_head_of_logits_mb": 3.0}
    assert all(name in bench.render(report) for name in bench.METHODS)


@pytest.mark.parametrize("loss", ROW_LOSSES)
@pytest.mark.parametrize("trained", [True, False], ids=["weight trained", "frozen"])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_any_row_loss_in_chunks_equals_the_whole(loss, trained, rows):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 4, generator=generator, requires_grad=True)
    weight = torch.randn(9, 4, generator=generator).requires_grad_(trained)
    teacher = torch.randn(rows, 9, generator=generator).softmax(-1)
    keep = torch.rand(rows, generator=generator) < 0.7
    whole = torch.where(keep, ROW_LOSSES[loss](hidden @ weight.T, teacher), 0).sum()
    total, choice = linear_row_loss(
        hidden, weight, lambda a, b: teacher[a:b], keep, ROW_LOSSES[loss], chunk=2 * 9
    )
    torch.testing.assert_close(total, whole)
    assert torch.equal(choice, (hidden @ weight.T).argmax(-1))
    wanted = [hidden, weight] if trained else [hidden]
    got, expected = (torch.autograd.grad(x * 3, wanted) for x in (total, whole))
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two)
    with torch.no_grad():
        quiet, _ = linear_row_loss(
            hidden, weight, lambda a, b: teacher[a:b], keep, ROW_LOSSES[loss], chunk=2 * 9
        )
    assert torch.equal(quiet, total.detach())

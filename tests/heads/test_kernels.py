"""The Triton kernels, run as Python on the CPU, against plain torch in float64."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from tiny_models import gemma, make_batch, make_head, random_rows

from spectrain.heads import kernels
from spectrain.heads.linear_loss import linear_cross_entropy

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # infinities, on purpose
]

KEEP = torch.tensor([True, True, False, True, True, False, True])
PLACE = torch.tensor([3, 0, 1, 1, 3, 2, 0])
KINDS = ("logits", "shares", "labels")
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Rows of tens of columns are several blocks."""
    monkeypatch.setattr(kernels, "BLOCK", 16)


@pytest.fixture
def forced(monkeypatch):
    """As on CUDA, three blocks to a row of a tiny vocabulary; the names of the kernels called."""
    calls, launch = [], kernels._launch

    def counted(name, *rest, **fixed):
        calls.append(name)
        launch(name, *rest, **fixed)

    monkeypatch.setattr(kernels, "_launch", counted)
    monkeypatch.setattr(kernels, "BLOCK", 128)
    monkeypatch.setattr(kernels, "usable", lambda rows: True)
    return calls


def draw(rows, columns, dtype, seed=0):
    """Spread as logits of a model are."""
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)).to(dtype)


def teach(kind, columns, dtype):
    """What is taught, and the distributions [R, D] in float64 that it stands for."""
    rows = len(KEEP)
    if kind == "logits":
        teacher = draw(4, columns, dtype, seed=1)
        return teacher, teacher.double().softmax(-1)[PLACE]
    if kind == "labels":
        labels = torch.arange(rows) * 5 % columns
        return labels, F.one_hot(labels, columns).double()
    shares = draw(rows, columns, torch.float64, seed=2).softmax(-1)
    shares[0], shares[1] = 0, shares[1] / 2  # no teacher; mass outside of the columns
    shares = shares.to(torch.promote_types(dtype, torch.float32))
    return shares, shares.double()


def by_kernel(kind, logits, taught, keep=KEEP, place=PLACE):
    """losses, choices, gradients"""
    slope = logits.clone()
    if kind == "logits":
        norm = kernels.log_norm(taught)
        return *kernels.soft_cross_entropy_(slope, taught, norm, place, keep), slope
    return *kernels.cross_entropy_(slope, taught, keep), slope


def by_torch(logits, shares, keep=KEEP):
    exact = logits.double().requires_grad_()
    losses = torch.where(keep, F.cross_entropy(exact, shares, reduction="none"), 0)
    (grad,) = torch.autograd.grad(losses.sum(), exact)
    return losses.detach(), grad


def require_close(got, wanted, dtype):
    """To the rounding of sums (float32, or float64 of float64), then to that of `dtype`."""
    error = 1e-13 if dtype == torch.float64 else 3e-6
    step = torch.finfo(dtype).eps
    rounding = 2e-8 if dtype == torch.float16 else 0  # half its smallest number is lost
    torch.testing.assert_close(got.double(), wanted, atol=error + rounding, rtol=2 * step + error)


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 48, 100])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_choices_and_gradients_are_the_plain_ones(kind, dtype, columns):
    logits = draw(len(KEEP), columns, dtype)
    taught, shares = teach(kind, columns, dtype)
    losses, choices, grads = by_kernel(kind, logits, taught)
    wanted, slope = by_torch(logits, shares)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    require_close(losses, wanted, losses.dtype)
    assert torch.equal(choices, logits.argmax(-1))
    assert grads.dtype == dtype
    require_close(grads, slope, dtype)
    assert not grads[~KEEP].any()


@pytest.mark.parametrize("columns", [4096, 9001])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_as_they_are_on_a_gpu(kind, columns, monkeypatch):
    monkeypatch.undo()
    assert kernels.BLOCK == 4096
    logits = draw(len(KEEP), columns, torch.float32)
    taught, shares = teach(kind, columns, torch.float32)
    losses, choices, grads = by_kernel(kind, logits, taught)
    wanted, slope = by_torch(logits, shares)
    torch.testing.assert_close(losses.double(), wanted, atol=0, rtol=2e-6)
    assert torch.equal(choices, logits.argmax(-1))
    require_close(grads, slope, torch.float32)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norms(dtype):
    logits = draw(5, 40, dtype)
    logits[1, :20] = float("-inf")  # a whole block of what is impossible
    logits[2] = 1e4 if dtype == torch.float16 else 1e30
    logits[3] = -logits[2]
    norms = kernels.log_norm(logits)
    assert norms.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(norms.double(), logits.double().logsumexp(-1), atol=1e-5, rtol=1e-6)


def test_of_equals_the_first_is_the_choice():
    """Drawn from three values, a row of 50 columns has its greatest many times, in all blocks."""
    logits = torch.randint(0, 3, (7, 50), generator=torch.Generator().manual_seed(0)).float()
    logits[4] = 1
    taught, _ = teach("labels", 50, torch.float32)
    _, choices, _ = by_kernel("labels", logits, taught)
    first = [row.index(max(row)) for row in logits.tolist()]
    assert choices.tolist() == first
    assert first[4] == 0


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_left_out_may_hold_anything(kind, value):
    logits, (taught, shares) = draw(7, 40, torch.float32), teach(kind, 40, torch.float32)
    wanted, slope = by_torch(logits, shares)
    logits[2], logits[5, 20] = value, value
    if kind == "logits":
        taught[2] = value  # row 5's
    losses, choices, grads = by_kernel(kind, logits, taught)
    require_close(losses, wanted, torch.float32)
    require_close(grads, slope, torch.float32)
    assert ((choices >= 0) & (choices < 40)).all()  # they are looked up in tables


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_is_not_hidden(kind):
    """A broken row that counts must be seen in the loss: the training loop looks there."""
    for number, column in ((0, 0), (3, 39)):
        logits, (taught, _) = draw(7, 40, torch.float32), teach(kind, 40, torch.float32)
        logits[number, column] = float("nan")
        losses, _, grads = by_kernel(kind, logits, taught)
        assert losses.isnan().nonzero().tolist() == [[number]]
        assert grads[number].isnan().all()
    if kind != "labels":
        logits, (taught, _) = draw(7, 40, torch.float32), teach(kind, 40, torch.float32)
        taught[3, 20] = float("nan")
        losses, _, _ = by_kernel(kind, logits, taught)
        assert losses.isnan().any()


def test_an_impossible_token_that_is_not_taught_costs_nothing():
    logits = draw(7, 40, torch.float32)
    labels, _ = teach("labels", 40, torch.float32)
    logits[0, 16:] = logits[1, :16] = float("-inf")
    labels[0], labels[1] = 3, 30
    losses, _, grads = by_kernel("labels", logits, labels)
    wanted, slope = by_torch(logits[:2], labels[:2], KEEP[:2])
    require_close(losses[:2], wanted, torch.float32)
    require_close(grads[:2], slope, torch.float32)
    shares = F.one_hot(labels, 40).float()
    for one, other in zip(by_kernel("shares", logits, shares), (losses, _, grads), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_at_all(kind):
    taught, _ = teach(kind, 40, torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    taught = taught if kind == "logits" else taught[:0]
    found = by_kernel(kind, torch.zeros(0, 40), taught, none.bool(), none)
    assert [value.shape for value in found] == [(0,), (0,), (0, 40)]


def test_rows_have_to_lie_one_behind_the_other():
    with pytest.raises(ValueError, match="one behind the other"):
        kernels.log_norm(torch.zeros(4, 3).t())


# ── in the places that use them ──────────────────────────────────────────────


def trained(head, batch, scale, autocast=False):
    """The objective and all gradients."""
    head.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = head.train()(batch, scale)
    (3 * found.total).backward()
    return found, {name: p.grad.clone() for name, p in head.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "reduced", "softcap", "frozen", "no anchor"])
def test_training_time_test_is_the_same(kind, autocast, request, tmp_path, monkeypatch):
    tokenizer = request.getfixturevalue("tokenizer")
    target = gemma(tmp_path, tokenizer) if kind == "softcap" else request.getfixturevalue("tiny")
    options = {"reduced": {"draft_vocab": 300}, "frozen": {"train_lm_head": False}}.get(kind, {})
    head = make_head(target, steps=3, **options)
    tokens, reply = random_rows(torch.Generator().manual_seed(8))
    batch = make_batch(target, head, tokens, reply & (kind != "no anchor"))
    scale = torch.tensor([0.5, 0.3, 0.1])
    wanted, slopes = trained(head, batch, scale, autocast)
    calls = request.getfixturevalue("forced")
    found, got = trained(head, batch, scale, autocast)
    assert set(calls) == {"log_norms", "row_losses"}
    torch.testing.assert_close(found.loss, wanted.loss)
    for name in ("count", "hits", "seen"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    # Slopes are float32 on both ways, and rounded to bfloat16 once, products after them as well.
    for name, slope in slopes.items():
        error = 2e-2 * float(slope.abs().max()) if autocast else 1e-5
        torch.testing.assert_close(got[name], slope, atol=error, rtol=1e-3)


@pytest.mark.parametrize("kind", ["shares", "labels"])
@pytest.mark.parametrize("chunk", [1, 3 * 40, 1 << 20], ids=["one row", "three rows", "all"])
def test_a_linear_layer_and_its_loss_are_the_same(kind, chunk, forced, monkeypatch):
    taught, _ = teach(kind, 40, torch.float64)
    shapes = ((7, 5), (40, 5), (1, 40))
    hidden, weight, bias = (draw(*shape, torch.float64).div(4) for shape in shapes)
    weights = [value.requires_grad_() for value in (hidden, weight, bias[0])]
    found, first = linear_cross_entropy(*weights, taught, KEEP, chunk=chunk)
    assert len(forced) == -(-7 // max(1, chunk // 40))
    got = torch.autograd.grad(3 * found, weights)
    monkeypatch.setattr(kernels, "usable", lambda rows: False)
    wanted, choice = linear_cross_entropy(*weights, taught, KEEP, chunk=chunk)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(first, choice)
    for one, other in zip(got, torch.autograd.grad(3 * wanted, weights), strict=True):
        torch.testing.assert_close(one, other)


def test_a_soft_cap_takes_torchs_way(forced):
    """Its slope would be one more thing to multiply by; the kernels know none."""
    weights = [draw(7, 5, torch.float32), draw(40, 5, torch.float32), None]
    linear_cross_entropy(*weights, teach("labels", 40, torch.float32)[0], KEEP, softcap=2.0)
    assert not forced

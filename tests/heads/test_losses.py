"""Row losses: by hand, against slow code with its gradients, and where acceptance vanishes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.heads.losses import ROW_LOSSES


def slow(name: str, logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """One row, token by token; λ of lk_lambda is a plain number."""
    total = sum(value.exp() for value in logits)
    q = [value.exp() / total for value in logits]
    p = [float(value) for value in teacher]
    alpha = sum(torch.minimum(b, b.new_tensor(a)) for a, b in zip(p, q, strict=True))
    if name == "soft_ce":
        return -sum(a * b.log() for a, b in zip(p, q, strict=True))
    if name == "tv":
        return 1 - alpha
    if name == "lk_alpha":
        return -alpha.log()
    if name == "lk_lambda":
        share = math.exp(-3 * alpha.item())
        kl = sum(a * (math.log(a) - b.log()) for a, b in zip(p, q, strict=True) if a)
        return share * kl + (1 - share) * (1 - alpha)
    return sum(b * (b.log() - math.log(max(a, 1e-8))) for a, b in zip(p, q, strict=True))


def random_rows(seed: int, rows: int = 5, width: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    teacher = (2 * torch.randn(rows, width, generator=generator, dtype=torch.float64)).softmax(-1)
    teacher[0, :3] = 0  # impossible tokens
    return logits.requires_grad_(), teacher / teacher.sum(-1, keepdim=True)


every_loss = pytest.mark.parametrize("name", ROW_LOSSES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("soft_ce", math.log(4)),
        ("tv", 0.5),
        ("lk_alpha", math.log(2)),
        ("lk_lambda", math.exp(-1.5) * math.log(2) + (1 - math.exp(-1.5)) * 0.5),
        ("reverse_kl", 0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - math.log(1e-8))),
    ],
)
def test_by_hand(name, expected):
    """p = ½ ½ 0, q = ¼ ¼ ½: they share half of their mass."""
    teacher = torch.tensor([[0.5, 0.5, 0.0]])
    logits = torch.tensor([[0.25, 0.25, 0.5]]).log() + 3
    assert ROW_LOSSES[name](logits, teacher).tolist() == pytest.approx([expected], rel=1e-5)


@every_loss
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_value_and_gradient_equal_slow_code(name, seed):
    logits, teacher = random_rows(seed)
    fast = ROW_LOSSES[name](logits, teacher)
    expected = torch.stack([slow(name, *row) for row in zip(logits, teacher, strict=True)])
    torch.testing.assert_close(fast, expected)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    got, wanted = (torch.autograd.grad((x * weights).sum(), logits)[0] for x in (fast, expected))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", sorted(ROW_LOSSES.keys() - {"lk_lambda"}))
def test_gradient_equals_finite_differences(name):
    """All but lk_lambda, whose λ has by design no gradient (it is in the comparison above)."""
    logits, teacher = random_rows(1)
    assert torch.autograd.gradcheck(lambda x: ROW_LOSSES[name](x, teacher), logits)


@every_loss
def test_nothing_shared_and_no_teacher_stay_finite(name):
    """α → 0 in float32, and a row of zeros for p, which is masked: 0 · ∞ would be NaN."""
    logits = torch.full((3, 6), -150.0)
    logits[0, 0] = logits[1, 1] = logits[2, 2] = 150.0
    logits.requires_grad_()
    teacher = torch.zeros(3, 6)
    teacher[0, 5] = 1
    teacher[1, 1] = 1  # agrees
    rows = ROW_LOSSES[name](logits, teacher)
    assert rows.isfinite().all()
    assert rows[0] > rows[1] - 1e-6
    gradient = torch.autograd.grad(rows.sum(), logits)[0]
    assert gradient.isfinite().all()


def test_vanishing_acceptance_still_teaches():
    """−log α pulls at full strength where α is no float any more; 1 − α has gone flat."""
    logits = torch.tensor([[150.0, -150.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 1.0]])
    pull = {
        name: torch.autograd.grad(ROW_LOSSES[name](logits, teacher).sum(), logits)[0][0, 1]
        for name in ("lk_alpha", "lk_lambda", "tv")
    }
    assert pull["lk_alpha"] == pytest.approx(-1.0)
    assert pull["lk_lambda"] == pytest.approx(-1.0)
    assert pull["tv"] == 0


@every_loss
def test_low_precision_is_widened(name):
    logits, teacher = (x.detach().bfloat16() for x in random_rows(2))
    rows = ROW_LOSSES[name](logits, teacher)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, ROW_LOSSES[name](logits.float(), teacher.float()))

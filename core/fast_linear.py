"""A linear layer for training on CPUs that uses oneDNN's matrix product where it is the faster one.

torch multiplies float32 matrices with MKL, which leaves the AVX-512 units of other makers' CPUs
idle. oneDNN uses them. Measured on two cores of an AMD EPYC with AVX-512, 600 and 1600 rows, the
shapes of a 135M model: 1.7–2.4 times as fast forward, 1.6–2.2 times backward, all the copies that
oneDNN's layout needs included. On AVX2 both are equally fast.

oneDNN wants the right matrix in a layout of its own. A weight that meets many rows in turn is laid
out once (`Weight`): a tenth of the time of a step, where products have 600 rows.

R rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spectrain.core.environment import cpu_model
from spectrain.core.packing import can_pack

# Below this the copies cost more than the product saves.
FEWEST_ROWS = 64


class Linear(nn.Linear):
    """nn.Linear by `fast_linear`."""

    laid_out: Weight | None = None

    def forward(self, x: Tensor) -> Tensor:
        return fast_linear(x, self.weight, self.bias, self.laid_out)


class Weight:
    """A matrix [O, I] in oneDNN's layouts, each made when it is first asked for and kept."""

    def __init__(self, value: Tensor) -> None:
        self.value = value.detach()
        self._version = _version(self.value)
        self._kept: dict[str, Tensor] = {}

    def times(self, left: Tensor) -> Tensor:
        """left [R, I] · valueᵀ → [R, O], where no gradient is asked for."""
        if not _worth(left, self.value):
            return left @ self.value.t()
        return _multiply(left, self.laid_out("plain"))

    def back(self, grad: Tensor) -> Tensor:
        """grad [R, O] · value → [R, I], where no gradient is asked for."""
        if not _worth(grad, self.value):
            return grad @ self.value
        return _multiply(grad, self.laid_out("turned"))

    def laid_out(self, side: str) -> Tensor:
        """side: plain for products with the value's transpose, turned for those with the value."""
        assert _version(self.value) == self._version, "the weight changed while it was laid out"
        if side not in self._kept:
            self._kept[side] = _pack(self.value if side == "plain" else self.value.t())
        return self._kept[side]


@contextmanager
def laid_out(module: nn.Module) -> Iterator[None]:
    """Inside, the weights of all `Linear` below `module` stay as they are and are laid out once."""
    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    for layer in layers:
        layer.laid_out = Weight(layer.weight)
    try:
        yield
    finally:
        for layer in layers:
            layer.laid_out = None


def fast_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, kept: Weight | None = None
) -> Tensor:
    """x [..., I], weight [O, I], bias [O] → [..., O]: F.linear to rounding, on every device.

    kept: the same weight, where it is laid out once for many calls.
    """
    rows = x.numel() // max(1, x.shape[-1])
    if rows < FEWEST_ROWS or not suits(x, weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x.reshape(rows, -1), weight, bias, kept).view(*x.shape[:-1], len(weight))


def fast_product(left: Tensor, right: Tensor) -> Tensor:
    """left [..., R, I] · right [..., O, I]ᵀ → [..., R, O], where no gradient is asked for."""
    if left.ndim > 2 or not _worth(left, right):
        return left @ right.mT
    return _multiply(left, _pack(right))


def _worth(left: Tensor, right: Tensor) -> bool:
    return len(left) >= FEWEST_ROWS and left.shape[1] > 0 and suits(left, right)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether their product is one for oneDNN, if they are matrices."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and preferred()
    )


@cache
def preferred() -> bool:
    """Whether oneDNN is the faster one here. A rule and no measurement: two runs on one machine
    have to round alike."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and can_pack() and "intel" not in cpu_model().lower()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, kept: Weight | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kept = kept  # a layout for this call alone would only wait in the graph
        return _multiply(x, (kept or Weight(weight)).laid_out("plain"), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # autograd checks that the weight has not changed
        to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_x = (ctx.kept or Weight(weight)).back(grad) if to_x else None
        grad_weight = fast_product(grad.t(), x.t()) if to_weight else None
        return grad_x, grad_weight, grad.sum(0) if to_bias else None, None


def _version(value: Tensor) -> int:
    """Counts changes in place; of a tensor made in inference mode nobody does."""
    return 0 if value.is_inference() else value._version


def _pack(right: Tensor) -> Tensor:
    """right [O, I] in the layout of a right matrix; a transposed view is read as it lies."""
    return torch.ops.mkldnn._reorder_linear_weight(_dense(right.detach()), len(right))


def _multiply(left: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """left [R, I] · packedᵀ + bias → [R, O]"""
    return torch.ops.mkldnn._linear_pointwise(_dense(left), packed, bias, "none", [], "")


def _dense(matrix: Tensor) -> Tensor:
    """In rows or in columns without gaps, as oneDNN can read it."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()

"""Linear layers whose weights are kept as int8: y = x Wᵀ + b with W[o] ≈ scale[o] · q[o].

A pass over a few tokens waits for the weights to be read; these are a quarter of float32's bytes.
The product is torch's own operator for them, which multiplies bfloat16 inputs: casts are inside
the layer, so that residual stream, cache and heads keep their type (float32 on a CPU). Within one
route a row's result does not depend on the rows beside it: a verify pass says what single steps
would have said. For inference only. Written for any device that has the operator, tried on CPUs.

R rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.core.errors import SpectrainError

KINDS = ("int8",)
# The CPU operator reads past the end of a row that is no multiple of this, or takes it wrong.
_STEP = 16
# From here on widening the weights for a usual product costs less than the operator's slower one.
MANY_ROWS = 96


class QuantisedLinear(nn.Module):
    """nn.Linear with int8 weights; input and output keep their type."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        # The scale is rounded first and the weights by the rounded one: each is then off by half
        # a scale at most. Rounded down, the largest may come to 127.5 scales: still within that.
        largest = weight.abs().amax(dim=1).clamp(min=1e-30)
        scale = (largest / 127).to(torch.bfloat16)
        quantised = (weight / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.register_buffer("quantised", quantised)  # [O, I]
        self.register_buffer("scale", scale)  # [O]
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] → [..., O]"""
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if len(rows) < MANY_ROWS:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.quantised, self.scale).to(x.dtype)
        else:
            wide = self.quantised.to(torch.bfloat16)  # exact
            y = F.linear(rows, wide).to(x.dtype) * self.scale.to(x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def require(kind: str, device: torch.device | str, dtype: torch.dtype | str) -> None:
    """Raise SpectrainError unless weights of this kind can be used there; "auto" is any dtype."""
    if kind not in KINDS:
        raise SpectrainError(
            f"unknown quantisation {kind!r}", fix=f"choose {' or '.join(KINDS)}, or leave it out"
        )
    key = torch.device(device).type.upper()
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_weight_int8pack_mm", key):
        raise SpectrainError(
            f"torch {torch.__version__} has no int8 product for {device}",
            fix="leave out the quantisation",
        )
    if dtype == torch.float16:
        raise SpectrainError(
            "quantised layers compute in bfloat16, float16 cannot be kept",
            fix="choose the dtype float32 or bfloat16",
        )


def fits(module: nn.Module) -> bool:
    """Whether the operator takes this layer."""
    return isinstance(module, nn.Linear) and module.in_features % _STEP == 0


def quantise(module: nn.Module, kind: str) -> int:
    """Replace every nn.Linear below `module` that fits; returns how many were replaced."""
    first = next(module.parameters())
    require(kind, first.device, first.dtype)
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if fits(child):
                setattr(parent, name, QuantisedLinear(child))
                count += 1
    return count

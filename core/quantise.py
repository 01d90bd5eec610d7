"""Linear layers whose weights are kept in few bits: y = x Wᵀ + b with rounded W.

int8: W[o] ≈ scale[o] · q[o]. int4: for each 32 inputs W ≈ scale · (q − 8) + zero; the output layer
is kept as int8 then (as int4 it cost more than it saved). What both cost is in docs/LOG.md: int8
next to nothing, int4 little for weights that came from a Q4_1 file and much for others.

A pass over a few tokens waits for the weights to be read; these are a quarter of float32's bytes,
or 5/32. The products are torch's own operators for them, which multiply bfloat16 inputs: casts are
inside the layer, so that residual stream, cache and heads keep their type (float32 on a CPU).
Within one route (int4 has one) a row's result does not depend on the rows beside it: a verify pass
says what single steps would have said. For inference only. int8 is written for any device that has
the operator, tried on CPUs; int4's operator is the CPU's.

R rows, I inputs, O outputs, G = I / 32 groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.core.errors import SpectrainError

# From here on widening int8 weights for a usual product costs less than the operator's slower one.
MANY_ROWS = 96
GROUP = 32


class QuantisedLinear(nn.Module):
    """nn.Linear with rounded weights; input and output keep their type. A kind says what it takes
    (I and O must be multiples of `inputs` and `outputs`), how it rounds and how it multiplies."""

    operator: str
    inputs: int
    outputs: int

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())
        self._keep(linear.weight.detach().float())

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Whether the operator takes this layer."""
        return (
            isinstance(module, nn.Linear)
            and module.in_features % cls.inputs == 0
            and module.out_features % cls.outputs == 0
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] → [..., O]"""
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        y = self._product(rows).to(x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def _keep(self, weight: Tensor) -> None:
        """Round weight [O, I] float32 into buffers."""
        raise NotImplementedError

    def _product(self, rows: Tensor) -> Tensor:
        """rows [R, I] bfloat16 → [R, O]"""
        raise NotImplementedError


class Int8Linear(QuantisedLinear):
    """A scale for each output."""

    operator = "aten::_weight_int8pack_mm"
    # It reads past the end of a row that is no multiple of this, or takes it wrong.
    inputs, outputs = 16, 1

    def _keep(self, weight: Tensor) -> None:
        # The scale is rounded first and the weights by the rounded one: each is then off by half
        # a scale at most. Rounded down, the largest may come to 127.5 scales: still within that.
        largest = weight.abs().amax(dim=1).clamp(min=1e-30)
        scale = (largest / 127).to(torch.bfloat16)
        quantised = (weight / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.register_buffer("quantised", quantised)  # [O, I]
        self.register_buffer("scale", scale)  # [O]

    def _product(self, rows: Tensor) -> Tensor:
        if len(rows) < MANY_ROWS:
            return torch.ops.aten._weight_int8pack_mm(rows, self.quantised, self.scale)
        wide = self.quantised.to(torch.bfloat16)  # exact
        return F.linear(rows, wide).float() * self.scale.float()


class Int4Linear(QuantisedLinear):
    """A scale and a zero point for each output and group of inputs."""

    operator = "aten::_weight_int4pack_mm_for_cpu"
    inputs, outputs = GROUP, 16

    def _keep(self, weight: Tensor) -> None:
        codes, scales = in_groups(weight)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.register_buffer("packed", packed)  # [O, I / 2]
        self.register_buffer("scales", scales)  # [G, O, 2]

    def _product(self, rows: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales)


def in_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] → codes 0–15 [O, I] int32, scales and zeros [G, O, 2] bfloat16, so that
    weight ≈ scale · (code − 8) + zero, off by half a scale at most."""
    groups = weight.unflatten(1, (-1, GROUP))  # [O, G, 32]
    least, most = groups.amin(dim=-1), groups.amax(dim=-1)
    # Codes reach from 8 scales below zero to 7 above. Zero is rounded first, then the scale that
    # covers both ends from there: rounded down, an end is off by 8 · 2⁻⁸ scales, well below half.
    zero = (least + (most - least) * 8 / 15).to(torch.bfloat16)
    below, above = (zero.float() - least) / 8, (most - zero.float()) / 7
    scale = torch.maximum(below, above).clamp(min=1e-30).to(torch.bfloat16)
    steps = (groups - zero.float()[..., None]) / scale.float()[..., None]
    codes = (steps.round() + 8).clamp(0, 15).to(torch.int32).flatten(1)
    return codes, torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous()


KINDS: dict[str, type[QuantisedLinear]] = {"int8": Int8Linear, "int4": Int4Linear}


def require(kind: str, device: torch.device | str, dtype: torch.dtype | str) -> None:
    """Raise SpectrainError unless weights of this kind can be used there; "auto" is any dtype."""
    if kind not in KINDS:
        raise SpectrainError(
            f"unknown quantisation {kind!r}", fix=f"choose {' or '.join(KINDS)}, or leave it out"
        )
    key = torch.device(device).type.upper()
    if not torch._C._dispatch_has_kernel_for_dispatch_key(KINDS[kind].operator, key):
        raise SpectrainError(
            f"torch {torch.__version__} has no {kind} product for {device}",
            fix="leave out the quantisation",
        )
    if dtype == torch.float16:
        raise SpectrainError(
            "quantised layers compute in bfloat16, float16 cannot be kept",
            fix="choose the dtype float32 or bfloat16",
        )


def quantise(module: nn.Module, kind: str) -> int:
    """Replace every nn.Linear below `module` that fits; returns how many were replaced."""
    first = next(module.parameters())
    require(kind, first.device, first.dtype)
    made = KINDS[kind]
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if made.fits(child):
                setattr(parent, name, made(child))
                count += 1
    return count

"""Linear layers whose weights are laid out once for the CPU's matrix kernels.

torch repacks a float32 weight at every call, so a pass over 2–16 rows costs about twice a one-row
pass; with the weight reordered once for oneDNN it costs about 1.1–1.3 times. A speculative verify
pass lives or dies by that ratio. The operators are the ones torch's own compiler uses; where they
are missing, or on other devices and types, layers stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def can_pack() -> bool:
    """Whether this build of torch has the oneDNN operators."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class PackedLinear(nn.Module):
    """Inference only: y = x Wᵀ + b with W [out, in] in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack(module: nn.Module) -> int:
    """Replace every float32 CPU nn.Linear below `module`; returns how many were replaced."""
    if not can_pack():
        return 0
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear) or child.weight.device.type != "cpu":
                continue
            if child.weight.dtype == torch.float32:
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count

"""Parts that several heads share: norm, rotary positions, the decoder layer of EAGLE-3.

B batch, T length, n rows, H hidden, Q query heads, G kv heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm as RMSNorm
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.core.fast_linear import Linear

__all__ = ["MLP", "RMSNorm", "Rotary", "rotate"]


class Rotary(nn.Module):
    """Rotary positions with the target's own base and scaling (default, linear, llama3, yarn …)."""

    def __init__(self, head_dim: int, max_positions: int, parameters: dict[str, Any]) -> None:
        super().__init__()
        self._table = LlamaRotaryEmbedding(
            LlamaConfig(
                head_dim=head_dim,
                hidden_size=head_dim,
                num_attention_heads=1,
                max_position_embeddings=max_positions,
                rope_parameters=parameters,
            )
        )

    def _apply(self, fn: Callable, recurse: bool = True) -> Rotary:
        exact = self._table.inv_freq
        super()._apply(fn, recurse)
        # The device may change, the type not: rounded frequencies mistake far positions.
        self._table.inv_freq = exact.to(self._table.inv_freq.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [..., n] → cos, sin [..., n, d]"""
        flat = positions.reshape(1, -1)
        cos, sin = self._table(torch.empty(0, dtype=dtype, device=positions.device), flat)
        shape = (*positions.shape, cos.shape[-1])
        return cos.view(shape), sin.view(shape)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x [..., n, heads, d] by the angles of its positions: cos, sin [..., n, d]."""
    cos, sin = (part.unsqueeze(-2) for part in table)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), H → I → H."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

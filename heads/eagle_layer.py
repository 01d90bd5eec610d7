"""Decoder layers of the EAGLE heads, in pieces: both faces run the same code around attention.

H hidden, W width of what q/k/v read, I MLP width, Q query heads, G kv heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spectrain.core.fast_linear import Linear
from spectrain.heads import eagle3_init
from spectrain.heads.base import HeadConfig
from spectrain.heads.layers import MLP, RMSNorm, rotate


class EagleConfig(HeadConfig):
    """What every EAGLE head's config.json holds: the sizes of its layers, the target's own."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    step_decay: float


def sizes_of(target: Any) -> dict[str, Any]:
    """The sizes that an `EagleConfig` takes over from a core.target.Target."""
    model = target.config
    heads = model.num_attention_heads
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(model, "num_key_value_heads", None) or heads,
        "head_dim": getattr(model, "head_dim", None) or target.hidden_size // heads,
        "rms_norm_eps": getattr(model, "rms_norm_eps", 1e-6),
        "rope_parameters": eagle3_init.rope_parameters(model),
        "max_position_embeddings": model.max_position_embeddings,
    }


class _Projections(nn.Module):
    """q/k/v over W inputs, o back to H."""

    def __init__(self, config: EagleConfig, width: int) -> None:
        super().__init__()
        size = config.head_dim
        self.q_proj = Linear(width, config.num_attention_heads * size, bias=False)
        self.k_proj = Linear(width, config.num_key_value_heads * size, bias=False)
        self.v_proj = Linear(width, config.num_key_value_heads * size, bias=False)
        self.o_proj = Linear(config.num_attention_heads * size, config.hidden_size, bias=False)


class EntryLayer(nn.Module):
    """A Llama layer without its input norm: what q/k/v read comes from outside (EAGLE-1)."""

    def __init__(self, config: EagleConfig, width: int | None = None) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.size = config.head_dim
        self.self_attn = _Projections(config, width or hidden)
        self.mlp = MLP(hidden, config.intermediate_size)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)

    def query(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """[..., W] → [..., Q, d]"""
        return rotate(self.self_attn.q_proj(x).unflatten(-1, (-1, self.size)), table)

    def key_value(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[..., W] → keys, values [..., G, d]"""
        keys = self.self_attn.k_proj(x).unflatten(-1, (-1, self.size))
        values = self.self_attn.v_proj(x).unflatten(-1, (-1, self.size))
        return rotate(keys, table), values

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The un-normed residual [..., H] and the attention's output [..., Q·d] → [..., H]."""
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class PairLayer(EntryLayer):
    """EAGLE-3's first layer: reads an embedding and a hidden state side by side, W = 2·H."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def merge(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """[..., H] twice → [..., 2H], each normed by its own norm."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], dim=-1)


class FurtherLayer(EntryLayer):
    """A plain Llama layer behind the first one."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

"""The attention of stock `transformers` models, with our own cache behind it.

transformers lets a model call any registered attention function and hands extra keyword arguments
of the forward down to it. We pass a `Plan` that way: where new keys go and what each query sees.
No model is forked and its own cache classes, which change between releases, are not touched.

B batch, n query tokens, S key slots, Q query heads, G kv heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from spectrain.core.cache import KVCache

NAME = "spectrain"


@dataclass
class Plan:
    """One forward through the target.

    positions [B, n]; slots [B, n] and visible [B, n, view] only with a cache.
    Without one the tokens are right-padded rows: causal, nothing to look up; `starts` [B, n] where
    a row has several documents (see Batch).
    """

    positions: Tensor
    cache: KVCache | None = None
    slots: Tensor | None = None
    visible: Tensor | None = None
    starts: Tensor | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """[B, n, S] bool, or None for plain causal attention."""
        if self.cache is None and window is not None and window >= self.positions.shape[1]:
            window = None
        if window is None and self.starts is None:
            return self.visible
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> Tensor:
        if self.cache is None:
            seen, held = causal(self.positions, self.starts), self.positions[:, None]
        else:
            seen, held = self.visible, self.cache.positions[:, None, : self.visible.shape[2]]
        return seen if window is None else seen & (self.positions[:, :, None] - held < window)


def causal(rows: Tensor, starts: Tensor | None) -> Tensor:
    """What each place of `rows` [B, n] sees: those up to it, from the start of its document on.

    starts [B, n], or None where every row is one document → [B, n, n] bool
    """
    place = torch.arange(rows.shape[1], device=rows.device)
    seen = (place <= place[:, None]).expand(len(rows), -1, -1)
    return seen if starts is None else seen & (place >= starts[..., None])


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """query [B, Q, n, d], key, value [B, G, S, d], mask [B, n, S] → [B, Q, n, d]; None: causal.

    The Q/G queries that share a kv head are laid side by side as more query rows, so keys and
    values are read once and never repeated in memory.
    """
    batch, heads, count, size = query.shape
    groups = key.shape[1]
    share = heads // groups
    if mask is None and softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=share > 1
        )
    if mask is None:
        mask = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
        mask = mask.expand(batch, count, count)
    folded = query.reshape(batch, groups, share * count, size)
    wide = mask[:, None].repeat(1, 1, share, 1)
    if softcap is None and not _by_products(folded):
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=wide, scale=scale)
    else:
        scores = (folded * scale) @ key.transpose(2, 3)  # scaled first: float16 overflows else
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.masked_fill(~wide, float("-inf")).softmax(-1, dtype=torch.float32)
        out = weights.to(value.dtype) @ value
    return out.view(batch, heads, count, value.shape[-1])


def _by_products(folded: Tensor) -> bool:
    """Whether two batched products beat the fused kernel: on a CPU with few queries in many rows,
    where that kernel takes 1.8 (float32) to 5 times (bfloat16) as long (docs/LOG.md)."""
    rows, queries = folded.shape[0] * folded.shape[1], folded.shape[2]
    return folded.device.type == "cpu" and queries <= 16 and rows >= 48


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: Plan | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The function transformers calls: query [B, Q, n, d], key and value [B, G, n, d]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if plan is None:  # somebody calls the stock model directly, with the library's own mask
        mask = None
        if attention_mask is not None:
            mask = attention_mask[:, 0].expand(query.shape[0], -1, -1)
        elif query.shape[2] != key.shape[2]:
            mask = query.new_ones(query.shape[0], query.shape[2], key.shape[2], dtype=torch.bool)
    else:
        if plan.cache is not None:
            plan.cache.write(
                module.layer_idx, plan.slots, key.transpose(1, 2), value.transpose(1, 2)
            )
            key, value = plan.cache.read(module.layer_idx, plan.visible.shape[2])
        mask = plan.mask(sliding_window)
    out = grouped_attention(query, key, value, mask, scale, softcap)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)

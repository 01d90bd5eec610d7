"""From logits to the distribution that is sampled: temperature, top-k, top-p.

The same warp is applied to the target's p and the draft's q, before any acceptance rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise SpectrainError(f"temperature {self.temperature} is not a number ≥ 0")
        if self.top_k < 0:
            raise SpectrainError(f"top_k {self.top_k} is negative", fix="0 turns it off")
        if not 0 < self.top_p <= 1:
            raise SpectrainError(f"top_p {self.top_p} is not in (0, 1]", fix="1 turns it off")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def warp(self, logits: Tensor) -> Tensor:
        """Logits [..., V] → probabilities [..., V], float32."""
        logits = logits.float()
        # Relative to the largest, so that no temperature is too small for float32.
        logits = (logits - logits.max(-1, keepdim=True).values) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, float("-inf"))
        if self.top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=True)
            probabilities = ordered.softmax(-1)
            # A token stays while the mass before it is below top_p, so the first always stays.
            outside = probabilities.cumsum(-1) - probabilities >= self.top_p
            drop = torch.zeros_like(outside).scatter(-1, order, outside)
            logits = logits.masked_fill(drop, float("-inf"))
        return logits.softmax(-1)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Of a draft: logits [..., D] → [..., D]; when greedy those of temperature 1."""
        return logits.float().log_softmax(-1) if self.greedy else self.warp(logits).log()

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """The target's own token: [..., V] → [...]"""
        return logits.argmax(-1) if self.greedy else draw(self.warp(logits), generator)


def draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row: [..., V] → [...], by the inverse of the cumulated probabilities.

    One uniform number per row; torch.multinomial draws one per entry, which takes 20 times as long
    at 50,000 entries. Float64, so that rare tokens keep their share.
    """
    cumulated = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulated[..., -1:]
    uniform = torch.rand(total.shape, dtype=torch.float64, device=total.device, generator=generator)
    # The first entry above u: never one of probability 0, which adds nothing.
    place = torch.searchsorted(cumulated, uniform * total, right=True)
    return place.clamp(max=probabilities.shape[-1] - 1).squeeze(-1)

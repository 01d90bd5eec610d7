"""From logits to the distribution that is sampled: temperature, top-k, top-p, min-p, in this order.

The same warp is applied to the target's p and the draft's q, before any acceptance rule. The tokens
it leaves are those of transformers' `generate`, ties at an edge included; see `Sampling.warp` for
where rounding may differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 leave the distribution whole.

    min_p: tokens less probable than min_p × the most probable one are left out
    repetition_penalty, min_new_tokens, suppress: see generator/processors.py
    stop_ids: tokens that end a reply beside the target's own · stop_strings: so does their text
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    suppress: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise SpectrainError(f"temperature {self.temperature} is not a number ≥ 0")
        if self.top_k < 0:
            raise SpectrainError(f"top_k {self.top_k} is negative", fix="0 turns it off")
        if not 0 < self.top_p <= 1:
            raise SpectrainError(f"top_p {self.top_p} is not in (0, 1]", fix="1 turns it off")
        if not 0 <= self.min_p <= 1:
            raise SpectrainError(f"min_p {self.min_p} is not in [0, 1]", fix="0 turns it off")
        if not all(self.stop_strings):
            raise SpectrainError("an empty stop string would end every reply at once")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def warp(self, logits: Tensor) -> Tensor:
        """Logits [..., V] → probabilities [..., V], float32."""
        logits = logits.float()
        # Relative to the largest, so that no temperature is too small for float32. The library
        # divides first, so a token within a rounding error of an edge may fall on its other side.
        logits = (logits - logits.max(-1, keepdim=True).values) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, float("-inf"))
        if self.top_p < 1:
            # The least probable go while they hold no more than 1 − top_p together; the most
            # probable stays. Ascending, so that of equal ones the same go as in the library.
            ordered, order = logits.sort(dim=-1)
            outside = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            outside[..., -1] = False
            logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
        probabilities = logits.softmax(-1)
        if self.min_p > 0:
            edge = self.min_p * probabilities.amax(-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < edge, 0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Of a draft: logits [..., D] → [..., D]; when greedy those of temperature 1."""
        return logits.float().log_softmax(-1) if self.greedy else self.warp(logits).log()


def pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The token at `uniform` [...] in [0, 1) of the cumulated probabilities [..., V] → [...]

    They need not sum to 1. Float64, so that rare tokens keep their share. A row of zeros gives V−1.
    """
    cumulated = probabilities.cumsum(-1, dtype=torch.float64)
    # The first entry above u: never one of probability 0, which adds nothing.
    height = uniform[..., None] * cumulated[..., -1:]
    place = torch.searchsorted(cumulated, height, right=True)
    return place.clamp(max=probabilities.shape[-1] - 1).squeeze(-1)

"""Where two replies part, and whether rounding can explain it.

V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# A difference of logits that rounding explains, as a share of the largest logit: twice the spacing
# of the type's numbers. One spacing is what the last product alone can do to the difference of two
# logits (each is off by half a spacing), another what the layers before it did. In float32 two
# logits so close are not met, so no difference is excused.
ROUNDING = {
    torch.float32: 0.0,
    torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 2 * torch.finfo(torch.float16).eps,
}
# How far a float32 draw may lie from the edge between two tokens to fall on either side of it: what
# float32 logits, some 1e-5 off, do to cumulated probabilities, with room. Of 10,000 draws one or
# two lie so near an edge that matters.
DRAW_ROUNDING = 1e-4


@dataclass(frozen=True)
class Difference:
    """The first of a reply. prompt and position count from 0, position among the new tokens; None:
    that reply had ended. margin, bound: see the functions that measure them."""

    prompt: int
    position: int
    ours: int | None
    theirs: int | None
    margin: float | None = None
    bound: float = 0.0

    @property
    def tolerated(self) -> bool:
        return self.margin is not None and self.margin < self.bound


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first position at which two replies are not the same; None: they are equal."""
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return position
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def parted(prompt: int, ours: Sequence[int], theirs: Sequence[int]) -> Difference | None:
    """The first difference of two replies, not measured yet."""
    position = first_difference(ours, theirs)
    if position is None:
        return None
    at = slice(position, position + 1)
    return Difference(prompt, position, *(next(iter(text[at]), None) for text in (ours, theirs)))


@torch.inference_mode()
def next_logits(model: nn.Module, texts: Sequence[Sequence[int]]) -> Tensor:
    """The library's own logits after texts of one length, in one forward: [N, V] float32."""
    tokens = torch.tensor([list(text) for text in texts], device=next(model.parameters()).device)
    return model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1].float()


def greedy_margin(logits: Tensor, ours: int, theirs: int) -> float:
    """How far the worse of two tokens lies below the likeliest of all, by its logit, as a share of
    the largest logit in size; logits [V]. 0: both are the likeliest."""
    gap = logits.max() - torch.minimum(logits[ours], logits[theirs])
    return float(gap / logits.abs().max())


def draw_margin(probabilities: Tensor, uniform: float, token: int) -> float:
    """How far the number that was drawn lies outside of the token's share of [0, 1), which is cut
    by the probabilities [V] in order of ids; 0: inside."""
    cumulated = probabilities.double().cumsum(0)
    cumulated = cumulated / cumulated[-1]
    high = float(cumulated[token])
    low = float(cumulated[token - 1]) if token else 0.0
    return max(low - uniform, uniform - high, 0.0)

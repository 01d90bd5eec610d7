"""What can be asked of a target: prompts and stop ids that it has, and tokens there is room for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target


def limits(target: Target, prompts: Sequence[Tensor], max_new_tokens: int) -> list[int]:
    """New tokens each prompt may get: the wish, or what is left of the target's context.

    Raises SpectrainError for a prompt [n] that the target cannot read.
    """
    if max_new_tokens < 0:
        raise SpectrainError(f"max-new-tokens {max_new_tokens} is negative")
    longest = target.max_length
    for index, prompt in enumerate(prompts):
        if prompt.dim() != 1 or prompt.dtype != torch.int64:
            raise SpectrainError(
                f"a tensor {list(prompt.shape)} of {prompt.dtype}",
                where=f"prompt {index + 1}",
                fix="give token ids as an int64 tensor of one dimension",
            )
        if not 0 < len(prompt) < longest:
            raise SpectrainError(
                f"{len(prompt)} tokens; the target reads {longest}, one of them for the reply",
                where=f"prompt {index + 1}",
                fix="shorten the prompt" if len(prompt) else "an empty prompt has no next token",
            )
        # On a GPU an id that is none ends the process, and what it says names no prompt.
        low, high = (int(bound) for bound in prompt.aminmax())
        if low < 0 or high >= target.readable:
            raise SpectrainError(
                f"{low if low < 0 else high} is no token of 0 … {target.readable - 1}",
                where=f"prompt {index + 1}",
                fix="make its ids with the target's own tokenizer",
            )
    return [min(max_new_tokens, longest - len(prompt)) for prompt in prompts]


def require_stops(target: Target, stop_ids: Sequence[int]) -> None:
    """Refuse ids that the target never says: no reply would end with them."""
    for token in stop_ids:
        if not 0 <= token < target.vocab_size:
            raise SpectrainError(
                f"{token} is no token of 0 … {target.vocab_size - 1}",
                where="stop_ids",
                fix="give ids of the target's own tokenizer",
            )

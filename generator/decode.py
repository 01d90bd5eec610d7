"""Plain batched decoding by the target: how replies are made for training."""

from __future__ import annotations

from torch import Tensor

from spectrain.core.target import Target
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Completion, Generator


def complete(
    target: Target,
    prompts: list[Tensor],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[Completion]:
    """Replies to token prompts [n], as one batch; the same call gives the same replies."""
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    return Generator(target).generate(prompts, max_new_tokens, sampling)

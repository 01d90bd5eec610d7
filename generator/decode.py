"""Plain batched decoding by the target: how replies are made for training."""

from __future__ import annotations

from collections.abc import Sequence

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
    numbers: Sequence[int] | None = None,
) -> list[Completion]:
    """Replies to token prompts [n], as one batch; the same call gives the same replies.

    numbers: those of the prompts (None: 0, 1, 2 …); what is drawn for a prompt follows from its
    number and the seed.
    """
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    return Generator(target).generate(prompts, max_new_tokens, sampling, numbers=numbers)

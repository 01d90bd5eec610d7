"""Replies in which the target got stuck: one block of tokens over and over, without interruption.

Such a reply teaches a draft head the loop and little else, and makes its acceptance look good.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LONGEST_BLOCK = 64  # tokens
# (times, tokens): so often and so long at least. Of 861 replies of SmolLM2 (160 tokens at most)
# this marks ten, all stuck; of 6,490 stretches of 512 tokens of code one plot drawn with blanks,
# besides a banner of equal signs. Four times and 48 tokens would mark 12 and 15: arrays of equal
# rows, too.
STUCK = ((6, 64), (4, 128))


def loops(tokens: Sequence[int]) -> bool:
    """Whether a block of 1 … LONGEST_BLOCK tokens repeats so often, the last time perhaps cut off,
    that it is a loop. Looks at every part of the reply, not only at its end."""
    tokens = np.asarray(tokens)
    return any(
        length >= max(times * block, least)
        for block in range(1, min(LONGEST_BLOCK, len(tokens) // 2) + 1)
        if (length := _longest(tokens, block)) >= 2 * block
        for times, least in STUCK
    )


def _longest(tokens: np.ndarray, block: int) -> int:
    """Tokens of the longest stretch in which each token equals the one `block` before it."""
    breaks = np.flatnonzero(tokens[block:] != tokens[:-block])
    ends = np.concatenate([[-1], breaks, [len(tokens) - block]])
    return int(np.diff(ends).max()) - 1 + block

"""What was read of a prompt, kept for a next one that begins with it: turns of a conversation.

A prompt is read into states of its own before it gets a row (see `Run.admit`), and neither decoding
nor a reply that is cut short touches them. n tokens of the kept prompt, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectrain.core.cache import KVCache


class Memory:
    """The last prompt that was read alone; give it to `Generator.stream` with the next one.

    state: the head's, which has read all positions but the last; None without a head
    """

    def __init__(self) -> None:
        self._tokens: Tensor | None = None
        self._cache: KVCache | None = None
        self.state: Any = None

    def fill(self, prompts: list[Tensor], cache: KVCache) -> int:
        """Put what is known of the only prompt into `cache`, which has room for it. Returns how
        many positions these are, 0 where it does not begin with the whole of the kept one: all but
        that one's last, whose features the head has yet to read."""
        old = self._tokens
        if old is None or len(prompts) != 1 or not torch.equal(prompts[0][: len(old)], old):
            return 0
        cache.adopt(cache.lengths.new_zeros(1), self._cache)
        cache.lengths.fill_(len(old) - 1)
        return len(old) - 1

    def keep(self, prompts: list[Tensor], cache: KVCache, state: Any) -> None:
        """Keep what was read of the only prompt."""
        if len(prompts) == 1:
            self._tokens, self._cache, self.state = prompts[0], cache, state

"""Held-out rows answered anew by another target: what a head of a tuned target is measured on.

The store's replies are the original target's; acceptance counts on text that the verifying target
itself wrote. Stands where `measure` takes a feature store.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from spectrain.core.batch import Batch
from spectrain.core.target import Target
from spectrain.data.online import Needs, read
from spectrain.data.shard import RowInfo
from spectrain.generator.decode import complete

_BATCH = 32  # prompts answered together


class OnPolicy:
    """Greedy replies of `target` to the prompts of some rows, as long as the rows' own."""

    def __init__(
        self, target: Target, prompts: list[Tensor], rows: list[RowInfo], needs: Needs
    ) -> None:
        self.target, self.needs = target, needs
        self._tokens: list[Tensor] = []
        self._prompt = [len(prompt) for prompt in prompts]
        longest = max(row.supervised for row in rows)
        for start in range(0, len(prompts), _BATCH):
            part = prompts[start : start + _BATCH]
            for prompt, done in zip(part, complete(target, part, longest), strict=True):
                self._tokens.append(torch.cat([prompt, torch.tensor(done.tokens)]))
        self.rows = [
            dataclasses.replace(
                row, length=len(tokens), supervised=len(tokens) - prompt, index=place
            )
            for place, (row, tokens, prompt) in enumerate(
                zip(rows, self._tokens, self._prompt, strict=True)
            )
        ]

    def batch(self, rows: list[RowInfo], with_aux: bool = True) -> Batch:
        """As `FeatureStore.batch`, features computed now."""
        tokens = torch.zeros(len(rows), max(row.length for row in rows), dtype=torch.int64)
        reply = torch.zeros_like(tokens)
        for place, row in enumerate(rows):
            tokens[place, : row.length] = self._tokens[row.index]
            reply[place, self._prompt[row.index] : row.length] = 1
        layers = self.needs.aux_layers if with_aux else ()
        unread = Batch(tokens, reply, None, None, torch.full_like(tokens, -1))
        return read(self.target, unread, layers)

"""Prompt lookup: a draft without weights, what followed the same few tokens earlier in the text.

B batch, γ drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.generator.drafters import Block, Drafter, Timed
from spectrain.generator.rows import Rows
from spectrain.generator.rules import Rules


class Lookup(Drafter):
    """The γ tokens after the last earlier occurrence of the text's last n tokens, for the largest
    n ≤ `ngram` that has one. Where no row has any, the step is a plain one."""

    def __init__(self, gamma: int, ngram: int, device: torch.device) -> None:
        for name, value in (("draft tokens", gamma), ("ngram", ngram)):
            if value < 1:
                raise SpectrainError(f"prompt lookup needs 1 or more, not {value}", where=name)
        super().__init__(None, gamma, gamma + 1, 0)
        self.ngram, self._device = ngram, device
        self._places = torch.arange(gamma + 1, device=device)
        self._parents = (self._places - 1).clamp(min=0)

    def start(self, rows: int, slots: int) -> None:
        super().start(rows, slots)
        self._seen = [Seen(self.ngram) for _ in range(rows)]
        self._guesses = torch.zeros(rows, self.depth, dtype=torch.int64, device=self._device)

    def admit(self, rows: Tensor, *_: Any) -> None:
        for row in rows.tolist():
            self._seen[row] = Seen(self.ngram)

    def keep(self, rows: Tensor) -> None:
        self._seen = [self._seen[row] for row in rows.tolist()]
        self._guesses = self._guesses[rows]

    def look(self, texts: Sequence[Sequence[int] | None]) -> int:
        found = [
            [] if text is None else seen.after(text, self.depth)
            for seen, text in zip(self._seen, texts, strict=True)
        ]
        self._now = self.width if any(found) else 1
        padded = [guess + [0] * (self.depth - len(guess)) for guess in found]
        self._guesses.copy_(torch.tensor(padded))
        return self._now

    def draft(self, rows: Rows, rules: Rules, view: int, timed: Timed) -> Block:
        tokens = torch.cat([rows.current[:, None], self._guesses], dim=1)[:, : self._now]
        return Block(tokens, self._places[: self._now], self._parents[: self._now])


class Seen:
    """Where every run of n ≤ `ngram` tokens of a growing text was last followed by another one."""

    def __init__(self, ngram: int) -> None:
        self.ngram = ngram
        self._next: dict[tuple[int, ...], int] = {}
        self._read = 1

    def after(self, text: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that followed the longest end of the text that was seen before."""
        for end in range(self._read, len(text)):
            for n in range(1, min(self.ngram, end) + 1):
                self._next[tuple(text[end - n : end])] = end
        self._read = len(text)
        for n in range(min(self.ngram, len(text)), 0, -1):
            place = self._next.get(tuple(text[-n:]))
            if place is not None:
                return list(text[place : place + count])
        return []

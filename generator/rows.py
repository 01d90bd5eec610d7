"""What the device knows of the sequences in work: fixed buffers, written in place.

A step reads and writes nothing else but the caches, so that it can be captured once and replayed.

B rows, A admitted rows, w = d + 1 tokens that one step can commit, H hidden, A' auxiliary width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.core.batch import Features


class Rows:
    """current [B] the token that the target chose last, x[t+1]; `new` [B] its number among the new
    tokens of its row, counted from 0; keys [B] what the row's random numbers come from
    (generator/randomness.py); live [B] bool: the row's tokens still count.

    What the last step committed and no head has read yet: tokens [B, w] with the target's features
    of the positions before them, of which the first kept[b] are real.
    """

    def __init__(self, count: int, width: int, device: torch.device) -> None:
        self.count, self.width = count, width

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=device)

        self.current, self.new, self.keys, self.kept = zeros(), zeros(), zeros(), zeros()
        self.live = zeros(dtype=torch.bool)
        self.tokens = zeros(width)
        self.features: Features | None = None

    def admit(self, rows: Tensor, keys: Tensor, current: Tensor, features: Features | None) -> None:
        """Begin sequences in `rows` [A] with their first new token [A]; features [A, 1, …] of the
        position before it, None where no head will read them."""
        self.keys[rows], self.current[rows] = keys, current
        self.new.index_fill_(0, rows, 0)
        self.kept.index_fill_(0, rows, 1)
        self.tokens[rows, 0] = current
        if features is not None and self.features is None:
            aux = None if features.aux is None else self._buffer(features.aux)
            self.features = Features(self._buffer(features.last), aux)
        for mine, theirs in self._pairs(features):
            mine[rows, :1] = theirs

    def commit(self, tokens: Tensor, own: Tensor, features: Features | None, kept: Tensor) -> None:
        """Keep what a step committed: tokens and features [B, ≤ w, …], the target's own token [B];
        of rows that are not live kept is 0."""
        width = tokens.shape[1]
        self.tokens[:, :width] = tokens
        self.kept.copy_(kept)
        self.new.add_(kept)
        self.current.copy_(torch.where(kept > 0, own, self.current))
        for mine, theirs in self._pairs(features):
            mine[:, :width] = theirs

    def keep(self, rows: Tensor) -> None:
        """Only `rows` [B'] stay, in that order."""
        self.count = len(rows)
        for name in ("current", "new", "keys", "kept", "live", "tokens"):
            setattr(self, name, getattr(self, name)[rows])
        self.features = self.features and self.features[rows]

    def _buffer(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.count, self.width, like.shape[-1])

    def _pairs(self, features: Features | None) -> list[tuple[Tensor, Tensor]]:
        if features is None:
            return []
        pairs = [(self.features.last, features.last)]
        if self.features.aux is not None:
            pairs.append((self.features.aux, features.aux))
        return pairs

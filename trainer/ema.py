"""A running mean of the trained tensors (EMA), which is often the better head.

mean ← d · mean + (1 − d) · value after every step, in float32, with
d = min(decay, (1 + n) / (10 + n)) after n earlier steps: a short run, too, forgets where it began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from spectrain.core.errors import SpectrainError
from spectrain.trainer.sharding import put


class Ema:
    """Means of the trainable tensors of a head, by name; nothing at all without a decay."""

    def __init__(self, head: nn.Module, decay: float | None) -> None:
        """The means begin with what `head` is now."""
        self.decay = decay
        self.means: dict[str, Tensor] = {}
        if decay is not None:
            self.means = {name: value.detach().clone() for name, value in _trained(head)}
        assert all(mean.dtype == torch.float32 for mean in self.means.values())

    @torch.no_grad()
    def update(self, head: nn.Module, earlier: int) -> None:
        """Add what `head` is after a step; earlier: steps added before this one."""
        if self.decay is None:
            return
        weight = 1 - min(self.decay, (1 + earlier) / (10 + earlier))
        for value, mean in self._pairs(head):
            mean.lerp_(value, weight)

    @contextmanager
    def swapped_in(self, head: nn.Module) -> Iterator[None]:
        """Inside, `head` is the mean; afterwards it is again, bit for bit, what it was."""
        self._swap(head)
        try:
            yield
        finally:
            self._swap(head)

    @torch.no_grad()
    def leave_in(self, head: nn.Module) -> None:
        """Make `head` the mean, for good."""
        for value, mean in self._pairs(head):
            value.copy_(mean)

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor], where: str) -> None:
        """Put back the means of a checkpoint. Raises SpectrainError where names differ."""
        if saved.keys() != self.means.keys():
            names = ", ".join(sorted(saved.keys() ^ self.means.keys()))
            raise SpectrainError(f"means of other tensors: {names}", where=where)
        for name, mean in self.means.items():
            put(mean, saved[name])

    @torch.no_grad()
    def _swap(self, head: nn.Module) -> None:
        for value, mean in self._pairs(head):  # one tensor more than before at a time
            kept = value.clone()
            value.copy_(mean)
            mean.copy_(kept)

    def _pairs(self, head: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        own = dict(head.named_parameters()) if self.means else {}
        return ((own[name], mean) for name, mean in self.means.items())


def _trained(head: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, value in head.named_parameters() if value.requires_grad)

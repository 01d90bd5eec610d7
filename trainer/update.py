"""One update of the weights by all processes, as the loop asks for it: the gradients of all
micro-batches joined to means over the processes, cut to a norm, applied by the optimisers.

`Plain` leaves the joining to DDP or, for a target in pieces, to trainer/sharding.py; in
trainer/zero.py DeepSpeed does it. All processes call all methods, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from accelerate import Accelerator
from torch import Tensor, nn

from spectrain.trainer import optim, sharding
from spectrain.trainer.settings import TrainerSettings


class Update(Protocol):
    """What the loop asks; model: what it calls in the place of the head."""

    model: nn.Module

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward pass of one; last: of this step."""

    def join(self) -> None:
        """After the last backward pass: gradients become means over the processes."""

    def reached(self) -> set[str]:
        """Names of the tensors that have a joined gradient other than 0."""

    def clip(self) -> Tensor:
        """The norm of all joined gradients, a scalar; `step` takes them scaled down to the most
        that is allowed."""

    def step(self) -> None:
        """Move the weights."""

    def clear(self) -> None:
        """Drop all gradients, whether `step` has used them or not."""

    def memory(self, main: bool) -> dict[str, Tensor]:
        """The optimisers' memory as `optim.flatten` names it, whole tensors on the CPU of the main
        process, nothing elsewhere."""

    def restore(self, memory: Mapping[str, Tensor]) -> None:
        """Take back what `memory` gave in any number of processes; the head has its weights."""


# head, its optimisers, settings, accelerator → the way to update the head
Way = Callable[[nn.Module, dict[str, optim.Part], TrainerSettings, Accelerator], Update]


class Plain:
    """Every process has all gradients and all of the optimisers' memory, but for what is cut."""

    def __init__(
        self,
        head: nn.Module,
        parts: dict[str, optim.Part],
        settings: TrainerSettings,
        accelerator: Accelerator,
    ) -> None:
        self.model = sharding.prepare(head, accelerator)
        self._accelerator, self._parts = accelerator, parts
        self._most = settings.clip or math.inf
        self._named = dict(head.named_parameters())
        self._trained = [value for value in self._named.values() if value.requires_grad]

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Gradients cross processes only after the last micro-batch."""
        return nullcontext() if last else self._accelerator.no_sync(self.model)

    def join(self) -> None:
        sharding.average(self.model)

    def reached(self) -> set[str]:
        grads = {name: value.grad for name, value in self._named.items() if value.requires_grad}
        return {name for name, g in grads.items() if g is not None and sharding.any_of(g)}

    def clip(self) -> Tensor:
        return sharding.clip(self._trained, self._most)

    def step(self) -> None:
        for part in self._parts.values():
            part.optimizer.step()

    def clear(self) -> None:
        for value in self._trained:
            value.grad = None

    def memory(self, main: bool) -> dict[str, Tensor]:
        return sharding.gathered(optim.flatten(self._parts), main)

    def restore(self, memory: Mapping[str, Tensor]) -> None:
        optim.restore(self._parts, memory)

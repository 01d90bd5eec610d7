"""A CUDA graph on a CPU: a step's operations, recorded once and done again on the same tensors.

As with the real one, Python does not run again: numbers it knew at the capture stay as they were,
and tensors are found where they lay then.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Every tensor operation with the tensors it was called with and those it gave."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result

    def play(self):
        for function, args, kwargs, before in self.operations:
            after = function(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                # Results of views and of operations in place are where they were.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeReplay:
    """In the place of generator.replay.Replay: `replayed` counts steps that no Python ran in."""

    def __init__(self, device, enabled=True):
        self.enabled = True
        self.tapes, self.replayed = {}, 0

    def __call__(self, key, work):
        if key not in self.tapes:
            self.tapes[key] = None
            return work()
        if self.tapes[key] is None:
            tape = Tape()
            with tape:
                result = work()
            self.tapes[key] = tape, result
            return result
        tape, result = self.tapes[key]
        tape.play()
        self.replayed += 1
        return result

    def forget(self):
        raise AssertionError("rows are not narrowed where steps are replayed")

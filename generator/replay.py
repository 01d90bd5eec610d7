"""CUDA graphs: work on fixed buffers is recorded once per shape and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError


class Replay:
    """Calls work(); on CUDA its operations are captured the second time a key is seen and only
    replayed from then on. The first time is a plain call: it allocates what is kept for later.

    What the work reads and writes between two calls has to lie in buffers that stay in place, and
    nothing in it may depend on values or wait for the device.
    """

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def __call__(self, key: Hashable, work: Callable[[], Tensor]) -> Tensor:
        if not self.enabled:
            return work()
        if key not in self._graphs:
            self._graphs[key] = None
            return work()
        if self._graphs[key] is None:
            self._graphs[key] = self._captured(work)
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def _captured(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            # thread_local: what other threads do with the device is no business of this capture.
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
                return graph, work()
        except RuntimeError as error:
            first = error.__context__ or error  # ending a spoilt capture fails, too
            raise SpectrainError(
                f"a step cannot be captured as a CUDA graph: {first}", fix="use graphs=False"
            ) from error

    def forget(self) -> None:
        """Buffers have moved: everything is captured anew."""
        self._graphs.clear()

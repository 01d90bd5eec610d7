"""What a piece of code really does: products, elementwise traffic, tensors that live at once."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACK = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Counter(TorchDispatchMode):
    """Counts while it is active; products of oneDNN's own operators are not seen (fast_linear has
    to be told not to prefer them).

    flops: of all products, the causal half of causal attention
    numbers: read and written by everything else that is no view
    peak: bytes of all tensors made meanwhile that lived at the same time, each storage once
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.numbers = self.live = self.peak = 0
        self.by: dict[str, int] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet in (_FLASH, _FLASH_BACK):
            self.flops += self._attention(packet, args, kwargs or {})
        elif not func.is_view and packet not in _FREE:
            self.numbers += self._traffic(packet, inputs, outputs)
        given = {_place(x) for x in inputs}
        for value in outputs:
            if _place(value) not in given:
                self._hold(value)
        return out

    def _traffic(self, packet, inputs, outputs) -> int:
        if packet in _INDEXED:  # reads what it picks
            count = 2 * sum(x.numel() for x in outputs)
        else:
            count = sum(x.numel() for x in (*inputs, *outputs))
        self.by[str(packet)] = self.by.get(str(packet), 0) + count
        return count

    def _attention(self, packet, args, kwargs) -> float:
        """Two products forward, five backward (scores anew), over the causal half if it is."""
        first = packet is _FLASH
        query, key, value = args[:3] if first else args[1:4]
        causal = bool(args[4] if first and len(args) > 4 else kwargs.get("is_causal", False)) or (
            not first and args[7]
        )
        heads, rows, keys = query.shape[0] * query.shape[1], query.shape[2], key.shape[2]
        pairs = heads * (rows * (rows + 1) / 2 if causal else rows * keys)
        return pairs * (query.shape[3] + value.shape[3]) * (2 if first else 5)

    def _hold(self, value: Tensor) -> None:
        place = _place(value)
        if not place or place in self._known:
            return
        self._known.add(place)
        storage = value.untyped_storage()
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, place, size)

    def _drop(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.live -= size


def _place(value: Tensor) -> int:
    return 0 if value.is_mkldnn else value.untyped_storage().data_ptr()


_INDEXED = {
    torch.ops.aten.embedding,
    torch.ops.aten.index,
    torch.ops.aten.index_select,
    torch.ops.aten.gather,
}
_FREE = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.detach,
    torch.ops.aten._unsafe_view,
}

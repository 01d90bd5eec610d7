"""A key/value cache that is written in place; allocated once, on a CPU as far as it is looked at.

B batch rows, S slots, G kv heads, d head size, n new tokens. Row b has `lengths[b]` committed
tokens in slots 0 … lengths[b]−1. New tokens go behind them; what is not committed is simply
overwritten by the next write, so a rejected draft costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer; layers are allocated at their first write."""

    def __init__(self, rows: int, slots: int, device: torch.device | str = "cpu") -> None:
        self.rows, self.slots, self.device = rows, slots, torch.device(device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, slots, dtype=torch.int64, device=device)
        self._row = torch.arange(rows, device=device)[:, None]
        self._room = slots  # allocated of them
        self._known: tuple[Tensor, dict[tuple[int, int], Tensor]] | None = None  # see _places
        # [B, G, room, d]: what attention reads lies side by side.
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, view: int) -> None:
        """Say that nothing beyond the first `view` slots will be used before the next call.

        A CPU then holds these slots and no others, for products over a part of every row would
        copy the part first (docs/LOG.md); elsewhere all were allocated once and stay in place.
        """
        if self.device.type != "cpu" or (self._layers and view <= self._room):
            return
        self._room = view
        self._layers = {i: (self._wider(k), self._wider(v)) for i, (k, v) in self._layers.items()}

    def _wider(self, stored: Tensor) -> Tensor:
        new = stored.new_zeros(*stored.shape[:2], self._room, stored.shape[3])
        new[:, :, : stored.shape[2]] = stored
        return new

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys, values [B, n, G, d] into slots [B, n] of `layer`."""
        new = keys.transpose(1, 2), values.transpose(1, 2)
        for stored, part in zip(self._stored(layer, new), new, strict=True):
            places = self._places(slots, *stored.shape[1:3])
            stored.view(-1, stored.shape[3]).index_copy_(0, places, part.flatten(0, 2))

    def _places(self, slots: Tensor, groups: int, room: int) -> Tensor:
        """Rows [B·G·n] of slots [B, n] in a stored [B, G, room, d] seen as [B·G·room, d]. One index
        for all layers: an index of three tensors takes two to four times as long (docs/LOG.md)."""
        kind = groups, room
        if self._known is None or self._known[0] is not slots:
            self._known = slots, {}
        known = self._known[1]
        if kind not in known:
            group = self._row * groups + torch.arange(groups, device=self.device)
            known[kind] = (group[..., None] * room + slots[:, None]).flatten()
        return known[kind]

    def read(self, layer: int, view: int) -> tuple[Tensor, Tensor]:
        """The first `view` slots of a layer: two views [B, G, view, d]."""
        keys, values = self._layers[layer]
        return keys[:, :, :view], values[:, :, :view]

    def place(self, slots: Tensor, positions: Tensor) -> None:
        """Remember which position [B, n] each slot [B, n] holds (sliding windows need it)."""
        self.positions[self._row, slots] = positions

    def commit(self, counts: Tensor, path: Tensor | None = None) -> None:
        """Keep counts[b] of the tokens written behind the committed ones of row b: the first ones,
        or those at the places `path` [B, w] (ascending, w ≥ counts), which are moved together."""
        if path is not None:
            start = self.lengths[:, None]
            source, slots = start + path, start + torch.arange(path.shape[1], device=self.device)
            self.positions[self._row, slots] = self.positions[self._row, source]
            # A list each: the two must not push one another out of `_known`.
            moved: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
            for stored in (tensor for pair in self._layers.values() for tensor in pair):
                kind = stored.shape[1:3]
                if kind not in moved:
                    moved[kind] = self._places(source, *kind), self._places(slots, *kind)
                taken, put = moved[kind]
                flat = stored.view(-1, stored.shape[3])
                flat.index_copy_(0, put, flat.index_select(0, taken))
        self.lengths += counts

    def adopt(self, rows: Tensor, other: KVCache, chosen: Tensor | None = None) -> None:
        """Put what sequences `chosen` [A] of another cache (None: all) have committed into `rows`
        [A] of this one, in place of what was there. `other` has no more slots than this one."""
        count = other.slots
        if count > self._room:
            self.reserve(count)
        chosen = other._row[:, 0] if chosen is None else chosen
        self.lengths[rows] = other.lengths[chosen]
        self.positions[rows, :count] = other.positions[chosen]
        for layer, parts in other._layers.items():
            for stored, new in zip(self._stored(layer, parts), parts, strict=True):
                stored[rows, :, : new.shape[2]] = new[chosen]

    def _stored(self, layer: int, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer; at first zeros for heads and sizes as in `like`
        [_, G, _, d]. Zeros, not empty: a masked slot still enters 0 · value, and NaN · 0 is NaN."""
        if layer not in self._layers:
            self._layers[layer] = tuple(
                new.new_zeros(self.rows, new.shape[1], self._room, new.shape[3]) for new in like
            )
        return self._layers[layer]

    def keep_rows(self, rows: Tensor) -> None:
        """Drop finished sequences: only `rows` [B'] stay, in that order."""
        self.rows = len(rows)
        self.lengths = self.lengths[rows]
        self.positions = self.positions[rows]
        self._row = torch.arange(self.rows, device=self.device)[:, None]
        self._layers = {i: (k[rows], v[rows]) for i, (k, v) in self._layers.items()}


def visible_slots(lengths: Tensor, count: int, view: int, ancestors: Tensor | None) -> Tensor:
    """Which slots each of `count` new tokens may see: [B, count, view] bool.

    Every committed slot, and of the uncommitted ones its ancestors and itself. `ancestors`
    [count, U] or [B, count, U] speaks of the U slots behind the committed ones; None is a chain
    (U = count, each new token sees the earlier ones).
    """
    column = torch.arange(view, device=lengths.device)
    if ancestors is None:
        row = torch.arange(count, device=lengths.device)
        return column <= (lengths[:, None] + row)[..., None]
    uncommitted = ancestors.shape[-1]
    offset = (column - lengths[:, None])[:, None]  # [B, 1, view]
    ancestors = ancestors.expand(lengths.shape[0], count, uncommitted)
    picked = ancestors.gather(2, offset.clamp(0, uncommitted - 1).expand(-1, count, -1))
    return (offset < 0) | (picked & (offset >= 0) & (offset < uncommitted))

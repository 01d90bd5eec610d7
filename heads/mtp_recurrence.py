"""One module applied again and again: what engines do with checkpoints that bring a single one.

Step k at anchor t embeds x[t+1+k], reads the module's own output of step k−1 (f[t] at k = 0) at
rotary position t+k, and sees the rows ≤ t of step 0 and its own rows of steps 1 … k: in drafting
these are the module's cache of verified rows and the nodes on the path behind it.

B batch, T length, A anchors of the row that has most, n new rows, m frontier nodes, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.core.attention import Plan, causal
from spectrain.core.batch import Batch, Features, counted
from spectrain.core.cache import KVCache, visible_slots
from spectrain.core.readout import Readout
from spectrain.heads.base import Unrolled
from spectrain.heads.mtp_chain import Modules


class _Growing:
    """Stands in for the cache in training: keys of every step, with their graph."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._positions: list[Tensor] = []

    def place(self, positions: Tensor) -> None:
        self._positions.append(positions)

    @property
    def positions(self) -> Tensor:
        return torch.cat(self._positions, dim=1)

    def write(self, _layer: int, _slots: None, keys: Tensor, values: Tensor) -> None:
        self._keys.append(keys)
        self._values.append(values)

    def read(self, _layer: int, _view: int) -> tuple[Tensor, Tensor]:
        """Two of [B, G, keys so far, d], as of a KVCache."""
        return tuple(
            torch.cat(parts, dim=1).transpose(1, 2) for parts in (self._keys, self._values)
        )


@dataclass
class RecurrentState:
    """Drafting state: verified rows in the cache, drafted nodes behind them."""

    cache: KVCache
    view: int
    hidden: Tensor | None = None  # [B, m, H] outputs of the last level
    ancestors: Tensor | None = None  # [B, m, U] of the last level among the U drafted nodes
    level: int = 0


def unroll(parts: Modules, readout: Readout, batch: Batch, steps: int) -> Iterator[Unrolled]:
    module, length = parts.modules[0], batch.tokens.shape[1]
    device, dtype = batch.tokens.device, module.norm.weight.dtype
    live = counted(batch.reply, 0)
    flat = live.flatten().nonzero().squeeze(1)
    # Anchors of each row, in order, padded with other rows of it that nobody looks at: [B, A].
    most = max(1, int(live.sum(1).max()))
    index = (~live).to(torch.int8).sort(dim=1, stable=True).indices[:, :most]
    real = live.gather(1, index)
    # Of the rows that step k works on: their positions, the places of the tokens they are fed (less
    # one), and what they see.
    positions = batch.positions
    places = torch.arange(length, device=device).expand(positions.shape)
    seen = causal(positions, batch.starts)
    own = torch.eye(most, dtype=torch.bool, device=device).expand(len(positions), -1, -1)
    cache, hidden = _Growing(), batch.last.to(dtype)
    for step in range(steps):
        if step == 1:
            hidden = hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))
            seen = seen.gather(1, index[..., None].expand(-1, -1, length))
            positions, places = positions.gather(1, index), index
        if step:
            positions, places = positions + 1, places + 1
            seen = torch.cat([seen, own], dim=2)
        fed = (places + 1).clamp(max=length - 1)
        embedding = readout.embed(batch.tokens.gather(1, fed)).to(dtype)
        cache.place(positions)
        plan = Plan(positions, cache, None, seen)
        out = module(parts.rotary, embedding, hidden, positions, plan)
        yield Unrolled(step, out[real] if step else out.flatten(0, 1)[flat], flat)
        hidden = parts.hand_on(0, out)


def extend(
    parts: Modules,
    readout: Readout,
    state: RecurrentState,
    tokens: Tensor,
    features: Features,
    counts: Tensor,
    view: int,
) -> Tensor:
    """Read verified rows; the module's output at the anchor, [B, H]."""
    cache, module = state.cache, parts.modules[0]
    state.view = view or cache.slots
    state.level, state.ancestors = 0, None
    dtype = module.norm.weight.dtype
    slots = cache.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    cache.place(slots, slots)
    visible = visible_slots(cache.lengths, tokens.shape[1], state.view, None)
    plan = Plan(slots, cache, slots, visible)
    embedding = readout.embed(tokens).to(dtype)
    out = module(parts.rotary, embedding, features.last.to(dtype), slots, plan)
    last = (counts - 1).clamp(min=0)[:, None, None]
    state.hidden = out.gather(1, last.expand(-1, -1, out.shape[-1]))
    cache.commit(counts)
    return state.hidden[:, 0]


def expand(
    parts: Modules, readout: Readout, state: RecurrentState, tokens: Tensor, parents: Tensor
) -> Tensor:
    """One level deeper: the module at the new nodes, [B, m, H]."""
    cache, (batch, width) = state.cache, tokens.shape
    state.level += 1
    own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
    if state.ancestors is None:
        state.ancestors = own
    else:
        rows = parents[..., None].expand(-1, -1, state.ancestors.shape[-1])
        state.ancestors = torch.cat([state.ancestors.gather(1, rows), own], dim=-1)
    used = state.ancestors.shape[-1] - width
    slots = cache.lengths[:, None] + used + torch.arange(width, device=tokens.device)
    positions = (cache.lengths - 1 + state.level)[:, None].expand(batch, width)
    cache.place(slots, positions)
    visible = visible_slots(cache.lengths, width, state.view, state.ancestors)
    plan = Plan(positions, cache, slots, visible)
    rows = parents[..., None].expand(-1, -1, state.hidden.shape[-1])
    hidden = parts.hand_on(0, state.hidden.gather(1, rows))
    embedding = readout.embed(tokens).to(hidden.dtype)
    state.hidden = parts.modules[0](parts.rotary, embedding, hidden, positions, plan)
    return state.hidden

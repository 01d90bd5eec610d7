"""K modules in a chain: both faces of sequential multi-token prediction.

Row t of module k embeds x[t+1+k], reads what module k−1 said at row t (f[t] at k = 0), sees rows
≤ t of its own module, and guesses x[t+2+k].

The drafting face counts by the embedded token instead of by the row. Slot s of every module stands
for x[s+1]; in module k that is row s−k::

    slot        …  n−1     n       n+1        n tokens x[1 … n] are verified (anchor t = n−1),
    embeds      …  x[n]    x[n+1]  x[n+2]     drafted ones lie behind them
    module 0    …  row t
    module 1    …  row t−1 row t
    module 2    …  row t−2 row t−1 row t

So a draft of depth d needs rows t−d+1 … t of module d, and these embed the d drafted tokens on the
path to the node: at depth d, module d reads every node of the tree so far, one slot each, and sees
the tree by the same ancestors as everywhere. What slot s reads from module k−1 lies at slot s−1
(its parent's slot in a tree), which is the same row.

B batch, T length, n new rows, m frontier nodes, U drafted nodes so far, K modules, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.core.attention import Plan
from spectrain.core.batch import Batch, Features, counted
from spectrain.core.cache import KVCache, visible_slots
from spectrain.core.readout import Readout
from spectrain.heads.base import Unrolled
from spectrain.heads.mtp_module import MtpModule, RotaryTable


@dataclass(frozen=True)
class Modules:
    """The modules, and how each hands its output on (before or after its norm)."""

    modules: Sequence[MtpModule]
    rotary: RotaryTable
    normed: bool

    def hand_on(self, index: int, out: Tensor) -> Tensor:
        return self.modules[index].norm(out) if self.normed else out


@dataclass
class ChainState:
    """Drafting state of K modules.

    ends [K, B, 1, H]: of every module the output of its last verified row, zeros before the first
    outputs [B, 1+U, H]: of the module that ran last, its end row first, then every node
    tokens, above [B, U]: the drafted nodes and where their parent is in `outputs`; depths [U]
    ancestors [B, U, U]; width: nodes of the last level
    """

    cache: KVCache
    view: int
    ends: Tensor
    outputs: Tensor | None = None
    tokens: Tensor | None = None
    above: Tensor | None = None
    depths: Tensor | None = None
    ancestors: Tensor | None = None
    width: int = 0
    level: int = 0


def unroll(parts: Modules, readout: Readout, batch: Batch, steps: int) -> Iterator[Unrolled]:
    count, length = batch.tokens.shape
    anchors = counted(batch.reply, 0).flatten().nonzero().squeeze(1)
    dtype = parts.modules[0].norm.weight.dtype
    places = torch.arange(length, device=batch.tokens.device).expand(count, length)
    positions, plan = batch.positions, Plan(batch.positions, starts=batch.starts)
    hidden = batch.last.to(dtype)
    for step in range(steps):
        # Rows whose document has no such token embed another; no row that counts looks at them.
        fed = batch.tokens.gather(1, (places + 1 + step).clamp(max=length - 1))
        embedding = readout.embed(fed).to(dtype)
        out = parts.modules[step](parts.rotary, embedding, hidden, positions, plan)
        yield Unrolled(step, out.flatten(0, 1)[anchors], anchors)
        hidden = parts.hand_on(step, out)


def extend(
    parts: Modules,
    readout: Readout,
    state: ChainState,
    tokens: Tensor,
    features: Features,
    counts: Tensor,
    view: int,
) -> Tensor:
    """Read verified rows in every module; the state of module 0 at the anchor, [B, H]."""
    cache = state.cache
    state.view = view or cache.slots
    state.level, state.width, state.outputs = 0, 0, None
    dtype = parts.modules[0].norm.weight.dtype
    slots = cache.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    cache.place(slots, slots)
    visible = visible_slots(cache.lengths, tokens.shape[1], state.view, None)
    embedding = readout.embed(tokens).to(dtype)
    hidden = features.last.to(dtype)
    last = (counts - 1).clamp(min=0)[:, None]
    for index in range(len(parts.modules)):
        out = _run(parts, state, index, embedding, hidden, slots, slots, visible)
        end = out.gather(1, last[..., None].expand(-1, -1, out.shape[-1]))
        before = state.ends[index].clone()
        state.ends[index] = torch.where(counts[:, None, None] > 0, end, before)  # in place
        hidden = parts.hand_on(index, torch.cat([before, out[:, :-1]], dim=1))
    cache.commit(counts)
    return state.ends[0][:, 0]


def expand(
    parts: Modules, readout: Readout, state: ChainState, tokens: Tensor, parents: Tensor
) -> Tensor:
    """One level deeper: the next module at the new nodes, [B, m, H]."""
    cache, width = state.cache, tokens.shape[1]
    _grow(state, tokens, parents)
    index = state.level
    dtype = state.ends.dtype
    nodes = state.tokens.shape[1]
    slots = cache.lengths[:, None] + torch.arange(nodes, device=tokens.device)
    places = cache.lengths[:, None] - 1 + state.depths
    cache.place(slots, places)
    visible = visible_slots(cache.lengths, nodes, state.view, state.ancestors)
    before = state.ends[0] if state.outputs is None else state.outputs
    hidden = before.gather(1, state.above[..., None].expand(-1, -1, before.shape[-1]))
    hidden = parts.hand_on(index - 1, hidden)
    embedding = readout.embed(state.tokens).to(dtype)
    out = _run(parts, state, index, embedding, hidden, slots, places, visible)
    state.outputs = torch.cat([state.ends[index], out], dim=1)
    return out[:, -width:]


def _run(
    parts: Modules,
    state: ChainState,
    index: int,
    embedding: Tensor,
    hidden: Tensor,
    slots: Tensor,
    places: Tensor,
    visible: Tensor,
) -> Tensor:
    """Module `index` over slots [B, n] whose tokens lie at `places` [B, n] (x[place+1])."""
    # Module k has no row for the first k tokens: nobody sees those slots but they themselves.
    rows = state.cache.positions[:, None, : state.view] - index
    own = torch.arange(state.view, device=slots.device) == slots[..., None]
    plan = Plan(places, state.cache, slots, (visible & (rows >= 0)) | own)
    positions = (places - index).clamp(min=0)
    return parts.modules[index](parts.rotary, embedding, hidden, positions, plan)


def _grow(state: ChainState, tokens: Tensor, parents: Tensor) -> None:
    """Add a level of nodes [B, m] to the tree; parents [B, m] index the level before."""
    batch, width = tokens.shape
    state.level += 1
    depths = torch.full((width,), state.level, device=tokens.device)
    own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
    if state.level == 1:
        state.tokens, state.above, state.depths = tokens, torch.zeros_like(parents), depths
        state.ancestors = own
    else:
        nodes = state.tokens.shape[1]
        place = nodes - state.width + parents  # of the parents among the nodes
        rows = state.ancestors.gather(1, place[..., None].expand(-1, -1, nodes))
        older = torch.nn.functional.pad(state.ancestors, (0, width))
        state.ancestors = torch.cat([older, torch.cat([rows, own], dim=2)], dim=1)
        state.tokens = torch.cat([state.tokens, tokens], dim=1)
        state.above = torch.cat([state.above, place + 1], dim=1)
        state.depths = torch.cat([state.depths, depths])
    state.width = width

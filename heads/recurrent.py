"""Both faces of a head that feeds itself (the EAGLE families).

Row t reads the target's features at t and the embedding of x[t+1], and guesses x[t+2]; when
drafting goes on, the row's own output takes the place of the features::

    step k, anchor t:  embeds x[t+1+k]   hidden: features of t at k = 0, own output of k−1 after
                       rotary position t+k         guesses x[t+2+k]

Every layer has its own keys: those of step 0, made from true features at every position, and behind
them a row's own keys of the steps it drafted.

B batch, T length, n rows, m nodes, R anchors, H hidden, W width that the first layer reads,
Q/G query and kv heads, d head size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.core.attention import Plan, grouped_attention
from spectrain.core.batch import Batch, Features, counted
from spectrain.core.cache import KVCache, visible_slots
from spectrain.heads.base import DraftHead, Unrolled
from spectrain.heads.eagle_layer import EagleConfig, EntryLayer
from spectrain.heads.layers import Rotary
from spectrain.heads.ttt_attention import Anchors, ttt_attention

# The head feeds itself, so it can draft further than it was trained; guesses get worse and worse.
LONGEST_DRAFT = 16

# (number of a layer, the layer, what its q/k/v read [..., W or H]) → attended [..., Q·d]
Attend = Callable[[int, EntryLayer, Tensor], Tensor]


@dataclass
class Prefix:
    """What training-time test starts from: the anchors' own rows, and the keys they all look at."""

    anchors: Anchors
    hidden: Tensor  # [R, H] the last layer's residual at step 0
    x: Tensor  # [R, W or H] what its q/k/v read
    keys: list[Tensor]  # of step 0, for each layer [B, T, G, d]
    values: list[Tensor]


@dataclass
class RecurrentState:
    """Drafting state: verified rows in the cache, drafted nodes behind them."""

    cache: KVCache
    view: int
    hidden: Tensor | None = None  # [B, m, H] outputs of the last level, as they are fed back
    ancestors: Tensor | None = None  # [B, m, U] of the last level among the U drafted nodes
    level: int = 0


class RecurrentHead(DraftHead):
    """A stack of decoder layers whose output is its next input."""

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.rotary = Rotary(
            config.head_dim, config.max_position_embeddings, config.rope_parameters
        )
        self.scale = config.head_dim**-0.5

    # ── what a family says ───────────────────────────────────────────────────

    @property
    @abstractmethod
    def stack(self) -> list[EntryLayer]:
        """The layers in order; those behind the first have an input norm."""

    @abstractmethod
    def read(self, features: Features) -> Tensor:
        """The target's features → [B, n, H], what stands in for an output of the head."""

    def disturb(self, features: Features, batch: Batch) -> Features:
        """The features with noise: asked for in training alone, never when drafting."""
        return features

    @abstractmethod
    def enter(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H] twice → the residual [..., H] and what the first layer's q/k/v read [..., W]"""

    def embed(self, ids: Tensor) -> Tensor:
        """[...] → [..., H]"""
        return self.readout.embed(ids).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.stack[0].post_attention_layernorm.weight.dtype

    @property
    def longest_draft(self) -> int:
        return LONGEST_DRAFT

    # ── training face ────────────────────────────────────────────────────────

    def unroll(self, batch: Batch, steps: int) -> Iterator[Unrolled]:
        yield from self.steps(self.prefix(batch), batch.tokens, steps)

    def prefix(self, batch: Batch) -> Prefix:
        """Step 0 up to what the last layer's anchors ask: all that is one for all anchors."""
        anchors = Anchors.of(counted(batch.reply, 0), batch.starts)
        keys: list[Tensor] = []  # of step 0, each [B, T, G, d]
        values: list[Tensor] = []

        # Row t embeds x[t+1]; the last row of a document has none, and no anchor ever looks at it.
        following = torch.cat([batch.tokens[:, 1:], batch.tokens[:, -1:]], dim=1)
        features = Features(batch.last, batch.aux)
        if self.training:
            features = self.disturb(features, batch)
        residual, x = self.enter(self.embed(following), self.read(features))
        table = self.rotary(batch.positions, self.dtype)
        mask = Plan(batch.positions, starts=batch.starts).mask(None)

        def keep(layer: EntryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
            key, value = layer.key_value(x, table)
            keys.append(key.to(value.dtype))  # once, and not at each step
            values.append(value)
            return keys[-1], value

        def causal(index: int, layer: EntryLayer, x: Tensor) -> Tensor:
            key, value = keep(layer, x)
            query = layer.query(x, table).to(value.dtype)
            parts = (part.transpose(1, 2) for part in (query, key, value))
            return grouped_attention(*parts, mask, self.scale).transpose(1, 2).flatten(2)

        residual, x = self._lower(residual, x, causal)
        keep(self.stack[-1], x)
        rows = (part.flatten(0, 1).index_select(0, anchors.flat) for part in (residual, x))
        return Prefix(anchors, *rows, keys, values)

    def steps(self, prefix: Prefix, tokens: Tensor, steps: int) -> Iterator[Unrolled]:
        """What `unroll` yields for the anchors of `prefix`, no matter which others there are."""
        anchors, hidden, x = prefix.anchors, prefix.hidden, prefix.x
        own: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.stack]

        def own_rows(index: int, layer: EntryLayer, x: Tensor) -> Tensor:
            """Step 0 goes through here for the last layer alone: its keys are there already."""
            table = self.rotary(anchors.position + step, self.dtype)
            if step:
                key, value = layer.key_value(x, table)
                own[index][0].append(key.to(value.dtype))
                own[index][1].append(value)
            query = layer.query(x, table)
            keys, values = prefix.keys[index], prefix.values[index]
            return ttt_attention(query, keys, values, *own[index], anchors, self.scale)

        tokens = tokens.flatten()
        for step in range(steps):
            if step:
                # Beyond its document an anchor is fed anything: it no longer counts.
                fed = tokens[(anchors.flat + 1 + step).clamp(max=len(tokens) - 1)]
                hidden, x = self._lower(*self.enter(self.embed(fed), hidden), own_rows)
            hidden = self._top(hidden, x, own_rows)
            yield Unrolled(step, hidden, anchors.flat)

    def weights(self, progress: float) -> list[float]:
        return [self.config.step_decay**k for k in range(self.config.steps)]

    # ── drafting face ────────────────────────────────────────────────────────

    def start(self, rows: int, slots: int) -> RecurrentState:
        device = self.stack[0].post_attention_layernorm.weight.device
        return RecurrentState(KVCache(rows, slots, device), slots)

    def extend(
        self,
        state: RecurrentState,
        tokens: Tensor,
        features: Features,
        counts: Tensor,
        view: int = 0,
    ) -> Tensor:
        cache, count = state.cache, tokens.shape[1]
        state.view = view or cache.slots
        positions = cache.lengths[:, None] + torch.arange(count, device=tokens.device)
        table = self.rotary(positions, self.dtype)
        residual, x = self.enter(self.embed(tokens), self.read(features))
        if len(self.stack) > 1:
            chain = visible_slots(cache.lengths, count, state.view, None)
            residual, x = self._lower(residual, x, self._cached(state, positions, table, chain))
        # Verified rows before the last are needed for their keys and values alone.
        top, last = len(self.stack) - 1, (counts - 1).clamp(min=0)[:, None]
        cache.write(top, positions, *self.stack[top].key_value(x, table))
        residual, x = _take(residual, last), _take(x, last)
        table = self.rotary(positions.gather(1, last), self.dtype)
        cache.commit(counts)
        state.level, state.ancestors = 0, None
        visible = torch.arange(state.view, device=tokens.device) < cache.lengths[:, None, None]

        def attend(index: int, layer: EntryLayer, x: Tensor) -> Tensor:
            return self._look(state, index, layer.query(x, table), visible)

        state.hidden = self._top(residual, x, attend)
        return self.logits(state.hidden, 0)[:, 0]

    def expand(self, state: RecurrentState, tokens: Tensor, parents: Tensor) -> Tensor:
        cache = state.cache
        batch, width = tokens.shape
        state.level += 1
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        if state.ancestors is None:
            state.ancestors = own
        else:
            state.ancestors = torch.cat([_take(state.ancestors, parents), own], dim=-1)
        used = state.ancestors.shape[-1] - width
        slots = cache.lengths[:, None] + used + torch.arange(width, device=tokens.device)
        positions = (cache.lengths - 1 + state.level)[:, None].expand(batch, width)
        visible = visible_slots(cache.lengths, width, state.view, state.ancestors)
        attend = self._cached(state, slots, self.rotary(positions, self.dtype), visible)
        residual, x = self.enter(self.embed(tokens), _take(state.hidden, parents))
        state.hidden = self._top(*self._lower(residual, x, attend), attend)
        return self.logits(state.hidden, state.level)

    def _cached(
        self,
        state: RecurrentState,
        slots: Tensor,
        table: tuple[Tensor, Tensor],
        visible: Tensor,
    ) -> Attend:
        """Attention of new rows that are written to `slots` [B, n] first; visible [B, n, view]."""

        def attend(index: int, layer: EntryLayer, x: Tensor) -> Tensor:
            state.cache.write(index, slots, *layer.key_value(x, table))
            return self._look(state, index, layer.query(x, table), visible)

        return attend

    def _look(self, state: RecurrentState, index: int, query: Tensor, visible: Tensor) -> Tensor:
        """query [B, m, Q, d], visible [B, m, view] → [B, m, Q·d]"""
        keys, values = state.cache.read(index, state.view)
        out = grouped_attention(query.transpose(1, 2), keys, values, visible, self.scale)
        return out.transpose(1, 2).flatten(2)

    # ── both ─────────────────────────────────────────────────────────────────

    def _lower(self, residual: Tensor, x: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Through all layers but the last: what that one takes, residual and x."""
        for index, layer in enumerate(self.stack[:-1]):
            residual = layer.finish(residual, attend(index, layer, x))
            x = self.stack[index + 1].input_layernorm(residual)
        return residual, x

    def _top(self, residual: Tensor, x: Tensor, attend: Attend) -> Tensor:
        """The last layer: [..., H]"""
        last = self.stack[-1]
        return last.finish(residual, attend(len(self.stack) - 1, last, x))


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [B, n, X], index [B, m] → [B, m, X]"""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))

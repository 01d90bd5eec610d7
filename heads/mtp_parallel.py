"""Parallel multi-token prediction (Meta, arXiv 2404.19737): K heads side by side on the same state.

Head k is one decoder layer and a norm, the output layer is the target's. What the heads read is f,
the target's state after its final norm; a norm of their own before the layer can undo that one (the
paper's heads read the trunk before any norm). The target itself gives x[t+1]; row t of head k
guesses x[t+2+k] without having seen any of the tokens between. All K guesses of an anchor are there
at once, and every node of one depth of a tree gets the same.

B batch, T length, n rows, m nodes, K heads, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from spectrain.core.attention import Plan
from spectrain.core.batch import Batch, Features, counted
from spectrain.core.cache import KVCache, visible_slots
from spectrain.heads import vocab
from spectrain.heads.base import Unrolled
from spectrain.heads.mtp_module import (
    LayerBuilder,
    RotaryTable,
    check_layer,
    run_layer,
    start_from_target,
)
from spectrain.heads.mtp_shared import MtpConfig, MtpHead, MtpOptions
from spectrain.heads.work import NORM, Shape, Work, decoder_layer


class MtpParallelOptions(MtpOptions):
    """What a user may choose when a head is made."""


class MtpParallelConfig(MtpConfig):
    """The head's config.json."""

    family: Literal["mtp-parallel"] = "mtp-parallel"


class ParallelLayer(nn.Module):
    """One of the K heads; `index` is its layer in the cache."""

    def __init__(self, builder: LayerBuilder, index: int) -> None:
        super().__init__()
        self.hnorm = builder.norm()
        self.layer = builder.layer(index)
        self.norm = builder.norm()

    def forward(self, rotary: RotaryTable, hidden: Tensor, positions: Tensor, plan: Plan) -> Tensor:
        """hidden [B, n, H], positions [B, n] → [B, n, H], before the norm"""
        return run_layer(self.layer, rotary, self.hnorm(hidden), positions, plan)


@dataclass
class ParallelState:
    """Drafting state: one layer of the cache for each head.

    outputs [K, B, H]: every head's output at the anchor; level: depth that was drafted last
    """

    cache: KVCache
    outputs: Tensor | None = None
    level: int = 0


class MtpParallelHead(MtpHead):
    """K independent layers on the target's last state."""

    family: ClassVar[str] = "mtp-parallel"
    Config: ClassVar[type[MtpParallelConfig]] = MtpParallelConfig
    Options: ClassVar[type[BaseModel]] = MtpParallelOptions
    config: MtpParallelConfig

    def __init__(self, config: MtpParallelConfig) -> None:
        super().__init__(config)
        builder = LayerBuilder(config.layer)
        self.heads = nn.ModuleList(ParallelLayer(builder, index) for index in range(config.steps))
        self._rotary, self._layer_config = builder.rotary(), builder.config

    @classmethod
    def create(
        cls, options: MtpParallelOptions, target: Any, token_counts: Tensor
    ) -> MtpParallelHead:
        config = cls.configure(options, target)
        kind = config.layer
        ids = vocab.choose(config.draft_vocab_size, target, token_counts)
        check_layer(LayerBuilder(kind), target)
        head = cls(config)
        head.use_vocabulary(ids)
        if options.init == "target":
            for part in head.heads:
                start_from_target(part.layer, part.norm, part.hnorm, kind, target, normed=True)
        head.to(target.device).bind(target.readout)
        return head

    @classmethod
    def configure(cls, options: MtpParallelOptions, target: Any) -> MtpParallelConfig:
        return MtpParallelConfig(
            steps=options.steps, loss=options.loss, **cls.sizes(options.draft_vocab_size, target)
        )

    def norm_of(self, step: int) -> nn.Module:
        return self.heads[step].norm

    # ── training face ────────────────────────────────────────────────────────

    def unroll(self, batch: Batch, steps: int) -> Iterator[Unrolled]:
        anchors = counted(batch.reply, 0).flatten().nonzero().squeeze(1)
        positions = batch.positions
        plan = Plan(positions, starts=batch.starts)
        hidden = batch.last.to(self.norm_of(0).weight.dtype)
        for step in range(steps):
            out = self.heads[step](self._rotary, hidden, positions, plan)
            yield Unrolled(step, out.flatten(0, 1)[anchors], anchors)

    def work(self, shape: Shape) -> Work:
        hidden = self.config.target.hidden_size
        entry = Work(numbers=shape.tokens * NORM * hidden, kept=shape.tokens * 2 * hidden)
        result = self.loss_work(shape)
        for head in self.heads:
            result += entry + decoder_layer(
                head.layer, self._layer_config, shape.tokens, shape.pairs, shape.length
            )
        return result

    def weights(self, progress: float) -> list[float]:
        return [1.0] * self.config.steps

    # ── drafting face ────────────────────────────────────────────────────────

    def start(self, rows: int, slots: int) -> ParallelState:
        return ParallelState(KVCache(rows, slots, self.norm_of(0).weight.device))

    def extend(
        self,
        state: ParallelState,
        tokens: Tensor,
        features: Features,
        counts: Tensor,
        view: int = 0,
    ) -> Tensor:
        cache = state.cache
        new = tokens.shape[1]
        slots = cache.lengths[:, None] + torch.arange(new, device=tokens.device)
        cache.place(slots, slots)
        visible = visible_slots(cache.lengths, new, view or cache.slots, None)
        plan = Plan(slots, cache, slots, visible)
        hidden = features.last.to(self.norm_of(0).weight.dtype)
        last = (counts - 1).clamp(min=0)[:, None, None].expand(-1, -1, hidden.shape[-1])
        outputs = [
            head(self._rotary, hidden, slots, plan).gather(1, last)[:, 0] for head in self.heads
        ]
        cache.commit(counts)
        state.outputs, state.level = torch.stack(outputs), 0
        return self.logits(state.outputs[0], 0)

    def expand(self, state: ParallelState, tokens: Tensor, parents: Tensor) -> Tensor:
        state.level += 1
        logits = self.logits(state.outputs[state.level], state.level)
        return logits[:, None].expand(-1, tokens.shape[1], -1)

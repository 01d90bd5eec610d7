"""EAGLE-3 (arXiv 2503.01840): one decoder layer over fused target features, training-time test.

Row t reads g[t] = fc(a[t]) and the embedding of x[t+1], and guesses x[t+2]; when drafting goes on,
the row's own output takes the place of g::

    step k, anchor t:  embeds x[t+1+k]   hidden: g[t] at k = 0, own output of step k−1 after that
                       rotary position t+k         guesses x[t+2+k]

B batch, T length, n rows, m nodes, R anchors, H hidden, A = 3·H, V vocabulary, D draft vocabulary,
Q/G query and kv heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from spectrain.core.attention import grouped_attention
from spectrain.core.batch import Batch, Features, counted
from spectrain.core.cache import KVCache, visible_slots
from spectrain.core.fast_linear import Linear
from spectrain.heads import eagle3_init, scoring, vocab
from spectrain.heads.base import DraftHead, HeadConfig, Needs, Objective, TargetFacts, Unrolled
from spectrain.heads.layers import MLP, RMSNorm, Rotary, rotate
from spectrain.heads.losses import soft_cross_entropy_rows
from spectrain.heads.ttt_attention import Anchors, ttt_attention

# The layer feeds itself, so it can draft further than it was trained; guesses get worse and worse.
LONGEST_DRAFT = 16


class Eagle3Options(BaseModel):
    """What a user may choose when a head is made (`head:` in a config, `--set head.steps=5`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: int = Field(7, ge=1, le=16, description="draft steps K unrolled in training")
    step_decay: float = Field(0.8, gt=0, le=1, description="weight of step k is step_decay**k")
    draft_vocab_size: int | None = Field(
        None, ge=1, description="tokens the head can guess; default: 32000, or all there are"
    )
    init: Literal["target", "random"] = Field(
        "target", description="start from the target's last layer, or at random"
    )
    train_lm_head: bool = Field(True, description="false keeps the target's rows as they are")
    aux_layers: tuple[int, int, int] | None = Field(
        None, description="decoder layers whose outputs are read, from 0; default 1, N/2-1, N-4"
    )


class Eagle3Config(HeadConfig):
    """The head's config.json."""

    family: Literal["eagle3"] = "eagle3"
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    aux_layers: tuple[int, int, int]
    step_decay: float
    train_lm_head: bool


class _Projections(nn.Module):
    """q/k/v over the concatenated embedding and hidden state (2H), o back to H."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        wide, size = 2 * config.hidden_size, config.head_dim
        self.q_proj = Linear(wide, config.num_attention_heads * size, bias=False)
        self.k_proj = Linear(wide, config.num_key_value_heads * size, bias=False)
        self.v_proj = Linear(wide, config.num_key_value_heads * size, bias=False)
        self.o_proj = Linear(config.num_attention_heads * size, config.hidden_size, bias=False)


class Eagle3Layer(nn.Module):
    """The decoder layer in pieces, so that both faces run the same code around their attention."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.size = config.head_dim
        self.self_attn = _Projections(config)
        self.mlp = MLP(hidden, config.intermediate_size)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def merge(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """[..., H] twice → [..., 2H], each normed by its own norm."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], dim=-1)

    def query(self, merged: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """[..., 2H] → [..., Q, d]"""
        return rotate(self.self_attn.q_proj(merged).unflatten(-1, (-1, self.size)), table)

    def key_value(self, merged: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[..., 2H] → keys, values [..., G, d]"""
        keys = self.self_attn.k_proj(merged).unflatten(-1, (-1, self.size))
        values = self.self_attn.v_proj(merged).unflatten(-1, (-1, self.size))
        return rotate(keys, table), values

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The un-normed residual [..., H] and the attention's output [..., Q·d] → [..., H]."""
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass
class Eagle3State:
    """Drafting state: verified rows in the cache, drafted nodes behind them."""

    cache: KVCache
    view: int
    hidden: Tensor | None = None  # [B, m, H] outputs of the last level, before the norm
    ancestors: Tensor | None = None  # [B, m, U] of the last level among the U drafted nodes
    level: int = 0


class Eagle3Head(DraftHead):
    """One decoder layer with its own lm_head over the draft vocabulary."""

    family: ClassVar[str] = "eagle3"
    Config: ClassVar[type[HeadConfig]] = Eagle3Config
    Options: ClassVar[type[BaseModel]] = Eagle3Options
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.fc = Linear(3 * config.target.hidden_size, hidden, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = Linear(hidden, config.draft_vocab_size, bias=False)
        self.lm_head.requires_grad_(config.train_lm_head)
        self.rotary = Rotary(
            config.head_dim, config.max_position_embeddings, config.rope_parameters
        )
        self.scale = config.head_dim**-0.5

    # ── making one ───────────────────────────────────────────────────────────

    @classmethod
    def create(cls, options: Eagle3Options, target: Any, token_counts: Tensor) -> Eagle3Head:
        model, readout = target.config, target.readout
        ids = vocab.choose(options.draft_vocab_size, target, token_counts)
        heads = model.num_attention_heads
        config = Eagle3Config(
            steps=options.steps,
            step_decay=options.step_decay,
            train_lm_head=options.train_lm_head,
            vocab_size=readout.vocab_size,
            draft_vocab_size=len(ids),
            hidden_size=target.hidden_size,
            intermediate_size=model.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(model, "num_key_value_heads", None) or heads,
            head_dim=getattr(model, "head_dim", None) or target.hidden_size // heads,
            rms_norm_eps=getattr(model, "rms_norm_eps", 1e-6),
            rope_parameters=eagle3_init.rope_parameters(model),
            max_position_embeddings=model.max_position_embeddings,
            aux_layers=eagle3_init.aux_layers(options.aux_layers, target),
            target=TargetFacts.of(target),
        )
        head = cls(config)
        head.use_vocabulary(ids)
        eagle3_init.initialise(head, target, ids, from_layer=options.init == "target")
        return head.to(target.device).bind(readout)

    @property
    def needs(self) -> Needs:
        return Needs(aux_layers=self.config.aux_layers)

    @property
    def longest_draft(self) -> int:
        return LONGEST_DRAFT

    # ── training face ────────────────────────────────────────────────────────

    def unroll(self, batch: Batch, steps: int) -> Iterator[Unrolled]:
        length = batch.tokens.shape[1]
        anchors = Anchors.of(counted(batch.reply, 0))
        dtype = self.norm.weight.dtype
        fused = self.fc(batch.aux.to(dtype))  # [B, T, H]
        # Row t embeds x[t+1]; the last row has no next token, and no anchor ever looks at it.
        following = torch.cat([batch.tokens[:, 1:], batch.tokens[:, -1:]], dim=1)
        merged = self.midlayer.merge(self.readout.embed(following).to(dtype), fused)
        table = self.rotary(torch.arange(length, device=merged.device), dtype)
        keys, values = self.midlayer.key_value(merged, table)

        flat_tokens = batch.tokens.flatten()
        row_end = anchors.flat - anchors.position + length - 1
        hidden = fused.flatten(0, 1)[anchors.flat]  # [R, H]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        for step in range(steps):
            fed = flat_tokens[torch.minimum(anchors.flat + 1 + step, row_end)]
            merged = self.midlayer.merge(self.readout.embed(fed).to(dtype), hidden)
            table = self.rotary(anchors.position + step, dtype)
            if step > 0:
                key, value = self.midlayer.key_value(merged, table)
                own_keys.append(key)
                own_values.append(value)
            query = self.midlayer.query(merged, table)
            attended = ttt_attention(query, keys, values, own_keys, own_values, anchors, self.scale)
            hidden = self.midlayer.finish(hidden, attended)
            yield Unrolled(step, hidden, anchors.flat)

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def counts(self, batch: Batch) -> Tensor:
        return scoring.taught_counts(self, batch, self.config.steps)

    def objective(self, batch: Batch) -> Objective:
        teacher = scoring.Teacher.of(self, batch)
        parts = scoring.Sums(self, batch)
        for unrolled in self.unroll(batch, self.config.steps):
            logits = self.logits(unrolled.hidden, unrolled.step)
            step = parts.step(unrolled)
            parts.add(step, soft_cross_entropy_rows(logits, teacher.at(step.rows)), logits)
        return parts.objective()

    def weights(self, progress: float) -> list[float]:
        return [self.config.step_decay**k for k in range(self.config.steps)]

    # ── drafting face ────────────────────────────────────────────────────────

    def start(self, rows: int, slots: int) -> Eagle3State:
        return Eagle3State(KVCache(rows, slots, self.norm.weight.device), slots)

    def extend(
        self,
        state: Eagle3State,
        tokens: Tensor,
        features: Features,
        counts: Tensor,
        view: int = 0,
    ) -> Tensor:
        cache, dtype = state.cache, self.norm.weight.dtype
        state.view = view or cache.slots
        positions = cache.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        fused = self.fc(features.aux.to(dtype))
        merged = self.midlayer.merge(self.readout.embed(tokens).to(dtype), fused)
        cache.write(0, positions, *self.midlayer.key_value(merged, self.rotary(positions, dtype)))
        # Verified rows before the last are needed for their key and value alone.
        last = (counts - 1).clamp(min=0)[:, None]
        merged, fused = (_take(rows, last) for rows in (merged, fused))
        query = self.midlayer.query(merged, self.rotary(positions.gather(1, last), dtype))
        cache.commit(counts)
        state.level, state.ancestors = 0, None
        visible = torch.arange(state.view, device=tokens.device) < cache.lengths[:, None, None]
        state.hidden = self._attend(state, query, visible, fused)
        return self.logits(state.hidden, 0)[:, 0]

    def expand(self, state: Eagle3State, tokens: Tensor, parents: Tensor) -> Tensor:
        cache, dtype = state.cache, state.hidden.dtype
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
        table = self.rotary(positions, dtype)
        residual = _take(state.hidden, parents)
        merged = self.midlayer.merge(self.readout.embed(tokens).to(dtype), residual)
        cache.write(0, slots, *self.midlayer.key_value(merged, table))
        visible = visible_slots(cache.lengths, width, state.view, state.ancestors)
        query = self.midlayer.query(merged, table)
        state.hidden = self._attend(state, query, visible, residual)
        return self.logits(state.hidden, state.level)

    def _attend(
        self, state: Eagle3State, query: Tensor, visible: Tensor, residual: Tensor
    ) -> Tensor:
        """query [B, m, Q, d], visible [B, m, view], residual [B, m, H] → [B, m, H]"""
        keys, values = (t.transpose(1, 2) for t in state.cache.read(0, state.view))
        out = grouped_attention(query.transpose(1, 2), keys, values, visible, self.scale)
        return self.midlayer.finish(residual, out.transpose(1, 2).flatten(2))


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [B, n, X], index [B, m] → [B, m, X]"""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))

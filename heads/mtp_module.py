"""Decoder layers of the target's own kind, for heads of multi-token prediction.

The layer is the class that `transformers` has for the target, called with the target's rotary
positions and our attention, so that what is special about an architecture (normed queries, latent
attention, experts, soft caps, windows) is there without a word about it here. Without a cache in
the `Plan` a layer reads right-padded rows causally (the training face), with one it goes on behind
what the cache holds (the drafting face).

B batch, n rows, H hidden size.
"""

from __future__ import annotations

import copy
import inspect
import json
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core import attention
from spectrain.core.attention import Plan
from spectrain.core.errors import SpectrainError
from spectrain.core.fast_linear import Linear
from spectrain.heads.eagle1_init import sizes
from spectrain.heads.eagle3_init import copy_norm
from spectrain.heads.layers import RMSNorm

# The embedding half of eh_proj starts small: the hidden half alone reproduces what is known.
_SMALL = 0.02
# A weight of the final norm near zero hides its coordinate; taking it out would blow that up.
_SMALLEST = 0.1
# What says nothing about the architecture.
_FORGOTTEN = ("_name_or_path", "architectures", "transformers_version", "dtype", "model_type")


class LayerKind(BaseModel):
    """All that is needed to build a decoder layer of the target without the target."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    model_type: str = Field(description="the architecture's name in transformers")
    source: int = Field(ge=0, description="the target's layer, from 0, whose kind it is")
    config: dict[str, Any] = Field(description="the target's own configuration")

    @classmethod
    def of(cls, config: Any) -> LayerKind:
        """The kind of the last layer, of the last with full attention where layers differ.

        config: a text configuration of transformers.
        """
        values = json.loads(config.to_json_string(use_diff=False))
        kept = {key: value for key, value in values.items() if key not in _FORGOTTEN}
        source = config.num_hidden_layers - 1
        types = list(getattr(config, "layer_types", None) or [])
        if "full_attention" in types:
            source = max(i for i, name in enumerate(types) if name == "full_attention")
        return cls(model_type=config.model_type, source=source, config=kept)


class LayerBuilder:
    """Makes the parts of a head out of the classes of one architecture."""

    def __init__(self, kind: LayerKind) -> None:
        self.kind = kind
        try:
            config = AutoConfig.for_model(kind.model_type, **copy.deepcopy(kind.config))
            with torch.device("meta"):
                self._model = AutoModelForCausalLM.from_config(
                    config, attn_implementation=attention.NAME, trust_remote_code=False
                )
        except (ValueError, KeyError, TypeError) as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise SpectrainError(
                f"transformers cannot build a layer of kind {kind.model_type!r} ({reason})",
                fix="use a target of an architecture that transformers has, or another family",
            ) from None
        self._decoder = self._model.get_decoder()
        self.config = self._decoder.config
        self.hidden_size = self.config.hidden_size

    def layer(self, index: int) -> nn.Module:
        """A decoder layer with random weights; `index`: its layer in a cache."""
        layer = type(self._decoder.layers[self.kind.source])(self.config, self.kind.source)
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
        return self._initialised(layer)

    def norm(self) -> nn.Module:
        """A norm over H like the target's final one, with weights that change nothing."""
        return self._initialised(copy.deepcopy(self._decoder.norm).to_empty(device="cpu"))

    def rotary(self) -> RotaryTable:
        config, decoder = self.config, self._decoder
        types = getattr(config, "layer_types", None)
        return RotaryTable(
            type(decoder.rotary_emb)(config), types[self.kind.source] if types else None
        )

    def _initialised(self, module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for part in module.modules():
                self._model._init_weights(part)
        return module


class RotaryTable:
    """The target's rotary positions. No module: they stay float32 when a head goes to a lower type,
    for angles of far positions need every digit."""

    def __init__(self, embedding: nn.Module, layer_type: str | None) -> None:
        self._embedding = embedding
        # Architectures whose kinds of layers turn differently ask for the kind.
        asks = "layer_type" in inspect.signature(embedding.forward).parameters
        self._more = {"layer_type": layer_type} if asks else {}

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, n] → cos, sin [B, n, d] in the type and on the device of `like`."""
        # Frequencies that stayed on the host would be copied in every forward: the host would wait
        # for the device, and no graph could be captured.
        self._embedding.to(like.device)
        return self._embedding(like, positions, **self._more)


def run_layer(
    layer: nn.Module, rotary: RotaryTable, hidden: Tensor, positions: Tensor, plan: Plan
) -> Tensor:
    """hidden [B, n, H] at rotary positions [B, n] → [B, n, H]"""
    out = layer(
        hidden,
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=hidden.device),
        position_ids=positions,
        position_embeddings=rotary(hidden, positions),
        plan=plan,
    )
    return out if isinstance(out, Tensor) else out[0]


class MtpModule(nn.Module):
    """One module of DeepSeek-V3's multi-token prediction (arXiv 2412.19437, section 2.2).

    h' = eh_proj [enorm(embedding); hnorm(hidden)], one decoder layer; `norm` comes before lm_head.
    """

    def __init__(self, builder: LayerBuilder, index: int) -> None:
        super().__init__()
        hidden = builder.hidden_size
        self.enorm, self.hnorm = builder.norm(), builder.norm()
        self.eh_proj = Linear(2 * hidden, hidden, bias=False)
        self.layer = builder.layer(index)
        self.norm = builder.norm()
        with torch.no_grad():
            self.eh_proj.weight.normal_(std=_SMALL)
            self.eh_proj.weight[:, hidden:] = torch.eye(hidden)

    def forward(
        self, rotary: RotaryTable, embedding: Tensor, hidden: Tensor, positions: Tensor, plan: Plan
    ) -> Tensor:
        """embedding, hidden [B, n, H], positions [B, n] → [B, n, H], before the norm"""
        merged = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))
        return run_layer(self.layer, rotary, merged, positions, plan)


@torch.no_grad()
def start_from_target(
    layer: nn.Module,
    norm: nn.Module,
    entry: nn.Module,
    kind: LayerKind,
    target: Any,
    *,
    normed: bool,
) -> None:
    """Copy the target's own layer and final norm (target: core.target.Target, not packed).

    The layer works on the residual stream h, of size (root mean square) r. `entry`, the norm that
    the hidden state passes first, gives it that size again; where it is `normed`, a state that has
    left a final norm (f = h / r ⊙ w), it also takes the weight w out, so that what the layer reads
    is h. On SmolLM2-135M, two modules after 54 steps of two conversations: loss 4.6 and 5.4 instead
    of 6.4 and 6.5.
    """
    source = target.layer(kind.source)
    try:
        layer.load_state_dict(source.state_dict(), strict=True)
        norm.load_state_dict(target.decoder.norm.state_dict(), strict=True)
    except RuntimeError as error:
        raise SpectrainError(
            f"the target's layer {kind.source} cannot be copied ({str(error).splitlines()[-1]})",
            where=f"target {target.name}",
            fix="set head.init=random",
        ) from None
    stream, _ = sizes(target)
    final = RMSNorm(target.hidden_size)
    if copy_norm(final, target.decoder.norm):
        weight = final.weight.sign() * final.weight.abs().clamp(min=_SMALLEST) if normed else 1.0
        # Norms start without effect: their weight is one, or zero where it is counted from one.
        entry.weight.add_(stream / weight - 1)


@torch.no_grad()
def check_layer(builder: LayerBuilder, target: Any) -> None:
    """Refuse a target whose layers need more than hidden states and positions: its own layer,
    called the way a head calls it, has to give what it gives inside the target."""
    kind, seen = builder.kind, []
    source = target.decoder.layers[kind.source]
    hooks = [
        source.register_forward_pre_hook(
            lambda _module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        ),
        source.register_forward_hook(
            lambda _module, _args, out: seen.append(out if isinstance(out, Tensor) else out[0])
        ),
    ]
    tokens = torch.randint(
        0, target.readout.usable, (1, 12), generator=torch.Generator().manual_seed(0)
    ).to(target.device)
    try:
        target.forward(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    positions = torch.arange(12, device=target.device)[None]
    try:
        ours = run_layer(source, builder.rotary(), seen[0], positions, Plan(positions))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise SpectrainError(
            f"layer {kind.source} cannot be called on its own ({reason})",
            where=f"target {target.name} ({kind.model_type})",
            fix="MTP heads are not available for this architecture; choose another family",
        ) from None
    target.require_close("the target's last layer inside and outside the model", ours, seen[1])

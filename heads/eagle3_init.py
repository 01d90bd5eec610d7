"""Where an EAGLE head starts: sizes and rotary base from the target, weights from its last layers.

A head that starts as a copy of the target's last decoder layer, fed with the highest auxiliary
state, learns in minutes what a random one needs hours for (numbers in docs/LOG.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spectrain.core.errors import SpectrainError

# The embedding half of q/k/v starts small: the copied half alone reproduces the target's layer.
_SMALL = 0.1


def rope_parameters(model: Any) -> dict[str, Any]:
    """The target's rotary parameters; of a target with several kinds of layers, the global ones."""
    parameters = dict(getattr(model, "rope_parameters", None) or {})
    if "full_attention" in parameters:
        parameters = dict(parameters["full_attention"])
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise SpectrainError(
            "the target rotates only a part of each head (partial_rotary_factor)",
            fix="EAGLE heads are not available for this target yet",
        )
    return {"rope_type": "default", "rope_theta": 10000.0, **parameters}


def aux_layers(chosen: tuple[int, ...] | None, target: Any) -> tuple[int, ...]:
    """The chosen layers, checked, or the target's default ones."""
    if chosen is None:
        return target.default_aux_layers()
    inside = all(0 <= layer < target.num_layers for layer in chosen)
    if not inside or list(chosen) != sorted(set(chosen)):
        raise SpectrainError(
            f"aux_layers {list(chosen)} are not ascending layers of 0 … {target.num_layers - 1}",
            where="head.aux_layers",
        )
    return chosen


@torch.no_grad()
def initialise_eagle3(head: Any, target: Any, ids: Tensor, *, from_layer: bool) -> None:
    """Fill the head: lm_head from the target's rows of `ids`, its layers from the target's last.

    What does not fit in shape (other MLP width, packed projections) keeps its random start.
    """
    _random(head)
    head.lm_head.weight.copy_(target.readout.rows(ids.to(target.device))[0])
    _copy_norm(head.norm, target.decoder.norm)
    if head.config.embeddings == "own":
        every = torch.arange(head.config.vocab_size, device=target.device)
        head.embed_tokens.weight.copy_(target.readout.embed(every))
    if not from_layer:
        return
    hidden = head.config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:] = torch.eye(hidden)
    _copy_last_layers(head.stack, target, head.midlayer.hidden_norm)


@torch.no_grad()
def initialise_eagle1(head: Any, target: Any, *, from_layer: bool) -> None:
    """Fill the head: features pass through `fc` as they are, its layer is the target's last."""
    _random(head)
    if head.fc.bias is not None:
        head.fc.bias.zero_()
    if not from_layer:
        return
    hidden = head.config.hidden_size
    head.fc.weight[:, :hidden] *= _SMALL
    head.fc.weight[:, hidden:] = torch.eye(hidden)
    _copy_last_layers(head.stack, target, None)


def _random(head: nn.Module) -> None:
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def _copy_last_layers(stack: list[Any], target: Any, first_norm: nn.Module | None) -> None:
    """Layers of the head from as many last ones of the target. Where q/k/v read more than a hidden
    state, that is the last part of it. first_norm: the first layer's norm of the hidden state."""
    for index in range(min(len(stack), target.num_layers)):
        layer, source = stack[-1 - index], target.decoder.layers[-1 - index]
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(layer.self_attn, name).weight
            theirs = getattr(source.self_attn, name, None)
            hidden = layer.self_attn.o_proj.weight.shape[0]
            if theirs is not None and theirs.weight.shape == (own.shape[0], hidden):
                own[:, :-hidden] *= _SMALL
                own[:, -hidden:] = theirs.weight
        _copy_linear(layer.self_attn.o_proj, getattr(source.self_attn, "o_proj", None))
        for name in ("gate_proj", "up_proj", "down_proj"):
            _copy_linear(getattr(layer.mlp, name), getattr(source.mlp, name, None))
        norm = first_norm if layer is stack[0] else layer.input_layernorm
        if norm is not None:
            _copy_norm(norm, getattr(source, "input_layernorm", None))
        theirs = getattr(source, "post_attention_layernorm", None)
        _copy_norm(layer.post_attention_layernorm, theirs)


def _copy_linear(own: nn.Linear, theirs: nn.Module | None) -> None:
    if isinstance(theirs, nn.Linear) and theirs.weight.shape == own.weight.shape:
        own.weight.copy_(theirs.weight)


def _copy_norm(own: nn.Module, theirs: nn.Module | None) -> None:
    """Copy a norm so that it computes the same (Gemma stores weight − 1); else leave it alone."""
    weight = getattr(theirs, "weight", None)
    if weight is None or weight.shape != own.weight.shape:
        return
    probe = torch.randn(1, len(weight), generator=torch.Generator().manual_seed(0))
    expected = theirs(probe.to(weight)).float()
    before = own.weight.clone()
    for candidate in (weight.float(), weight.float() + 1):
        own.weight.copy_(candidate)
        scale = expected.abs().max()
        if (own(probe.to(own.weight)).float() - expected).abs().max() <= 2e-2 * scale:
            return
    own.weight.copy_(before)

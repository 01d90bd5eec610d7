"""Where an EAGLE-3 head starts: rotary base from the target, weights from its last layers.

A head that starts as a copy of the target's last decoder layer, fed with the highest auxiliary
state, learns in minutes what a random one needs hours for (numbers in docs/LOG.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spectrain.core.errors import SpectrainError

# The embedding half of q/k/v starts small: the copied half alone reproduces the target's layer.
SMALL = 0.1


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
def initialise(head: Any, target: Any, ids: Tensor, *, from_layer: bool) -> None:
    """Fill the head: lm_head from the target's rows of `ids`, its layers from the target's last.

    What does not fit in shape (other MLP width, packed projections) keeps its random start.
    """
    random_start(head)
    head.lm_head.weight.copy_(target.readout.rows(ids.to(target.device))[0])
    copy_norm(head.norm, getattr(target.decoder, "norm", None))
    if head.config.embeddings == "own":
        every = torch.arange(head.config.vocab_size, device=target.device)
        head.embed_tokens.weight.copy_(target.readout.embed(every))
    if not from_layer:
        return
    hidden = head.config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:] = torch.eye(hidden)
    _copy_last_layers(head, target)


def random_start(head: nn.Module) -> None:
    """Every linear layer's weight; norms start as ones."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def _copy_last_layers(head: Any, target: Any) -> None:
    """As many of the target's last layers as the head has. The first one's q/k/v read an embedding
    as well: their other half is the copy."""
    hidden = head.config.hidden_size
    # From the end; of a head with more layers than its target the first stay as they are.
    for place, layer in enumerate(list(reversed(head.stack))[: target.num_layers], start=1):
        source = target.layer(-place)
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(layer.self_attn, name).weight
            theirs = getattr(source.self_attn, name, None)
            if theirs is not None and theirs.weight.shape == (own.shape[0], hidden):
                own[:, :-hidden] *= SMALL
                own[:, -hidden:] = theirs.weight
        copy_linear(layer.self_attn.o_proj, getattr(source.self_attn, "o_proj", None))
        for name in ("gate_proj", "up_proj", "down_proj"):
            copy_linear(getattr(layer.mlp, name), getattr(source.mlp, name, None))
        reading = layer.hidden_norm if layer is head.midlayer else layer.input_layernorm
        copy_norm(reading, getattr(source, "input_layernorm", None))
        theirs = getattr(source, "post_attention_layernorm", None)
        copy_norm(layer.post_attention_layernorm, theirs)


def copy_linear(own: nn.Linear, theirs: nn.Module | None) -> bool:
    """Copy a weight that fits; returns whether it did."""
    fits = isinstance(theirs, nn.Linear) and theirs.weight.shape == own.weight.shape
    if fits:
        own.weight.copy_(theirs.weight)
    return fits


def copy_norm(own: nn.Module, theirs: nn.Module | None) -> bool:
    """Copy a norm so that it computes the same (Gemma stores weight − 1); else leave it alone and
    return False."""
    weight = getattr(theirs, "weight", None)
    if weight is None or weight.shape != own.weight.shape:
        return False
    probe = torch.randn(1, len(weight), generator=torch.Generator().manual_seed(0))
    expected = theirs(probe.to(weight)).to(own.weight)
    before = own.weight.clone()
    for candidate in (weight.float(), weight.float() + 1):
        own.weight.copy_(candidate)
        scale = expected.abs().max()
        if (own(probe.to(own.weight)) - expected).abs().max() <= 2e-2 * scale:
            return True
    own.weight.copy_(before)
    return False

"""Where an EAGLE-1 head starts: the target's last layer, in the coordinates of its last state.

The target's layer reads and writes the residual stream h, the head's layer the state f that comes
out of the final norm: f = N(h) ⊙ w, N(h) = h / r with r the size (root mean square) of h. So::

    q/k/v          W · diag(w_in / w)       for N(h) ⊙ w_in = f ⊙ w_in / w
    o, down        diag(w / r) · W          a change Δ of h is the change Δ ⊙ w / r of f
    norm of MLP    w_post · s / w           for N(f) = f / s, s the size of f

A plain copy would be no start at all: on SmolLM2-135M the loss begins at 92 (random 2.2, in these
coordinates 2.0). Greedy acceptance at steps 0, 1, 2 of one small trial, 150 batches of 4 replies:
0.25 0.08 0.04 from the target, 0.25 0.14 0.11 from random weights, at a loss of 1.03 and 1.07. A
head that passes f on is slow to learn to pass its own f̂ on; hence random is the default.

H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spectrain.heads.eagle3_init import SMALL, copy_linear, copy_norm, random_start
from spectrain.heads.layers import RMSNorm

# A weight of the final norm near zero hides its coordinate; what reads it is not blown up for that.
_LARGEST_RATIO = 10.0
_KNOWN_NORMS = {"input_layernorm", "post_attention_layernorm"}


@torch.no_grad()
def initialise(head: Any, target: Any, *, from_layer: bool) -> None:
    """Fill the head: `fc` passes the feature on, its layer is the target's last one.

    What does not fit (other norms, other MLP width, packed projections) keeps its random start.
    """
    random_start(head)
    if head.fc.bias is not None:
        head.fc.bias.zero_()
    if not from_layer:
        return
    hidden = head.config.hidden_size
    head.fc.weight[:, :hidden] *= SMALL
    head.fc.weight[:, hidden:] = torch.eye(hidden)
    layer, source = head.layers[0], target.layer(-1)
    norms = {name for name, _ in source.named_children() if "norm" in name}
    final = _norm_weight(getattr(target.decoder, "norm", None), hidden)
    reading, between = (
        _norm_weight(getattr(source, n, None), hidden) for n in sorted(_KNOWN_NORMS)
    )
    if norms != _KNOWN_NORMS or final is None or reading is None or between is None:
        return
    stream, state = sizes(target)
    for name in ("q_proj", "k_proj", "v_proj"):
        own = getattr(layer.self_attn, name)
        if copy_linear(own, getattr(source.self_attn, name, None)):
            own.weight *= _ratio(reading, final)
    for own, theirs in (
        (layer.self_attn.o_proj, getattr(source.self_attn, "o_proj", None)),
        (layer.mlp.down_proj, getattr(source.mlp, "down_proj", None)),
    ):
        if copy_linear(own, theirs):
            own.weight *= (final / stream)[:, None]
    for name in ("gate_proj", "up_proj"):
        copy_linear(getattr(layer.mlp, name), getattr(source.mlp, name, None))
    layer.post_attention_layernorm.weight.copy_(_ratio(between * state, final))


def sizes(target: Any) -> tuple[float, float]:
    """Root mean squares of the residual stream before the final norm and of the state behind it:
    medians over some tokens drawn at random (of text they are within a factor of 1.5)."""
    seen: dict[str, Tensor] = {}

    def keep(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        seen.update(stream=inputs[0], state=output)

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, target.readout.usable, (1, 64), generator=generator)
    hook = target.decoder.norm.register_forward_hook(keep)
    try:
        target.forward(tokens[:, : target.max_length].to(target.device))
    finally:
        hook.remove()
    rows = (seen[name].float().pow(2).mean(-1).sqrt() for name in ("stream", "state"))
    stream, state = (row.median().item() for row in rows)
    return stream, state


def _norm_weight(norm: nn.Module | None, size: int) -> Tensor | None:
    """What an RMS norm multiplies by [H]; None for another kind of norm."""
    own = RMSNorm(size)
    return own.weight if copy_norm(own, norm) else None


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return (above / below).clamp(-_LARGEST_RATIO, _LARGEST_RATIO)

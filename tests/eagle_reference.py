"""A head as an engine computes it from its files: slow and plain, on the library's own states.

n rows, A query heads, G kv heads, d head size, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def layer(tensors: dict[str, Tensor], name: str, config, x: Tensor, residual: Tensor) -> Tensor:
    """x [n, W] what q/k/v read → [n, H]; row i is at position i."""
    part = {
        key.removeprefix(name).removesuffix(".weight"): value
        for key, value in tensors.items()
        if key.startswith(name)
    }
    heads = (
        F.linear(x, part[f"self_attn.{one}_proj"]).view(1, len(x), -1, config.head_dim)
        for one in "qkv"
    )
    query, key, value = (one.transpose(1, 2) for one in heads)
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(len(x))[None])
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    hidden = residual + F.linear(seen.transpose(1, 2).flatten(2)[0], part["self_attn.o_proj"])
    x = norm(hidden, part["post_attention_layernorm"], config.rms_norm_eps)
    gate = F.silu(F.linear(x, part["mlp.gate_proj"])) * F.linear(x, part["mlp.up_proj"])
    return hidden + F.linear(gate, part["mlp.down_proj"])


@torch.no_grad()
def engine_logits(
    folder: Path,
    model,
    tokens: Tensor,
    inputs: list[int] | None,
    steps: int,
    further: str = "input_layernorm",
):
    """Logits [D] of each of `steps` greedy guesses behind x[0 … n].

    inputs: of an EAGLE-3 head the layers whose inputs it reads, as the library numbers them; None
    for EAGLE-1. further: what the engine calls the input norm of a layer behind the first.
    Everything is computed anew at every step.
    """
    tensors, config = load_file(folder / "model.safetensors"), AutoConfig.from_pretrained(folder)
    states = model(tokens[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
    table = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    fc, eps = tensors["fc.weight"], config.rms_norm_eps
    taken = [states[-1]] if inputs is None else [states[i] for i in inputs]
    hidden, following, results = torch.cat(taken, dim=-1)[0], tokens[1:], []
    if inputs is not None:
        hidden = F.linear(hidden, fc)
    for _ in range(steps):
        embedding = table[following]
        if inputs is None:
            x = F.linear(torch.cat([embedding, hidden], -1), fc, tensors.get("fc.bias"))
            out = layer(tensors, "layers.0.", config, x, x)
            results.append(F.linear(out[-1], model.get_output_embeddings().weight))
            guess = results[-1].argmax()
        else:
            first = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
            pair = (embedding, "input_layernorm"), (hidden, "hidden_norm")
            x = [norm(value, tensors[f"{first}{name}.weight"], eps) for value, name in pair]
            out = layer(tensors, first, config, torch.cat(x, -1), hidden)
            for index in range(1, config.num_hidden_layers):
                x = norm(out, tensors[f"layers.{index}.{further}.weight"], eps)
                out = layer(tensors, f"layers.{index}.", config, x, out)
            final = norm(out[-1], tensors["norm.weight"], eps)
            results.append(F.linear(final, tensors["lm_head.weight"]))
            guess = results[-1].argmax()
            guess = guess + tensors["d2t"][guess] if "d2t" in tensors else guess
        hidden = torch.cat([hidden, out[-1:]])
        following = torch.cat([following, guess[None]])
    return results

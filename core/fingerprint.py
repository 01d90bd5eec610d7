"""What names a target: its weights, what it computes with them, and its vocabulary.

n values of a tensor, _BLOCK values behind each number of its digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_BLOCK = 1 << 16
_BLOCKS_AT_A_TIME = 16  # 8 MB of float64

# Keys of a configuration that change what a model computes and that its weights do not show. A
# list, since the library adds keys from version to version. Keys in one group are spellings of the
# same thing. What has moved between keys (rotary positions, windows) is looked at by value below.
_SHAPING = (
    ("num_hidden_layers",),
    ("num_attention_heads",),
    ("num_kv_shared_layers",),
    ("qk_rope_head_dim",),
    ("v_head_dim",),
    ("hidden_act", "hidden_activation", "activation_function"),
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    ("do_layer_norm_before",),
    ("use_parallel_residual",),
    ("use_bidirectional_attention",),
    ("use_qk_norm",),
    ("no_rope_layers",),
    ("rope_interleave",),
    # scales and caps
    ("final_logit_softcapping", "logits_soft_cap"),
    ("attn_logit_softcapping", "attention_logit_cap"),
    ("query_pre_attn_scalar",),
    ("embedding_multiplier", "scale_emb", "scale_embedding"),
    ("attention_multiplier",),
    ("residual_multiplier", "scale_depth"),
    ("logits_scaling", "logit_scale", "lm_head_multiplier"),
    ("clip_qkv",),
    ("swiglu_limit", "swiglu_alpha"),
    # experts
    ("num_experts_per_tok", "top_k_experts", "moe_topk"),
    ("norm_topk_prob",),
    ("n_group", "topk_group"),
    ("topk_method", "scoring_func"),
    ("routed_scaling_factor", "moe_routed_scaling_factor", "router_scaling_factor", "route_scale"),
)


def fingerprint_of(model: nn.Module, tokenizer, stored: Mapping[str, Tensor] | None = None) -> str:
    """16 hex digits that name the weights, how they are computed with, and the vocabulary.

    stored: the model's state, where the model itself holds only pieces of it; each tensor is asked
    for once, in the order of the names.

    The same on every device. Weights count as rounded to bfloat16: loaded as float32 or bfloat16
    they give the same digits. As float16 they give digits of their own, unless that is how they
    are stored: it rounds small weights in another way.
    """
    digest = hashlib.sha256()
    config = model.config.get_text_config(decoder=True)
    digest.update(json.dumps([config.model_type, config.hidden_size, config.vocab_size]).encode())
    stored = model.state_dict() if stored is None else stored
    shaping = [_shaping(config), _rotary(model, set(stored))]
    digest.update(json.dumps(shaping, sort_keys=True).encode())
    for name in sorted(stored):
        tensor = stored[name]
        digest.update(json.dumps([name, list(tensor.shape)]).encode())
        digest.update(tensor_digest(tensor))
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    digest.update(vocabulary.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def tensor_digest(tensor: Tensor) -> bytes:
    """One float64 for each block of values in their order: Σ bits · weight of the place.

    bits: those of the value rounded to bfloat16, as an integer; of other types the bytes. A sum is
    an integer below 2^46 and thus exact, in whatever order a device adds. One changed value always
    changes it; several do, but for chance, since the weights follow no pattern.
    """
    weights = torch.from_numpy(_place_weights()).to(tensor.device)
    sums = []
    for part in tensor.detach().reshape(-1).split(_BLOCKS_AT_A_TIME * _BLOCK):
        if part.is_floating_point():
            bits = part.to(torch.bfloat16).view(torch.int16)
        else:
            bits = part.contiguous().view(torch.int8)
        bits = nn.functional.pad(bits, (0, -len(bits) % _BLOCK)).view(-1, _BLOCK)
        sums.append(bits.double() @ weights)
    return torch.cat(sums).cpu().numpy().tobytes() if sums else b""


def _place_weights() -> np.ndarray:
    """[_BLOCK] float64, integers of 1 … 2^15 − 1; of a generator that numpy keeps as it is."""
    return np.random.RandomState(0).randint(1, 1 << 15, _BLOCK).astype(np.float64)


def _shaping(config) -> dict[str, Any]:
    """What has a value among _SHAPING; and what follows from keys that may be left out."""
    found = {}
    for names in _SHAPING:
        values = [_plain(getattr(config, name, None)) for name in names]
        if values := [value for value in values if value not in (None, False)]:
            found[names[0]] = values
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        found["kv_heads"] = _plain(getattr(config, "num_key_value_heads", None) or heads)
        found["head_dim"] = _plain(getattr(config, "head_dim", None) or config.hidden_size // heads)
    window = _plain(getattr(config, "sliding_window", None))
    kinds = getattr(config, "layer_types", None) or ["sliding"] * config.num_hidden_layers
    windows = [window if "sliding" in kind else None for kind in kinds]
    return found | ({"windows": windows} if any(windows) else {})


def _plain(value: Any) -> Any:
    """5 and 5.0 are one value."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _rotary(model: nn.Module, stored: set[str]) -> list[list]:
    """Frequencies and scale of all rotary positions as the model has them, where they are not
    among its stored tensors: [[[…], scale], …].

    Four digits of each: machines differ in the last bit of a power. In the order of their names,
    which are left out since they change between versions of the library.
    """
    found = []
    for path, buffer in sorted(model.named_buffers()):
        owner, _, name = path.rpartition(".")
        if path in stored or not name.endswith("inv_freq") or "original" in name:
            continue
        scaling = name.replace("inv_freq", "attention_scaling")
        scale = getattr(model.get_submodule(owner), scaling, 1.0)
        found.append([[f"{value:.3e}" for value in buffer.tolist()], f"{scale:.3e}"])
    return found

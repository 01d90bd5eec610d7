"""The kinds of multi-token prediction that its tests go through."""

from __future__ import annotations

import pytest
from head_kinds import create
from tiny_models import SIZES

DEEPSEEK = {name: value for name, value in SIZES.items() if name != "head_dim"} | {
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
    **{"v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    **{"num_key_value_heads": 4, "num_nextn_predict_layers": 0},
}
ARCHITECTURES = {
    "qwen3": SIZES,
    # Every other layer looks at a window; logits and attention are capped.
    "gemma2": SIZES | {"sliding_window": 6, "final_logit_softcapping": 4.0},
    # Kinds of layers with rotary bases of their own, embeddings that are scaled.
    "gemma3_text": SIZES | {"sliding_window": 6, "rope_local_base_freq": 500.0},
    # Nothing but windows.
    "mistral": SIZES | {"sliding_window": 6},
    # Latent attention, experts.
    "deepseek_v3": DEEPSEEK,
}
VARIANTS = {
    "parallel": ("mtp-parallel", {}),
    "chain": ("mtp-sequential", {}),
    "chain before norm": ("mtp-sequential", {"pass_on": "before_norm"}),
    "recurrent": ("mtp-sequential", {"shared": True}),
}


every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make(target, variant, *, steps=3, draft_vocab=120, random=True, **more):
    name, options = VARIANTS[variant]
    options = {"steps": steps, "draft_vocab_size": draft_vocab} | options | more
    return create(target, name, random=random, **options)

"""Tiny checkpoints with MTP layers in the layouts of their authors, and heads made from them."""

from __future__ import annotations

import json

import torch
from head_kinds import create
from safetensors.torch import load_file, save_file
from tiny_models import SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.checkpoint import INDEX, SINGLE
from spectrain.core.readout import Readout
from spectrain.heads.base import TargetFacts
from spectrain.heads.mtp_module import LayerKind
from spectrain.heads.mtp_native import Native
from spectrain.heads.mtp_sequential import MtpSequentialConfig, MtpSequentialHead

H, V, LAYERS = SIZES["hidden_size"], SIZES["vocab_size"], SIZES["num_hidden_layers"]


WITHOUT_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}


CONFIGS = {
    "deepseek_v3": WITHOUT_HEAD_DIM
    | {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    | {"v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 4, "num_nextn_predict_layers": 2},
    "qwen2": WITHOUT_HEAD_DIM,  # MiMo is a Qwen2 with MTP layers
    "qwen3_next": SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"shared_expert_intermediate_size": 32, "linear_num_value_heads": 4}
    | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}


def swiglu(prefix, width):
    return {
        f"{prefix}.gate_proj.weight": (width, H),
        f"{prefix}.up_proj.weight": (width, H),
        f"{prefix}.down_proj.weight": (H, width),
    }


def deepseek_shapes(index):
    start = f"model.layers.{LAYERS + index}"
    shapes = {
        "enorm.weight": (H,),
        "hnorm.weight": (H,),
        "eh_proj.weight": (H, 2 * H),
        "shared_head.norm.weight": (H,),
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_a_proj.weight": (24, H),
        "self_attn.q_a_layernorm.weight": (24,),
        "self_attn.q_b_proj.weight": (4 * 24, 24),
        "self_attn.kv_a_proj_with_mqa.weight": (16 + 8, H),
        "self_attn.kv_a_layernorm.weight": (16,),
        "self_attn.kv_b_proj.weight": (4 * (16 + 12), 16),
        "self_attn.o_proj.weight": (H, 4 * 12),
        "mlp.gate.weight": (4, H),
        "mlp.gate.e_score_correction_bias": (4,),
        **swiglu("mlp.shared_experts", 32),
    }
    for expert in range(4):
        shapes |= swiglu(f"mlp.experts.{expert}", 32)
    return {f"{start}.{name}": shape for name, shape in shapes.items()}


def mimo_shapes(index):
    size, shapes = H // 4, {}
    for name, rows in (("q", 4 * size), ("k", 2 * size), ("v", 2 * size)):
        shapes |= {f"self_attn.{name}_proj.weight": (rows, H)}
        shapes |= {f"self_attn.{name}_proj.bias": (rows,)}
    shapes |= {"self_attn.o_proj.weight": (H, 4 * size), "input_proj.weight": (H, 2 * H)}
    for norm in ("token", "hidden", "final", "input", "post_attention"):
        shapes[f"{norm}_layernorm.weight"] = (H,)
    shapes |= swiglu("mlp", SIZES["intermediate_size"])
    return {f"model.mtp_layers.{index}.{name}": shape for name, shape in shapes.items()}


def qwen_shapes(_index):
    shapes = {
        "mtp.fc.weight": (H, 2 * H),
        "mtp.norm.weight": (H,),
        "mtp.pre_fc_norm_embedding.weight": (H,),
        "mtp.pre_fc_norm_hidden.weight": (H,),
    }
    layer = {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (2 * 4 * 16, H),  # queries and their gates
        "self_attn.k_proj.weight": (2 * 16, H),
        "self_attn.v_proj.weight": (2 * 16, H),
        "self_attn.o_proj.weight": (H, 4 * 16),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "mlp.gate.weight": (4, H),
        "mlp.shared_expert_gate.weight": (1, H),
        **swiglu("mlp.shared_expert", 32),
    }
    for expert in range(4):
        layer |= swiglu(f"mlp.experts.{expert}", 32)
    return shapes | {f"mtp.layers.0.{name}": shape for name, shape in layer.items()}


SHAPES = {"deepseek_v3": deepseek_shapes, "qwen2": mimo_shapes, "qwen3_next": qwen_shapes}


def save_checkpoint(folder, tokenizer, kind, *, count=2, sharded=False):
    """A tiny bfloat16 model with `count` random MTP layers, in one file or several."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
    tokenizer.save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for index in range(count):
        for name, shape in SHAPES[kind](index).items():
            value = torch.randn(shape, generator=generator) * 0.15
            tensors[name] = (value + 1 if "norm" in name else value).bfloat16()
        if kind == "deepseek_v3":
            start = f"model.layers.{LAYERS + index}"
            tensors[f"{start}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach()
            tensors[f"{start}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    if sharded:
        index = json.loads((folder / INDEX).read_text())
        assert len(set(index["weight_map"].values())) > 2
        names = sorted(tensors)
        for number, part in enumerate((names[::2], names[1::2])):  # over two files
            save_file(
                {name: tensors[name].clone() for name in part}, folder / f"m{number}.safetensors"
            )
            index["weight_map"] |= dict.fromkeys(part, f"m{number}.safetensors")
        (folder / INDEX).write_text(json.dumps(index))
    else:
        own = load_file(folder / SINGLE)
        save_file(own | {name: value.clone() for name, value in tensors.items()}, folder / SINGLE)
    return tensors


def load_all(folder):
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        result |= load_file(path)
    return result


def native_head(target, **options):
    return create(target, "mtp-sequential", random=False, native=True, **options)


def qwen3_next_head(folder, tokenizer):
    """Its linear-attention layers keep it from being a target; the MTP layer is an ordinary one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, readout = model.config, Readout.of(model, model.config, tokenizer)
    kind = LayerKind.of(config)
    assert config.layer_types[kind.source] == "full_attention"
    facts = TargetFacts(
        name="qwen", fingerprint="none", hidden_size=H, num_layers=LAYERS, vocab_size=V
    )
    head = MtpSequentialHead(
        MtpSequentialConfig(
            **{"steps": 1, "shared": False, "native": "qwen3-next", "pass_on": "after_norm"},
            **{"loss": "ce", "lambda_first": 0.3, "lambda_then": 0.1, "lambda_switch": 0.67},
            **{"vocab_size": V, "draft_vocab_size": V, "layer": kind, "target": facts},
        )
    )
    Native(folder, LAYERS).load(head.chain, readout)
    return head.bind(readout), model

"""A target's fingerprint tells apart whatever computes something else, and nothing besides."""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
import torch
from tiny_models import SIZES, save_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core import fingerprint
from spectrain.core.fingerprint import fingerprint_of, tensor_digest
from spectrain.core.target import Target

SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}


def named(kind, tokenizer, **changes) -> str:
    """The fingerprint of a model whose weights depend on their shapes alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes))
    return fingerprint_of(model, tokenizer)


@pytest.mark.parametrize(
    ("kind", "common", "changes"),
    [
        ("llama", {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1.2e4}}),
        ("llama", {"rope_parameters": YARN}, {"rope_parameters": YARN | {"factor": 8.0}}),
        ("llama", {"rope_parameters": YARN}, {"rope_parameters": YARN | {"attention_factor": 1.3}}),
        ("llama", {}, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}),
        ("llama", {}, {"rms_norm_eps": 1e-5}),
        ("llama", {}, {"hidden_act": "gelu"}),
        ("mistral", {"sliding_window": 6}, {"sliding_window": 7}),
        ("mistral", {"sliding_window": 6}, {"sliding_window": None}),
        ("gemma", {}, {"hidden_act": "relu"}),
        ("gemma2", {}, {"hidden_activation": "relu"}),
        ("gemma2", {}, {"final_logit_softcapping": 31.0}),
        ("gemma2", {}, {"attn_logit_softcapping": 51.0}),
        ("gemma2", {}, {"query_pre_attn_scalar": 257}),
        ("gemma2", SLIDING, {"layer_types": SLIDING["layer_types"][::-1]}),
        (
            "gemma3_text",
            {**SLIDING, "rope_parameters": GEMMA3_ROPE},
            {
                "rope_parameters": dict(
                    zip(GEMMA3_ROPE, reversed(GEMMA3_ROPE.values()), strict=True)
                )
            },
        ),
        ("granite", {}, {"embedding_multiplier": 2.0}),
        ("granite", {}, {"attention_multiplier": 2.0}),
        ("granite", {}, {"residual_multiplier": 2.0}),
        ("granite", {}, {"logits_scaling": 2.0}),
        ("cohere", {}, {"logit_scale": 0.5}),
        ("olmo", {}, {"clip_qkv": 3.0}),
        ("mixtral", EXPERTS, {"num_experts_per_tok": 1}),
        ("phi3", {}, {"partial_rotary_factor": 0.5}),
        ("smollm3", {}, {"no_rope_layers": [1, 0, 1, 1]}),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 48}, {"activation_function": "gelu"}),
    ],
    ids=lambda value: str(value)[:40] or "plain",
)
def test_the_same_weights_computed_with_in_another_way(kind, common, changes, tokenizer):
    """CASE 14: each of these changes what the target says and not one of its stored numbers."""
    first = named(kind, tokenizer, **common)
    assert named(kind, tokenizer, **common) == first
    assert named(kind, tokenizer, **common | changes) != first


@pytest.mark.parametrize(
    ("kind", "common", "changes"),
    [
        ("llama", {}, {"use_cache": False, "initializer_range": 0.1, "attention_dropout": 0.1}),
        ("llama", {}, {"a_key_of_a_later_version": 3, "rms_norm_eps": 1e-06}),
        ("llama", {"head_dim": 12}, {"head_dim": None}),
        ("llama", {"num_key_value_heads": 4}, {"num_key_value_heads": None}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {}),
        ("granite", {"logits_scaling": 2}, {"logits_scaling": 2.0}),
        ("mistral", {"sliding_window": 6}, {"layer_types": ["sliding_attention"] * 4}),
        ("llama", {}, {"sliding_window": 6, "layer_types": ["full_attention"] * 4}),
    ],
)
def test_what_computes_nothing_changes_nothing(kind, common, changes, tokenizer):
    """Another spelling, or a key that a version of the library adds."""
    assert named(kind, tokenizer, **common | changes) == named(kind, tokenizer, **common)


def test_a_rotary_base_in_the_old_place_is_the_same_target(tiny_path, tmp_path):
    def load(folder, **changes):
        copy = shutil.copytree(tiny_path, tmp_path / folder)
        config = json.loads((copy / "config.json").read_text())
        del config["rope_parameters"]
        (copy / "config.json").write_text(json.dumps(config | changes))
        return Target.load(str(copy)).fingerprint

    old = load("old", rope_theta=700.0)
    assert old == load("new", rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    assert old != load("other")


def test_every_weight_counts(tiny_path, tokenizer):
    """One number in one row of any tensor, or two rows in each other's place."""
    model = AutoModelForCausalLM.from_pretrained(tiny_path)
    first, found = fingerprint_of(model, tokenizer), set()
    changes = 0
    for tensor in model.parameters():
        flat = tensor.data.view(-1)
        for place in {1, len(flat) // 2, len(flat) - 1}:
            before = flat[place].clone()
            flat[place] *= 1.01  # more than a step of bfloat16
            found.add(fingerprint_of(model, tokenizer))
            flat[place] = before
            changes += 1
    table = model.get_input_embeddings().weight.data
    table[[70, 71]] = table[[71, 70]]
    found.add(fingerprint_of(model, tokenizer))
    table[[70, 71]] = table[[71, 70]]
    assert fingerprint_of(model, tokenizer) == first
    assert len(found | {first}) == changes + 2


@pytest.mark.parametrize("count", [0, 1, 5, 8, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_the_digest_is_that_of_a_slow_loop(count, dtype, monkeypatch):
    monkeypatch.setattr(fingerprint, "_BLOCK", 8)
    monkeypatch.setattr(fingerprint, "_BLOCKS_AT_A_TIME", 4)
    weights = [int(one) for one in np.random.RandomState(0).randint(1, 1 << 15, 8)]
    values = (50 * torch.randn(count, generator=torch.Generator().manual_seed(1))).to(dtype)
    expected = b""
    for start in range(0, count, 8):
        total = 0
        for place, value in enumerate(values[start : start + 8].tolist()):
            if dtype.is_floating_point:
                raw = struct.pack("<f", torch.tensor(value).bfloat16().float())
                (value,) = struct.unpack("<h", raw[2:])
            total += int(value) * weights[place]
        expected += struct.pack("<d", total)
    assert tensor_digest(values) == expected


def test_the_digest_of_a_large_tensor_is_exact():
    """The largest sums there are: every bit pattern at its most, all of one sign."""
    values = torch.full((2 * fingerprint._BLOCK,), -1, dtype=torch.int16).view(torch.bfloat16)
    lowest = torch.full_like(values.view(torch.int16), -(2**15) + 1).view(torch.bfloat16)
    total = sum(np.random.RandomState(0).randint(1, 1 << 15, fingerprint._BLOCK).tolist())
    assert tensor_digest(values) == 2 * struct.pack("<d", -total)
    assert tensor_digest(lowest) == 2 * struct.pack("<d", -(2**15 - 1) * total)


def test_number_types(tmp_path, tokenizer, tiny):
    """A checkpoint of float16 is the same target in every type. One of float32 is not, loaded as
    float16: small weights lose bits that bfloat16 keeps."""
    model = AutoModelForCausalLM.from_pretrained(tiny.name)
    tokenizer.save_pretrained(tmp_path / "half")
    model.half().save_pretrained(tmp_path / "half")
    prints = {
        Target.load(str(tmp_path / "half"), dtype=dtype).fingerprint
        for dtype in ("float32", "bfloat16", "float16")
    }
    assert len(prints) == 1
    small = save_tiny(tmp_path / "small", tokenizer, initializer_range=1e-4)
    as_float, as_bfloat, as_half = (
        fingerprint_of(AutoModelForCausalLM.from_pretrained(small, dtype=dtype), tokenizer)
        for dtype in ("float32", "bfloat16", "float16")
    )
    assert as_float == as_bfloat != as_half

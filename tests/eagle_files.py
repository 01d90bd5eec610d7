"""EAGLE heads, targets and files for the tests of the engines' layouts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from head_kinds import create, wild
from safetensors.torch import load_file, save_file
from tiny_models import make_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from spectrain.core import attention
from spectrain.core.target import Target
from spectrain.export.formats import reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import Finding, Reader, Reference, load
from spectrain.export.parity import differences
from spectrain.export.write import write

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "base": {"rope_type": "default", "rope_theta": 700.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
# Keys of a config that make a head another one than ours are.
OTHERWISE = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "qkv_bias": True,
    "is_causal": False,
    "norm_before_residual": True,
    "norm_before_fc": True,
    "norm_output": True,
    "fc_norm": True,
    "use_aux_norm": True,
    "logit_scale": 0.5,
    "partial_rotary_factor": 0.5,
    "rope_is_neox_style": False,
    "quantization_config": {"quant_method": "fp8"},
    "compression_config": {"format": "pack-quantized"},
}
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 8,  # deep enough for the layers that engines read by default: 1, 3, 4
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # H / heads, as SafeAILab's layer needs
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


@cache
def target_of(rope: str = "default", padded: int = 8, **changes: int) -> Target:
    """A tiny target; padded: rows of its lm_head beyond the tokenizer."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + padded,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters=dict(ROPES[rope]),
        **(SIZES | changes),
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    return Target(model, tokenizer, "tiny")


def head_of(target: Target, family: str = "eagle3", **options):
    """A wild head of this family."""
    options = {"steps": 3} | options
    return wild(create(target, family, random=False, **options))


def export(head, target: Target, format: str, folder: Path) -> Path:
    """Write the head; nothing of it may be refused."""
    made, reference = writer(format, head.family), Reference(target, target.name)
    assert made.refusals(head, reference) == []
    folder.mkdir(parents=True)
    write(made.encode(head, reference), folder)
    return folder


def refusals(head, target: Target, format: str) -> str:
    """All reasons in one text."""
    return " | ".join(writer(format, head.family).refusals(head, Reference(target, target.name)))


def read(folder: Path, target: Target):
    """The head in a folder, by the reader that claims it."""
    found = Found.open(folder)
    return load(reader_of(found), found, target)


def findings(folder: Path, target: Target) -> list[Finding]:
    """Each that finds fault says what mends it."""
    found = Found.open(folder)
    every = list(reader_of(found).findings(found, target))
    assert [one for one in every if one.verdict in ("warn", "fail") and not one.fix] == []
    return every


def failures(folder: Path, target: Target) -> str:
    """What fails, in one text."""
    return " | ".join(one.text for one in findings(folder, target) if one.verdict == "fail")


def edit(folder: Path, change=None, config=None, drop=()) -> Path:
    """Rewrite the files: `change` alters the tensors in place, keys of `config` are replaced."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if change:
        change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)
    content = json.loads((folder / "config.json").read_text()) | (config or {})
    content = {key: value for key, value in content.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def mended(reader: Reader, folder: Path, target: Target, name: str):
    """The head that the suspect whose name holds `name` makes of the folder."""
    found = Found.open(folder)
    (one,) = (s for s in reader.suspects(found, target) if name in s.name)
    return load(reader, one.found, target)


@torch.no_grad()
def own_logits(head, target: Target, tokens, steps: int):
    """Logits [D] of each of `steps` greedy guesses behind x[0 … n], tokens [n+1], by our engine."""
    features = target.forward(tokens[None, :-1], aux_layers=head.needs.aux_layers)
    state = head.start(1, len(tokens) + steps)
    count = torch.tensor([len(tokens) - 1])
    logits = [head.begin(state, tokens[None], features, count)]
    for _ in range(steps - 1):
        guess = head.to_target(logits[-1].argmax(-1, keepdim=True))
        logits.append(head.expand(state, guess, torch.zeros(1, 1, dtype=torch.int64))[:, 0])
    return [one[0] for one in logits]


def same(head, folder, target):
    """Tensors, needs and drafts of what comes back."""
    assert differences(head, read(folder, target), target) == []

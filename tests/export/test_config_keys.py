"""Keys of a config that engines read, as their sources tell (export/facts), against our writers and
readers. So a mistake that writer and reader share in a key that neither knows is seen.
"""

from __future__ import annotations

import json

import pytest
from eagle_files import export, findings, head_of, read, target_of

from spectrain.core.errors import SpectrainError
from spectrain.export.conformance import PLAIN, table

EAGLE = [
    (engine, name)
    for engine in ("vllm", "sglang")
    for name in table(engine)["derived"]
    if "Eagle" in name
]
FORMATS = {
    "EagleLlamaForCausalLM": ("vllm", "eagle1"),
    "LlamaForCausalLMEagle": ("sglang", "eagle1"),
    "Eagle3Speculator": ("speculators", "eagle3"),
}
# Another value than what our files say or leave out.
OTHER = {
    "eagle_config": {"use_aux_hidden_state": False},
    "eagle_aux_hidden_state_layer_ids": [3, 5, 6],
    "fc_norm": True,
    "head_dim": 16,
    "hidden_act": "gelu",
    "hidden_size": 64,
    "hot_vocab_size": 90,
    "is_causal": False,
    "layer_types": ["sliding_attention"],
    "logit_scale": 0.5,
    "max_position_embeddings": 256,
    "num_attention_heads": 8,
    "num_aux_hidden_states": 4,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-4,
    "rope_is_neox_style": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
}
OTHER |= dict.fromkeys(("intermediate_size", "num_hidden_layers", "target_hidden_size"), 2)
OTHER |= dict.fromkeys(("draft_vocab_size", "vocab_size"), 91)
OTHER |= dict.fromkeys(("attention_bias", "bias", "mlp_bias", "qkv_bias", "use_aux_norm"), True)
OTHER |= dict.fromkeys(("norm_before_fc", "norm_before_residual", "norm_output"), True)
# Read and of no effect on a head like ours.
IDLE = {
    "target_layer_count": "set by the engine",
    "original_max_position_embeddings": "of scaled positions alone, where the scaling says it, too",
}
IDLE_FOR_ONE = {
    ("EagleLlamaForCausalLM", "draft_vocab_size"): "the target's own lm_head guesses",
    ("Eagle3Speculator", "draft_vocab_size"): "that beside the layer takes its place",
    ("Eagle3Speculator", "target_hidden_size"): "that beside the layer takes its place",
    ("Eagle3Speculator", "norm_before_residual"): "that beside the layer takes its place",
    ("Eagle3Speculator", "norm_before_fc"): "that beside the layer takes its place",
    ("Eagle3Speculator", "norm_output"): "that beside the layer takes its place",
    ("Eagle3Speculator", "fc_norm"): "that beside the layer takes its place",
}
# Written besides: what the library that loads configs reads, and the older spelling of a key.
STANDARD = {"architectures", "model_type", "torch_dtype", "tie_word_embeddings"}
STANDARD |= {"rope_theta", "rope_scaling", "rope_parameters", "mlp_bias"}
# Not written, since what an engine takes it for then is right.
LEFT_OUT = {
    "bias": "SGLang takes it for that of the attention, none is both engines' default",
    "draft_vocab_size": "EAGLE-1: the whole vocabulary",
    "eagle_config": "SGLang's default layers, and nothing else in it is needed",
    "eagle_aux_hidden_state_layer_ids": "the default layers",
    "hot_vocab_size": "EAGLE-1: the whole vocabulary",
    "num_aux_hidden_states": "three",
    "target_hidden_size": "the head's own",
}


def exported(engine, name, folder, **options):
    """A head and its files for this engine and architecture."""
    format, family = FORMATS.get(name, (engine, "eagle3"))
    target = target_of()
    vocabulary = {} if family == "eagle1" else {"draft_vocab_size": 90}
    head = head_of(target, family, **vocabulary, **options)
    return export(head, target, format, folder), target


def keys_of(engine, name):
    facts = table(engine)
    derived = facts["derived"][name]
    elsewhere = facts["by_hand"][name].get("elsewhere", [])
    return {*derived["required"], *derived["defaults"], *elsewhere}


def change(folder, key, value):
    """In the layer's own config where there is one, else at the top."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    inner = config.get("transformer_layer_config", config)
    (config if key == "eagle_aux_hidden_state_layer_ids" else inner)[key] = value
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(("engine", "name"), EAGLE)
def test_no_key_that_an_engine_reads_is_passed_over(tmp_path, engine, name):
    """With another value of any of them the head is another one, or is found fault with."""
    folder, target = exported(engine, name, tmp_path / "out")
    plain, written = read(folder, target).config, (folder / "config.json").read_text()
    silent = []
    for key in sorted(keys_of(engine, name) - IDLE.keys()):
        if (name, key) in IDLE_FOR_ONE:
            continue
        (folder / "config.json").write_text(written)
        change(folder, key, OTHER[key])
        if all(one.verdict in ("ok", "note") for one in findings(folder, target)):
            try:
                said = read(folder, target).config != plain
            except SpectrainError:
                said = True
            silent += [] if said else [key]
    assert silent == []


@pytest.mark.parametrize("options", [{}, {"aux_layers": (0, 2, 5)}, {"aux_layers": (1, 4)}])
@pytest.mark.parametrize(("engine", "name"), EAGLE)
def test_what_is_written_is_read_and_what_is_not_is_not_missed(tmp_path, engine, name, options):
    if options and "Eagle3" not in name:
        options = {}
    folder, _ = exported(engine, name, tmp_path / "out", **options)
    config = json.loads((folder / "config.json").read_text())
    inner = config.get("transformer_layer_config", config)
    read_there = keys_of(engine, name)
    assert inner.keys() - read_there - STANDARD == set()
    left_out = read_there - inner.keys() - config.keys()
    assert left_out - PLAIN.keys() - IDLE.keys() - LEFT_OUT.keys() == set()

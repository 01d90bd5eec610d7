"""Keys of a config that make another layer of the same tensors, and what heads here compute.

An engine that reads such a key computes something else than a reader that does not know it, and
raises nothing. Which keys the engines read is in export/facts; tests/export/test_config_keys.py
holds the readers against them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from spectrain.core.target import Target
from spectrain.export.layout import Finding

# The only value of each that our EAGLE heads compute; a key that is not there has it in every
# engine.
FLAGS: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "qkv_bias": False,
    "is_causal": True,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "norm_output": False,
    "fc_norm": False,
    "use_aux_norm": False,
    "logit_scale": 1.0,
    "partial_rotary_factor": 1.0,
    "rope_is_neox_style": True,
    "quantization_config": None,
    "compression_config": None,
}
# Architectures that vLLM 0.33.0 and SGLang 0.5.23 run with the layer of a Llama.
_OF_LLAMA = {
    "EagleLlamaForCausalLM",
    "LlamaForCausalLMEagle",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "Eagle3Speculator",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_FAR = 20.0  # times the target's rms_norm_eps; 1e-5 beside 1e-6 is met in good heads


def flag_findings(config: Mapping[str, Any], flags: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether the head is of the kind that our heads are: one finding for each key that is not."""
    wrong = False
    for name, ours in flags.items():
        value = config.get(name)
        if value is not None and value != ours:
            wrong = True
            text = f"{name} is {reprlib.repr(value)}: no head here computes that"
            yield Finding("config", "fail", text, f"only {name}={ours!r} can be read")
    if not wrong:
        yield Finding("config", "ok", "norms, biases and activation as our heads have them")


def differences(
    config: Mapping[str, Any], sizes: Mapping[str, Any], target: Target
) -> Iterator[Finding]:
    """Where the layer is another one than Llama's, sees less of a text than our heads do, or has
    another target's numbers.

    sizes: num_hidden_layers, max_position_embeddings and rms_norm_eps, as they were read
    """
    named = config.get("architectures")
    others = [one for one in named if "Eagle" in str(one)] if isinstance(named, list) else []
    if others and not _OF_LLAMA & set(map(str, others)):
        text = f"architectures names {reprlib.repr(others[0])}, which is not known to be a Llama's"
        yield Finding("config", "warn", text, "see that its layer is computed as Llama's is")
    yield from _windows(config, sizes["num_hidden_layers"], target)
    longest = sizes["max_position_embeddings"]
    if longest < target.max_length:
        text = f"positions end at {longest}, those of the target at {target.max_length}"
        fix = f"set max_position_embeddings to {target.max_length}"
        yield Finding("config", "warn", text, fix)
    eps, theirs = sizes["rms_norm_eps"], getattr(target.config, "rms_norm_eps", None)
    if theirs and not theirs / _FAR < eps < theirs * _FAR:
        text = f"rms_norm_eps is {eps:g}, that of the target {theirs:g}"
        fix = f"set rms_norm_eps to {theirs:g} unless the head was trained with {eps:g}"
        yield Finding("config", "warn", text, fix)


def _windows(config: Mapping[str, Any], layers: int, target: Target) -> Iterator[Finding]:
    """A window is looked at by engines for layers that layer_types says have one; one that no text
    of the target fills changes nothing."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    wide = type(window) is int and window >= target.max_length
    if kinds:
        allowed = {_FULL, _SLIDING} if wide else {_FULL}
        own = kinds[:layers] if isinstance(kinds, list) else []
        if len(own) != layers or not set(map(str, own)) <= allowed:
            text = f"layer_types is {reprlib.repr(kinds)}: heads here attend to the whole text"
            fix = f"only {_FULL} for each layer can be read"
            yield Finding("config", "fail", text, fix)
    elif window is not None and not wide and config.get("use_sliding_window") is not False:
        text = f"sliding_window is {reprlib.repr(window)}: heads here attend to the whole text"
        yield Finding("config", "warn", text, "set use_sliding_window to false if it has none")

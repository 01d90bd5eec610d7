"""Which layers of its target an EAGLE-3 head reads, in the numbers of each engine.

In this project a layer is named by its output, from 0. vLLM names the input of a layer: its id i is
our i - 1, under `eagle_aux_hidden_state_layer_ids`. SGLang names outputs, under the same name
within `eagle_config`. TensorRT-LLM names outputs, in its own settings and not in the checkpoint.
All take them in ascending order, and the same three where nothing is said.

In SGLang the class of the target turns ids into layers, and of those in 0.5.23 three do it in their
own way: DeepSeek-V2's (also that of DeepSeek-V3, Kimi-K2 and GLM-5) and GLM-4 MoE Lite's take ids
for inputs unless the first one is 1, MiniMax-M3's reads one layer later where none is named.

N layers of the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spectrain.export.layout import Finding

KEY, NESTED, COUNT = "eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states"
_CHECK = "auxiliary layers"
_FIX = f"name the inputs of layers in {KEY}, from 1, as the head was trained"
# model_type of targets, as in the text above.
_INPUTS_TO_SGLANG = {
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite",
}  # fmt: skip
_LATER_IN_SGLANG = {"minimax_m3_vl", "minimax_m3_vl_text"}


def engines_take(layers: int) -> tuple[int, ...]:
    """Outputs that every engine reads of a target of N layers when the config is silent: inputs of
    2, N/2 and N-3. Of a shallow target they are not three, or not after a layer."""
    return tuple(sorted({1, layers // 2 - 1, layers - 4}))


def is_default(chosen: tuple[int, ...], layers: int) -> bool:
    return len(chosen) == 3 and chosen == engines_take(layers)


def as_inputs(chosen: tuple[int, ...], layers: int) -> dict[str, Any]:
    """The keys that vLLM reads; none for its default."""
    if is_default(chosen, layers):
        return {}
    return {KEY: [i + 1 for i in chosen], COUNT: len(chosen)}


def as_outputs(chosen: tuple[int, ...], layers: int) -> dict[str, Any]:
    """The keys that SGLang reads; none for its default."""
    if is_default(chosen, layers):
        return {}
    return {NESTED: {"use_aux_hidden_state": True, KEY: list(chosen)}, COUNT: len(chosen)}


def sglang_refusals(chosen: tuple[int, ...], layers: int, kind: str) -> list[str]:
    """Why SGLang would read other layers of a target of this model_type than the chosen ones."""
    default = is_default(chosen, layers)
    if kind in _INPUTS_TO_SGLANG and not default and chosen[0] != 1:
        return [
            f"SGLang takes layer ids for inputs where the target is a {kind} and the first id is "
            f"not 1: it would read the layers before {list(chosen)}; train it with head.aux_layers "
            "that begin with 1"
        ]
    if kind in _LATER_IN_SGLANG and default:
        return [
            f"SGLang's own choice of layers is one too late where the target is a {kind}: train it "
            f"with other head.aux_layers than {list(chosen)}"
        ]
    return []


def shifted(config: Mapping[str, Any], outputs: tuple[int, ...], by: int) -> dict[str, Any]:
    """Keys to replace in the config so that it means other layers."""
    nested = config.get(NESTED)
    nested = dict(nested) if isinstance(nested, Mapping) else {}
    nested.pop(KEY, None)
    return {KEY: [i + 1 + by for i in outputs], NESTED: nested}


def read(
    config: Mapping[str, Any], layers: int, kind: str
) -> tuple[tuple[int, ...] | None, list[Finding]]:
    """The outputs that a config means, None when it means none that can be read; and what was
    seen. layers, kind: number of the target's, and its model_type."""
    nested = config.get(NESTED)
    top, within = config.get(KEY), nested.get(KEY) if isinstance(nested, Mapping) else None
    named = top or within
    if not named:
        outputs, seen = _default(layers, kind)
        return outputs, [*seen, *_count(config, outputs)]
    if not isinstance(named, list) or not all(type(i) is int for i in named):
        return None, [Finding(_CHECK, "fail", f"{KEY} is not a list of whole numbers", _FIX)]
    if named != sorted(set(named)):
        text = f"{KEY} is not ascending: every engine reads them in that order"
        return None, [Finding(_CHECK, "fail", text, "sort them, and fc's columns with them")]
    inputs = bool(top) or _are_inputs(named, layers, kind)
    outputs = tuple(i - 1 if inputs else i for i in named)
    if outputs[0] < 0 or outputs[-1] >= layers:
        what = "the embedding" if outputs[0] == -1 else f"layers that a target of {layers} lacks"
        return None, [Finding(_CHECK, "fail", f"{KEY} {_list(named)} names {what}", _FIX)]
    seen = [Finding(_CHECK, "ok", f"outputs of {_list(outputs)} of {layers}, from 0")]
    if top and within and list(outputs) != within:
        text = f"{KEY} and {NESTED} disagree; the first was taken, as vLLM takes it"
        seen.append(Finding(_CHECK, "warn", text, "keep one of them"))
    elif not top:
        seen.append(_within(named, inputs, kind))
    return outputs, [*seen, *_count(config, outputs)]


def _default(layers: int, kind: str) -> tuple[tuple[int, ...] | None, list[Finding]]:
    outputs = engines_take(layers)
    if len(outputs) != 3 or outputs[0] < 0:
        text = f"none named, and the engines' default does not fit a target of {layers} layers"
        return None, [Finding(_CHECK, "fail", text, _FIX)]
    text = f"none named: outputs {_list(outputs)} of {layers}, the engines' default"
    seen = [Finding(_CHECK, "ok", text)]
    if kind in _LATER_IN_SGLANG:
        text = f"of a {kind} SGLang reads one layer later where none is named; vLLM's were taken"
        seen.append(Finding(_CHECK, "warn", text, _either([i + 1 for i in outputs], 1)))
    return outputs, seen


def _count(config: Mapping[str, Any], outputs: tuple[int, ...] | None) -> Iterator[Finding]:
    if outputs and config.get(COUNT) not in (None, len(outputs)):
        text = f"{COUNT} is not the number of layers that are read, {len(outputs)}"
        yield Finding(_CHECK, "fail", text, f"set {COUNT} to {len(outputs)}")


def _are_inputs(named: list[int], layers: int, kind: str) -> bool:
    """Whether ids within NESTED are. An id of N can be nothing else, and one of 0 would be the
    embedding."""
    if 0 in named:
        return False
    return named[-1] == layers or (kind in _INPUTS_TO_SGLANG and named[0] != 1)


def _within(named: list[int], inputs: bool, kind: str) -> Finding:
    """What there is to say of ids that only NESTED has."""
    taken = "inputs" if inputs else "outputs"
    if kind in _INPUTS_TO_SGLANG:
        text = (
            f"ids within {NESTED} are ambiguous for a {kind}: SGLang reads outputs where the first "
            f"is 1, inputs otherwise; they were taken for {taken}"
        )
        ids = [i if inputs else i + 1 for i in named]
        return Finding(_CHECK, "warn", text, _either(ids, 1 if inputs else -1))
    if inputs:
        text = f"ids within {NESTED} reach the number of layers and were taken for inputs"
    else:
        text = f"ids within {NESTED} are outputs to SGLang and were taken so; vLLM reads inputs"
    return Finding(_CHECK, "note", text)


def _either(inputs: list[int], by: int) -> str:
    """How a config is made to mean these layers, or their neighbours."""
    text = f"write {KEY} at the top of config.json: {inputs}"
    if inputs[0] + by < 1:  # the embedding
        return text
    return f"{text}, or {[i + by for i in inputs]} if doctor finds that more is accepted then"


def _list(ids: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (" …" if len(ids) > 8 else "")

"""Numbers of a config that no head can be made of: found before anything is made of them.

The library and torch take many a number that is none and fail later, each in its own way, or
compute NaN and say nothing. So every reader asks here, whatever its layout.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from spectrain.export.layout import Finding

_LARGEST = 2**31 - 1  # of any size: their products still fit into 64 bits
# Angles are worked out of a head's size before any shape is compared: 2³¹ would take 20 GB.
_LARGEST_HEAD = 2**16
_SIZES = {
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "vocab_size",
}  # fmt: skip
_EPSILONS = {"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"}
_BASES = {"rope_theta", "rope_local_base_freq"}


def is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST


def is_epsilon(value: Any) -> bool:
    """What is added to a mean square: more than nothing, less than what it is added to."""
    return type(value) in (int, float) and 0 < value < 1


def findings(config: Any, key: str = "") -> Iterator[Finding]:
    """A finding that fails for each number, anywhere in a config [key: where it was found], that is
    not finite, or not the size, the epsilon or the base that its key promises.

    A key that is null says nothing; of lists, as some models have for their layers, only what is
    not finite is found.
    """
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from findings(value, str(name))
    elif isinstance(config, list):
        for value in config:
            yield from findings(value)
    elif config is not None:
        yield from _checked(key, config)


def layer_findings(sizes: Mapping[str, Any]) -> list[Finding]:
    """The same of a Llama layer's numbers, each of which has to be there, and whether its heads go
    together."""
    wrong = [problem for key, value in sizes.items() for problem in _checked(key, value)]
    if not wrong and (
        sizes["num_attention_heads"] % sizes["num_key_value_heads"] or sizes["head_dim"] % 2
    ):
        text = "query heads are no multiple of kv heads, or the head size is odd"
        wrong.append(Finding("config", "fail", text, "correct the sizes in config.json"))
    return wrong


def _checked(key: str, value: Any) -> Iterator[Finding]:
    if wanted := _wanted(key, value):
        text = f"is {reprlib.repr(value)}, not {wanted}" if value is not None else "is missing"
        fix = "complete or correct config.json"
        yield Finding("config", "fail", f"{key or 'a number in a list'} {text}", fix)


def _wanted(key: str, value: Any) -> str:
    """What the value should be and is not; "" where it is right."""
    if key in _SIZES:
        largest = _LARGEST_HEAD if key == "head_dim" else _LARGEST
        return "" if is_size(value) and value <= largest else "a size"
    if key in _EPSILONS:
        return "" if is_epsilon(value) else "a number like 1e-6"
    if type(value) is float and not math.isfinite(value):
        return "a finite number"
    if key in _BASES and not (type(value) in (int, float) and value > 0):
        return "a base of rotary positions"
    return ""

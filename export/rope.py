"""Rotary positions as configs say them: in old keys, in new ones, or in both.

Old: `rope_theta` beside `rope_scaling` (None, or a kind with its numbers). New: `rope_parameters`,
which holds all. Two spellings are compared by what they do: their inverse frequencies.

d head size.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from spectrain.core.target import Target
from spectrain.export.found import Found
from spectrain.export.layout import Finding
from spectrain.heads.eagle3_init import rope_parameters
from spectrain.heads.layers import Rotary

INV_FREQ = "rotary_emb.inv_freq"  # a buffer that old files hold
_YARN_FACTORS = ("attention_factor", "attn_factor", "extrapolation_factor")


def keys(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters in both spellings."""
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if parameters["rope_type"] == "default" else scaling,
        "rope_parameters": dict(parameters),
    }


def told(parameters: Mapping[str, Any]) -> str:
    """How to write them, in both spellings."""
    names = {key: json.dumps(value) for key, value in keys(parameters).items()}
    return (
        f"set rope_parameters to {names['rope_parameters']} (in old keys: rope_theta to "
        f"{names['rope_theta']}, rope_scaling to {names['rope_scaling']})"
    )


def engine_refusals(engine: str, rotary: Mapping[str, Any]) -> list[str]:
    """Why vLLM 0.33.0, SGLang 0.5.23 or TensorRT-LLM's main branch ("vllm", "sglang", "trtllm")
    would turn by other angles than the library's, which heads are trained with (in the first two,
    `layers/rotary_embedding`)."""
    kind = rotary["rope_type"]
    if engine == "vllm" and kind == "longrope":
        return [
            "vLLM takes longrope's long factors at every position once it may serve longer texts "
            "than the original ones, and no attention_factor"
        ]
    if engine == "sglang" and kind == "longrope":
        return [
            "SGLang takes longrope's long factors for a whole batch once one text in it is longer "
            "than the original ones, and no attention_factor"
        ]
    if engine == "sglang" and kind == "dynamic":
        return ["SGLang scales dynamic positions at every length, not only beyond the trained one"]
    if engine == "trtllm" and kind == "dynamic":
        return ["TensorRT-LLM asks for an alpha with dynamic positions, and these have a factor"]
    named = [key for key in _YARN_FACTORS if rotary.get(key) is not None]
    if engine == "sglang" and kind == "yarn" and named:
        return [
            "of yarn's factors SGLang reads attn_factor and extrapolation_factor, the library "
            f"attention_factor alone; the head has {', '.join(named)}"
        ]
    return []


def spellings(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rotary parameters that a config names, new keys before old ones; one of plain defaults
    where it names none."""
    new, theta, scaling = (
        config.get(key) for key in ("rope_parameters", "rope_theta", "rope_scaling")
    )
    found = []
    if isinstance(new, Mapping) and new:
        found.append({"rope_theta": 10000.0 if theta is None else theta} | dict(new))
    if scaling or not found:
        old = scaling if scaling else {}
        old = dict(old) if isinstance(old, Mapping) else {"rope_type": reprlib.repr(old)}
        found.append({"rope_theta": 10000.0 if theta is None else theta} | old)
    elif theta is not None:  # of the old keys only the base is said again
        found.append(found[0] | {"rope_theta": theta})
    # Some configs keep the length that scaling starts from beside the scaling.
    original = config.get("original_max_position_embeddings")
    for one in found:
        kind = one.pop("type", None)
        one.setdefault("rope_type", kind or "default")
        if original and one["rope_type"] != "default":
            one.setdefault("original_max_position_embeddings", original)
    return found


def effective(parameters: Mapping[str, Any], head_dim: int, max_positions: int) -> Tensor:
    """Inverse frequencies and the factor of the attention, at a short length and at one beyond
    `max_positions`, where some kinds change: [2, d/2 + 1]. Raises whatever a wrong set raises."""
    rotary = Rotary(head_dim, max_positions, dict(parameters))
    rows = []
    for last in (0, 2 * max_positions):
        rotary(torch.tensor([last]), torch.float32)
        table = rotary._table
        rows.append(torch.cat([table.inv_freq, torch.tensor([float(table.attention_scaling)])]))
    return torch.stack(rows)


def same(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-5, atol=0)


def findings(found: Found, head_dim: int, max_positions: int, target: Target) -> Iterator[Finding]:
    """Whether the spellings agree with each other, with the file's buffers and with the target."""
    named = spellings(found.config)
    try:
        tables = [effective(one, head_dim, max_positions) for one in named]
    except Exception as error:  # of the library, of every kind, for values nobody foresaw
        text = f"rotary positions that cannot be made ({reprlib.repr(str(error))})"
        yield Finding("rope", "fail", text, "mend rope_parameters in config.json")
        return
    if not all(torch.isfinite(one).all() and (one > 0).all() for one in tables):
        text = f"no positions turn with a base of {named[0]['rope_theta']!r} and these factors"
        yield Finding("rope", "fail", text, "mend rope_theta in config.json")
        return
    if any(one.get("partial_rotary_factor", 1.0) != 1.0 for one in named):
        text = "only a part of each head is rotated: no head here computes that"
        yield Finding("rope", "fail", text, "only partial_rotary_factor=1.0 can be read")
        return
    if not all(same(tables[0], other) for other in tables):
        yield Finding(
            "rope",
            "fail",
            "rope_parameters and rope_theta with rope_scaling say different things",
            "keep those that the head was trained with",
        )
        return
    for name in found.shapes:
        if name.endswith(INV_FREQ):
            stored = found.read(name).flatten().float()
            known = tables[0][0, :-1]
            if stored.shape != known.shape or not torch.allclose(stored, known, rtol=1e-2):
                text = f"{found.called(name)} is not what the config's rotary keys make"
                yield Finding("rope", "fail", text, "mend rope_theta in config.json")
                return
    theirs, fix = "", ""
    try:
        own = rope_parameters(target.config)
        fix = told(own)
        theirs = f" ({own['rope_type']}, base {own['rope_theta']:g})"
        equal = same(tables[0], effective(own, head_dim, target.max_length))
    except Exception:  # a target whose positions no EAGLE head can have; the file may be right
        equal = False
    kind = f"{named[0]['rope_type']}, base {named[0]['rope_theta']:g}"
    if equal:
        yield Finding("rope", "ok", f"{kind}, as the target has it")
    else:
        yield Finding(
            "rope",
            "warn",
            f"{kind}: not the rotary positions of the target{theirs}",
            fix,
        )

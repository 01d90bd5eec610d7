"""What the files of all EAGLE heads share: sizes and flags of the config, names, embeddings.

The layer is Llama's in every engine, so the config is Llama's whatever the target is. Keys of other
engines do no harm and are not written: SGLang, for one, takes `bias` for that of the attention.

H hidden, I MLP width, A query heads, G kv heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spectrain.core.target import Target
from spectrain.export import numbers, rope
from spectrain.export.found import Found
from spectrain.export.layout import Finding
from spectrain.heads.base import DraftHead
from spectrain.heads.registry import FAMILIES

EMBEDDING = "embed_tokens.weight"
# Whether the embedding is the head's own: a key of the speculators package. Our other EAGLE-3 files
# have it where it is.
TRAINED = "embed_requires_grad"
_FLOATS = {"F32", "BF16", "F16"}
_ROWS = 8192  # of an embedding that are compared at a time


# ── reading ──────────────────────────────────────────────────────────────────


def foreign(found: Found) -> bool:
    """Whether the config says that this is another layout, whatever the tensors are called."""
    marks = {"speculators_model_type", "speculators_config", "transformer_layer_config"}
    return str(found.config.get("family")) in FAMILIES or bool(marks & found.config.keys())


def read_sizes(config: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Fields of an `EagleConfig` but the rotary ones and V; None beside findings that fail."""

    def value(name: str, default: Any = None) -> Any:
        said = config.get(name)
        return default if said is None else said

    hidden, heads = value("hidden_size"), value("num_attention_heads")
    filled = numbers.is_size(hidden) and numbers.is_size(heads)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": value("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("num_key_value_heads", heads),
        "head_dim": value("head_dim", max(1, hidden // heads) if filled else 1),
        "max_position_embeddings": value("max_position_embeddings", 2048),
        "vocab_size": value("vocab_size"),
        "num_hidden_layers": value("num_hidden_layers"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
    }
    problems = numbers.layer_findings(sizes)
    return (None if problems else sizes), problems


def type_findings(found: Found, integers: Mapping[str, set[str]]) -> Iterator[Finding]:
    """Whether tensors are stored in types that can be read; integers: name → types of those that
    are no weights."""
    kinds = set()
    for name, kind in sorted(found.dtypes.items()):
        allowed = integers.get(name, _FLOATS)
        if kind not in allowed:
            text = (
                f"{found.called(name)} is stored as {kind}, expected {' or '.join(sorted(allowed))}"
            )
            yield Finding("types", "fail", text, "dequantise the head, or export it again")
        elif allowed is _FLOATS:
            kinds.add(kind)
    if len(kinds) > 1:
        yield Finding("types", "note", f"weights of mixed types: {', '.join(sorted(kinds))}")


def layer_shapes(sizes: Mapping[str, Any], prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """Name → shape of a layer whose q/k/v read `width` numbers, without its input norms."""
    hidden, wide, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "post_attention_layernorm": (hidden,),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def embedding_is_targets(found: Found, target: Target) -> bool:
    """Whether the file's embedding is the target's, up to the rounding of the coarser type."""
    own, table = found.read(EMBEDDING), target.readout.embedding.weight
    if own.shape != table.shape:
        return False
    for start in range(0, len(own), _ROWS):
        left, right = own[start : start + _ROWS], table[start : start + _ROWS].detach().cpu()
        equal = torch.equal(left, right.to(left.dtype))
        if not equal and not torch.equal(right, left.to(right.dtype)):
            return False
    return True


def embedding_was_trained(found: Found) -> bool:
    """Whether the config says that the head has an embedding of its own."""
    return bool(found.config.get(TRAINED))


def lost_embedding(found: Found) -> Finding:
    text = f"{TRAINED} is true, and {found.called(EMBEDDING)} is not in the file"
    fix = f"get the whole file; only a head that used the target's may have {TRAINED}=false"
    return Finding("embedding", "fail", text, fix)


def rope_suspect(found: Found, sizes: Mapping[str, Any], target: Target) -> dict[str, Any] | None:
    """Config keys that give the head the target's rotary positions; None where it has them."""
    try:
        own = rope.rope_parameters(target.config)
        size, most = sizes["head_dim"], sizes["max_position_embeddings"]
        if rope.same(
            rope.effective(rope.spellings(found.config)[0], size, most),
            rope.effective(own, size, most),
        ):
            return None
    except Exception:  # as in rope.findings
        return None
    return rope.keys(own)


# ── writing ──────────────────────────────────────────────────────────────────


def written(head: DraftHead, architecture: str, layers: int) -> dict[str, Any]:
    """The config of a head, as all engines read it."""
    config = head.config
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "vocab_size",
    )
    kind = next(p.dtype for p in head.parameters())
    apart = config.hidden_size != config.target.hidden_size
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **{name: getattr(config, name) for name in names},
        **({"target_hidden_size": config.target.hidden_size} if apart else {}),
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **rope.keys(config.rope_parameters),
        "torch_dtype": str(kind).removeprefix("torch."),
    }


def safeai_refusals(head: DraftHead) -> list[str]:
    """What SafeAILab's own layer has no words for."""
    config, rotary = head.config, head.config.rope_parameters
    refused = []
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        refused.append(
            f"SafeAILab's layer knows no head_dim: its {config.num_attention_heads} heads of "
            f"{config.head_dim} would have to fill {config.hidden_size}"
        )
    known = {"rope_theta", "rope_type", "factor"}
    linear = rotary["rope_type"] == "linear" and rotary["rope_theta"] == 10000
    if rotary["rope_type"] != "default" and not (
        linear and rotary.keys() <= known and rotary["factor"] > 1
    ):
        refused.append(
            f"SafeAILab's layer knows plain rotary positions and linear ones of base 10000, not "
            f"{rotary['rope_type']} of base {rotary['rope_theta']:g}"
        )
    return refused


def safeai_rope(rotary: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling in the two keys that SafeAILab's config insists on."""
    if rotary["rope_type"] == "default":
        return {}
    return {"rope_scaling": {"type": "linear", "factor": float(rotary["factor"])}}

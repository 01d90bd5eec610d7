"""What config.json of the `speculators` package says of an EAGLE-3 head, and how it is read.

The layout is that of version 0.9.0. Sizes lie in `transformer_layer_config`, the config of a Llama
model; what is left out there has Llama's own value, so the library's class is asked. Layers of the
target are named by the state that goes INTO them: id l is the output of layer l − 1, the embeddings
are 0 and the last layer's output is N.

N layers of the target, A auxiliary layers, K draft steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

from spectrain.core.target import Target
from spectrain.export import layer_keys, numbers, rope
from spectrain.export.aux_layers import COUNT
from spectrain.export.eagle_config import TRAINED
from spectrain.export.layout import Finding
from spectrain.heads.base import TargetFacts
from spectrain.heads.eagle3 import Eagle3Config, Eagle3Head, Eagle3Options

VERSION = "0.9.0"
KIND, LAYER_IDS, LAYER = (
    "speculators_model_type",
    "eagle_aux_hidden_state_layer_ids",
    "transformer_layer_config",
)
# What makes another head of it. `norm_before_residual` is false to the package where it is not
# said, and true to vLLM.
FLAGS = {
    "norm_before_residual": "the residual is the normed state",
    "norm_before_fc": "the features have a norm before fc",
    "fc_norm": "each layer's features have a norm before fc",
    "norm_output": "what is fed back is the normed state",
}
# Of `layer_keys.FLAGS`, those that may stand beside the layer's config.
_BESIDE = ("use_aux_norm", "quantization_config", "compression_config")
MOST_LAYERS = 8  # as many as a head can be trained with


def config_of(head: Eagle3Head, name: str, architectures: list[str]) -> dict[str, Any]:
    """name, architectures: of the target, as others call it."""
    own = head.config
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": own.steps,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        KIND: "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": own.draft_vocab_size,
        "target_hidden_size": own.target.hidden_size,
        LAYER_IDS: [layer + 1 for layer in own.aux_layers],
        **dict.fromkeys(FLAGS, False),
        TRAINED: own.embeddings == "own",
        "tie_word_embeddings": False,
        LAYER: _layer_of(own),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": architectures},
        },
    }


def _layer_of(own: Eagle3Config) -> dict[str, Any]:
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": own.vocab_size,
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "num_hidden_layers": own.layers,
        "num_attention_heads": own.num_attention_heads,
        "num_key_value_heads": own.num_key_value_heads,
        "head_dim": own.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": own.rms_norm_eps,
        "max_position_embeddings": own.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **rope.keys(own.rope_parameters),
    }
    if len(own.aux_layers) != 3:  # vLLM makes room for three unless it is told otherwise
        content[COUNT] = len(own.aux_layers)
    return content


@dataclass(frozen=True)
class Read:
    """A config, and what is to be told about it; config is None where something in it fails."""

    config: Eagle3Config | None
    findings: list[Finding]


def read(content: Mapping[str, Any], target: Target) -> Read:
    """The config of the head, its embedding taken for the target's. Never raises."""
    found: list[Finding] = []
    try:
        if found := list(numbers.findings(content[LAYER])):
            return Read(None, found)
        layer = LlamaConfig(**dict(content[LAYER]))
        sizes = _resolved(layer)
        found = [*numbers.layer_findings(sizes), *_kind(content)]
        found += _layer_keys(content[LAYER], sizes, target)
        found += _sizes(content, layer, target)
        layers, one = _layer_ids(content, target)
        steps, two = _steps(content)
        found += [one, two, *_count(content[LAYER], layers)]
        if any(finding.verdict == "fail" for finding in found):
            return Read(None, found)
        config = Eagle3Config(
            **Eagle3Options().model_dump(
                exclude={"init", "draft_vocab_size", "aux_layers", "steps", "layers"}
            ),
            steps=steps,
            layers=sizes.pop("num_hidden_layers"),
            **sizes,
            aux_layers=layers,
            draft_vocab_size=content["draft_vocab_size"],
            rope_parameters={"rope_type": "default", **layer.rope_parameters},
            target=TargetFacts.of(target),
        )
    except Exception as error:  # whatever a file may hold, down to what the library thinks of it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        text, fix = f"config.json cannot be read ({reason})", "mend config.json"
        return Read(None, [*found, Finding("config", "fail", text, fix)])
    return Read(config, found)


def _kind(content: Mapping[str, Any]) -> Iterator[Finding]:
    kind = content[LAYER].get("model_type", "qwen3")  # the package's own default
    if kind != "llama":
        yield Finding(
            "layer",
            "fail",
            f"layers of type {kind!r}: heads here have Llama's (no norms of queries and keys)",
            "only model_type='llama' can be read",
        )
    for key, text in FLAGS.items():
        if content.get(key, False):
            fix = f"only {key}=false can be read"
            yield Finding("norms", "fail", f"{key}: {text}, which no head here does", fix)
    if "norm_before_residual" not in content:
        yield Finding(
            "norms",
            "warn",
            "norm_before_residual is not said; taken for false, vLLM takes it for true",
            'write "norm_before_residual": false into config.json',
        )
    elif not any(content.get(key) for key in FLAGS):
        yield Finding("norms", "ok", "standard: norms in the layers alone")
    for key in _BESIDE:
        if content.get(key) not in (None, layer_keys.FLAGS[key]):
            fix = f"only {key}={layer_keys.FLAGS[key]!r} can be read"
            yield Finding("config", "fail", f"{key} is said: no head here computes that", fix)


def _resolved(layer: LlamaConfig) -> dict[str, Any]:
    """The numbers of an `EagleConfig`, and how many layers there are, where what is left out has
    Llama's own value."""
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "vocab_size"),
        "rms_norm_eps",
    )
    return {name: getattr(layer, name) for name in names}


def _layer_keys(
    inner: Mapping[str, Any], sizes: Mapping[str, Any], target: Target
) -> Iterator[Finding]:
    """Keys of the layer's config; those of the norms are decided by the keys beside it."""
    flags = {key: one for key, one in layer_keys.FLAGS.items() if key not in FLAGS}
    yield from layer_keys.flag_findings(inner, flags | {"bias": False, "eagle_config": None})
    yield from layer_keys.differences(inner, sizes, target)


def _count(inner: Mapping[str, Any], layers: tuple[int, ...]) -> Iterator[Finding]:
    """vLLM makes room for three states unless it is told otherwise; the package counts the ids."""
    told = inner.get(COUNT)
    if layers and (3 if told is None else told) != len(layers):
        text = f"{COUNT} is {told}, and {len(layers)} layers are read: vLLM cannot load that"
        fix = f'write "{COUNT}": {len(layers)} into {LAYER}'
        yield Finding("layers", "warn" if told is None else "fail", text, fix)


def _sizes(content: Mapping[str, Any], layer: LlamaConfig, target: Target) -> Iterator[Finding]:
    pairs = {
        "hidden_size": (layer.hidden_size, target.hidden_size),
        "target_hidden_size": (
            content.get("target_hidden_size") or target.hidden_size,
            target.hidden_size,
        ),
        "vocab_size": (layer.vocab_size, target.vocab_size),
    }
    wrong = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    for key, (said, real) in wrong.items():
        yield Finding("sizes", "fail", f"{key} is {said}, the target's {real}", "another --target?")
    if not 1 <= layer.num_hidden_layers <= MOST_LAYERS:
        yield Finding(
            "sizes",
            "fail",
            f"{layer.num_hidden_layers} layers, heads have 1 to {MOST_LAYERS}",
            f"correct num_hidden_layers of {LAYER}",
        )
    size, rows = content.get("draft_vocab_size"), "set draft_vocab_size to the rows of lm_head"
    if not isinstance(size, int) or not 1 <= size <= layer.vocab_size:
        yield Finding(
            "sizes", "fail", f"draft_vocab_size {size} of {layer.vocab_size} tokens", rows
        )
    elif not wrong:
        yield Finding("sizes", "ok", f"hidden size {layer.hidden_size}, {size} tokens to guess")


def _layer_ids(content: Mapping[str, Any], target: Target) -> tuple[tuple[int, ...], Finding]:
    """The layers whose outputs are read."""
    ids, total = content.get(LAYER_IDS), target.num_layers
    said = ids is not None
    if not said:
        ids = [2, total // 2, total - 3]
    good = all(isinstance(i, int) and 1 <= i <= total for i in ids) and ids == sorted(set(ids))
    if not ids or not good:
        text = f"{LAYER_IDS} {ids} are not ascending ids of 1 … {total} (0 are the embeddings)"
        return (), Finding("layers", "fail", text, f"write {LAYER_IDS} as the head was trained")
    outputs = tuple(i - 1 for i in ids)
    text = f"outputs of layers {list(outputs)} (ids {ids} name the states that go into a layer)"
    if not said:
        return outputs, Finding("layers", "note", f"{text}, the default: none are said")
    return outputs, Finding("layers", "ok", text)


def _steps(content: Mapping[str, Any]) -> tuple[int, Finding]:
    try:
        steps = int(content["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
        if steps < 1:
            raise ValueError
    except (KeyError, IndexError, TypeError, ValueError):
        steps = Eagle3Options().steps
        return steps, Finding("steps", "note", f"speculative_tokens is not said; taken for {steps}")
    return steps, Finding("steps", "ok", f"{steps} draft steps")

"""EAGLE-3 heads in the layout of SafeAILab, vLLM, SGLang and TensorRT-LLM: reading.

    fc.weight [H, n·Ht], n auxiliary states low → high
    midlayer.self_attn.{q,k,v}_proj.weight over [embedding, hidden], 2H wide; o_proj, mlp.*
    midlayer.{input_layernorm (of the embedding), hidden_norm, post_attention_layernorm}.weight
    norm.weight [H]   lm_head.weight [D, H]   d2t [D], t2d [V] where D < V   embed_tokens.weight

The first layer may be called layers.0, all names may have the prefix `model.`. Behind it come plain
layers, layers.1 …, whose input norm vLLM calls input_layernorm, SGLang and TensorRT-LLM
hidden_norm. Which layers the states are of: aux_layers.py.

H hidden, Ht the target's, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from spectrain.core.target import Target
from spectrain.export import aux_layers, draft_vocabulary, eagle_config, layer_keys, rope
from spectrain.export.eagle_config import EMBEDDING
from spectrain.export.found import Found
from spectrain.export.layout import Finding, Reader, Suspect, compare_names
from spectrain.heads.base import DraftHead, TargetFacts
from spectrain.heads.eagle3 import Eagle3Config, Eagle3Head, Eagle3Options

MAPS = ("d2t", "t2d")
_FC, _MOST_LAYERS = "fc.weight", 8  # layers, of Eagle3Options
_WIDE = [f"midlayer.self_attn.{part}_proj.weight" for part in "qkv"]
_FLAGS = layer_keys.FLAGS | {"bias": False, "parallel_drafting": False}
_NESTED_FLAGS = {
    "use_aux_hidden_state": True,
    "norm_before_fc": False,
    "return_hidden_post_norm": False,
    "eh_proj_before_attn": False,
    "next_layer_regular": True,
}


class Eagle3Reader(Reader):
    """A layer that norms the embedding and the hidden state apart."""

    name: ClassVar[str] = "eagle3"
    tells_steps: ClassVar[bool] = False
    norm_keys: ClassVar[bool] = True

    def recognises(self, found: Found) -> bool:
        names = {_own_name(name) for name in found.shapes}
        layer = any(name.startswith("midlayer.") for name in names)
        third = any("hidden_norm" in n for n in names) or {"d2t", "lm_head.weight"} & names
        first = any(name.removeprefix("model.").startswith("midlayer.") for name in found.shapes)
        # A whole language model has layers and an lm_head as well, but nothing like these.
        own = _FC in names or "midlayer.hidden_norm.weight" in names
        return not eagle_config.foreign(found) and layer and (first or bool(third and own))

    def findings(self, found: Found, target: Target) -> Iterator[Finding]:
        found = canonical(found)
        sizes, problems = _sizes(found, target)
        yield from problems
        if sizes is None:
            return
        nested = found.config.get(aux_layers.NESTED)
        yield from layer_keys.flag_findings(found.config, _FLAGS)
        yield from layer_keys.differences(found.config, sizes, target)
        if isinstance(nested, dict):
            yield from layer_keys.flag_findings(nested, _NESTED_FLAGS)
        elif nested is not None:
            yield Finding("config", "fail", "eagle_config is no JSON object", "leave it out")
        if found.config.get("tie_word_embeddings"):
            text = "tie_word_embeddings is true: SGLang would use the embedding as lm_head"
            yield Finding("lm_head", "warn", text, "set tie_word_embeddings to false")
        outputs, seen = _layers(found, target)
        yield from seen
        checks = [
            *compare_names(
                found,
                _expected(sizes, found, len(outputs or (0, 0, 0)), target),
                [name for name in found.shapes if name.endswith(rope.INV_FREQ)],
            ),
            *eagle_config.type_findings(found, {"d2t": {"I64", "I32"}, "t2d": {"BOOL"}}),
        ]
        yield from checks
        if any(one.verdict == "fail" for one in checks):
            return
        yield from rope.findings(found, sizes["head_dim"], sizes["max_position_embeddings"], target)
        maps = (found.read(name) if name in found.shapes else None for name in MAPS)
        yield from draft_vocabulary.findings(*maps, sizes["draft_vocab_size"], target)
        if EMBEDDING not in found.shapes and eagle_config.embedding_was_trained(found):
            yield eagle_config.lost_embedding(found)
        elif EMBEDDING not in found.shapes:
            yield Finding("embedding", "ok", "the target's")
        elif eagle_config.embedding_is_targets(found, target):
            yield Finding("embedding", "ok", "in the file, equal to the target's")
        else:
            yield Finding("embedding", "note", "the head's own, not the target's")

    def build(self, found: Found, target: Target) -> DraftHead:
        found = canonical(found)
        sizes, _ = _sizes(found, target)
        outputs, _ = _layers(found, target)
        own = EMBEDDING in found.shapes and (
            eagle_config.embedding_was_trained(found)
            or not eagle_config.embedding_is_targets(found, target)
        )
        options = Eagle3Options(
            aux_layers=outputs,
            layers=sizes.pop("num_hidden_layers"),
            embeddings="own" if own else "target",
        )
        config = Eagle3Config(
            **options.model_dump(exclude={"init", "draft_vocab_size"}),
            **sizes,
            rope_parameters=rope.spellings(found.config)[0],
            target=TargetFacts.of(target),
        )
        head = Eagle3Head(config)
        tensors = {name: found.read(name) for name in head.state_dict() if name not in MAPS}
        if head.reduced:
            tensors |= draft_vocabulary.tensors(found.read("d2t"), config.vocab_size)
        head.load_state_dict(tensors)
        return head

    def layers_key(self, layers: tuple[int, ...]) -> str:
        return f"{aux_layers.KEY} to {[layer + 1 for layer in layers]} (layer inputs)"

    def called(self, found: Found, name: str) -> str:
        return canonical(found).called(name)

    def suspects(self, found: Found, target: Target) -> Iterator[Suspect]:
        found = canonical(found)
        sizes, _ = _sizes(found, target)
        outputs, _ = _layers(found, target)
        for by in (-1, 1):
            if outputs and outputs[0] + by >= 0 and outputs[-1] + by < target.num_layers:
                config = aux_layers.shifted(found.config, outputs, by)
                yield Suspect(
                    f"the layers read are one too {'high' if by < 0 else 'low'}",
                    f"in config.json, set {self.layers_key(tuple(o + by for o in outputs))}, and "
                    "name none elsewhere",
                    found.edited(config=config),
                )
        if "d2t" in found.shapes:
            yield from _absolute(found)
        if outputs and len(outputs) > 1:
            parts = found.read(_FC).chunk(len(outputs), dim=1)
            yield Suspect(
                "fc reads the states from high to low",
                f"reverse the order of the {len(outputs)} column blocks of {found.called(_FC)}",
                found.edited(tensors={_FC: torch.cat(parts[::-1], dim=1)}),
            )
        yield Suspect(
            "q, k and v read [hidden, embedding] instead of [embedding, hidden]",
            f"swap the halves of the columns of {', '.join(map(found.called, _WIDE))}",
            found.edited(tensors={name: _swapped(found.read(name)) for name in _WIDE}),
        )
        if keys := eagle_config.rope_suspect(found, sizes, target):
            yield Suspect(
                "rotary positions that are not the target's",
                rope.told(keys["rope_parameters"]),
                found.edited(config=keys),
                seen=True,
            )


def _layers(found: Found, target: Target) -> tuple[tuple[int, ...] | None, list[Finding]]:
    return aux_layers.read(found.config, target.num_layers, target.config.model_type)


def canonical(found: Found) -> Found:
    """The tensors under the names that our head's modules have."""
    return found.renamed(_own_name)


def _own_name(name: str) -> str:
    name = re.sub(r"^(model\.)?layers\.0\.", "midlayer.", name.removeprefix("model."))
    return re.sub(r"^(layers\.\d+)\.hidden_norm\.", r"\1.input_layernorm.", name)


def _swapped(weight: Tensor) -> Tensor:
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def _absolute(found: Found) -> Iterator[Suspect]:
    offsets = draft_vocabulary.offsets_of(found.read("d2t"))
    if offsets is None or int(offsets.min()) < 0:
        return
    mended = {"d2t": offsets}
    if "t2d" in found.shapes:
        (size,) = found.shapes["t2d"]
        ids = offsets + torch.arange(len(offsets))
        if int(ids[-1]) >= size:
            return
        mended = draft_vocabulary.tensors(offsets, size)
    yield Suspect(
        "d2t holds absolute ids",
        "store offsets: d2t - arange(D)",
        found.edited(tensors=mended),
    )


def _sizes(found: Found, target: Target) -> tuple[dict[str, Any] | None, list[Finding]]:
    """The sizes of `eagle_config` and D, fitting the target."""
    config = found.config
    sizes, problems = eagle_config.read_sizes(config)
    if sizes is None:
        return None, problems
    seen = [_fits(sizes, config, target)]
    draft = config.get("draft_vocab_size")
    if draft is None:
        draft = (found.shapes.get("lm_head.weight") or (sizes["vocab_size"],))[0]
        text = f"draft_vocab_size is missing; lm_head has {draft} rows"
        seen.append(Finding("config", "note", text, "write it: SGLang would share the target's"))
    if type(draft) is not int or draft < 1:
        seen.append(
            Finding("config", "fail", "draft_vocab_size is no size", "set it to lm_head's rows")
        )
    if sizes["num_hidden_layers"] > _MOST_LAYERS:
        text = (
            f"num_hidden_layers is {sizes['num_hidden_layers']}, a head has {_MOST_LAYERS} at most"
        )
        seen.append(Finding("config", "fail", text, "correct num_hidden_layers in config.json"))
    apart = sizes["hidden_size"] != target.hidden_size
    if apart and EMBEDDING not in found.shapes:
        text = f"a head {sizes['hidden_size']} wide cannot read the target's embedding"
        text, fix = f"{text} and has none of its own", f"put {EMBEDDING} of the head into the file"
        seen.append(Finding("embedding", "fail", text, fix))
    failed = any(one.verdict == "fail" for one in seen)
    return (None if failed else sizes | {"draft_vocab_size": draft}), seen


def _fits(sizes: dict[str, Any], config: Any, target: Target) -> Finding:
    own = config.get("target_hidden_size") or target.hidden_size, sizes["vocab_size"]
    theirs = target.hidden_size, target.vocab_size
    if own != theirs:
        text = f"made for a hidden size and vocabulary of {own}, those of the target are {theirs}"
        return Finding("target", "fail", text, "give the target that the head was trained for")
    return Finding("target", "ok", "made for this hidden size and vocabulary")


def _expected(
    sizes: dict[str, Any], found: Found, states: int, target: Target
) -> dict[str, tuple[int, ...]]:
    """Name → shape; states: n."""
    hidden, size = sizes["hidden_size"], sizes["draft_vocab_size"]
    expected = {
        _FC: (hidden, states * target.hidden_size),
        **eagle_config.layer_shapes(sizes, "midlayer.", 2 * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (size, hidden),
    }
    for index in range(1, sizes["num_hidden_layers"]):
        expected |= eagle_config.layer_shapes(sizes, f"layers.{index}.", hidden)
        expected[f"layers.{index}.input_layernorm.weight"] = (hidden,)
    vocabulary = sizes["vocab_size"]
    optional = {"d2t": (size,), "t2d": (vocabulary,), EMBEDDING: (vocabulary, hidden)}
    return expected | {n: shape for n, shape in optional.items() if n in found.shapes}

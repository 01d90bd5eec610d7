"""EAGLE-1 and EAGLE-2 heads in the layout of SafeAILab, vLLM and SGLang.

    fc.weight [H, 2H] = [embedding, hidden]      fc.bias [H], see below
    layers.0.self_attn.{q,k,v,o}_proj.weight     layers.0.mlp.{gate,up,down}_proj.weight
    layers.0.post_attention_layernorm.weight [H]      embed_tokens.weight [V, H], the target's

No norm in front, none behind, and the target's own lm_head. Public files may prefix `model.`.

The bias of fc: SafeAILab's config says whether there is one (`bias`, true when silent), vLLM has
no place for one, SGLang always has one (a file without it would leave it at random values). So a
head without a bias is written with zeros for SGLang, and zeros that no config promises are read
as no bias: both compute the same.

H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from spectrain.core.target import Target
from spectrain.export import eagle_config, eagle_launch, layer_keys, rope
from spectrain.export.eagle_config import EMBEDDING
from spectrain.export.found import Found
from spectrain.export.layout import (
    Encoded,
    Finding,
    Launch,
    Reader,
    Reference,
    Suspect,
    Writer,
    compare_names,
)
from spectrain.heads.base import DraftHead, TargetFacts
from spectrain.heads.eagle1 import Eagle1Config, Eagle1Head, Eagle1Options

_FC, _BIAS = "fc.weight", "fc.bias"
_FLAGS = layer_keys.FLAGS | {"num_hidden_layers": 1, "hot_vocab_size": None}


class Eagle1Reader(Reader):
    """`fc` and a first layer, and none of the marks of EAGLE-3."""

    name: ClassVar[str] = "eagle1"
    tells_steps: ClassVar[bool] = False

    def recognises(self, found: Found) -> bool:
        names = {_plain(name) for name in found.shapes}
        third = any("hidden_norm" in n or n.startswith("midlayer.") for n in names)
        layer = any(n.startswith("layers.0.") for n in names)
        if eagle_config.foreign(found) or third or {"d2t", "lm_head.weight"} & names:
            return False
        return layer and _FC in names

    def findings(self, found: Found, target: Target) -> Iterator[Finding]:
        found = found.renamed(_plain)
        sizes, problems = eagle_config.read_sizes(found.config)
        yield from problems
        if sizes is None:
            return
        yield from layer_keys.flag_findings(found.config, _FLAGS)
        yield from layer_keys.differences(found.config, sizes, target)
        if found.config.get("tie_word_embeddings"):
            text = "tie_word_embeddings is true: SGLang stops where both tables are one"
            yield Finding("lm_head", "warn", text, "set tie_word_embeddings to false")
        yield from _fits(sizes, target)
        checks = [
            *compare_names(
                found,
                _expected(sizes, found),
                [name for name in found.shapes if name.endswith(rope.INV_FREQ)],
            ),
            *eagle_config.type_findings(found, {}),
        ]
        yield from checks
        if any(one.verdict == "fail" for one in checks):
            return
        yield from _bias(found)
        yield from rope.findings(found, sizes["head_dim"], sizes["max_position_embeddings"], target)
        if EMBEDDING not in found.shapes:
            yield Finding("embedding", "ok", "the target's")
        elif eagle_config.embedding_is_targets(found, target):
            yield Finding("embedding", "ok", "in the file, equal to the target's")
        else:
            text = "the embedding in the file is not the target's, and only the target's is read"
            yield Finding("embedding", "fail", text, "check that --target is the head's own")

    def build(self, found: Found, target: Target) -> DraftHead:
        found = found.renamed(_plain)
        sizes, _ = eagle_config.read_sizes(found.config)
        sizes.pop("num_hidden_layers")
        names = [n for n in found.shapes if n != EMBEDDING and not n.endswith(rope.INV_FREQ)]
        tensors = {name: found.read(name) for name in names}
        promised = found.config.get("bias") is True
        if _BIAS in tensors and not promised and not tensors[_BIAS].any():
            del tensors[_BIAS]
        options = Eagle1Options(fc_bias=_BIAS in tensors)
        size = target.readout.usable  # as engines do: all there are
        config = Eagle1Config(
            **options.model_dump(exclude={"init", "draft_vocab_size"}),
            **sizes,
            rope_parameters=rope.spellings(found.config)[0],
            draft_vocab_size=size,
            target=TargetFacts.of(target),
        )
        head = Eagle1Head(config)
        head.use_vocabulary(torch.arange(size))
        head.load_state_dict(
            {**{n: t for n, t in head.state_dict().items() if n in ("d2t", "t2d")}, **tensors}
        )
        return head

    def called(self, found: Found, name: str) -> str:
        return found.renamed(_plain).called(name)

    def suspects(self, found: Found, target: Target) -> Iterator[Suspect]:
        found = found.renamed(_plain)
        sizes, _ = eagle_config.read_sizes(found.config)
        left, right = found.read(_FC).chunk(2, dim=1)
        yield Suspect(
            "fc reads [hidden, embedding] instead of [embedding, hidden]",
            f"swap the halves of the columns of {found.called(_FC)}",
            found.edited(tensors={_FC: torch.cat([right, left], dim=1)}),
        )
        if keys := eagle_config.rope_suspect(found, sizes, target):
            yield Suspect(
                "rotary positions that are not the target's",
                rope.told(keys["rope_parameters"]),
                found.edited(config=keys),
                seen=True,
            )


def _plain(name: str) -> str:
    return name.removeprefix("model.")


def _expected(sizes: dict[str, Any], found: Found) -> dict[str, tuple[int, ...]]:
    hidden = sizes["hidden_size"]
    expected = {_FC: (hidden, 2 * hidden), **eagle_config.layer_shapes(sizes, "layers.0.", hidden)}
    if _BIAS in found.shapes or found.config.get("bias") is True:
        expected[_BIAS] = (hidden,)
    if EMBEDDING in found.shapes:
        expected[EMBEDDING] = (sizes["vocab_size"], hidden)
    return expected


def _bias(found: Found) -> Iterator[Finding]:
    """Where engines disagree on the bias of fc, since config and file do. Of vLLM's own files
    nothing else than no bias is expected."""
    there = _BIAS in found.shapes
    if there and found.config.get("bias") is False and found.read(_BIAS).any():
        text = (
            f"bias is false, and {found.called(_BIAS)} is not zero: SafeAILab's code then has no "
            "place for it, vLLM never has one, SGLang adds it; it was read"
        )
        fix = (
            f"leave {found.called(_BIAS)} out if the head was trained without it, else set bias to "
            "true for SafeAILab and leave the key out for SGLang"
        )
        yield Finding("bias", "warn", text, fix)
    named = found.config.get("architectures")
    if not there and "bias" not in found.config and named != [VllmEagle1Writer.architecture]:
        text = (
            f"no {found.called(_BIAS)} in the file and no bias in the config: SafeAILab's code "
            "then expects one, SGLang always does, vLLM never; none was read"
        )
        fix = f'write "bias": false for SafeAILab, and a {found.called(_BIAS)} of zeros for SGLang'
        yield Finding("bias", "warn", text, fix)


def _fits(sizes: dict[str, Any], target: Target) -> Iterator[Finding]:
    own = sizes["hidden_size"], sizes["vocab_size"]
    theirs = target.hidden_size, target.vocab_size
    if own != theirs:
        text = f"hidden size and vocabulary are {own}, those of the target {theirs}"
        yield Finding("target", "fail", text, "give the target that the head was trained for")
    else:
        yield Finding("target", "ok", "hidden size and vocabulary are the target's")
    yield from (
        Finding("target", "fail", text, "use another family for this target")
        for text in borrowed_refusals(target)
    )


def borrowed_refusals(target: Target) -> list[str]:
    """Why the two tables that engines lend a head are not all that it borrows here."""
    readout = target.readout
    ids = torch.arange(min(4, readout.vocab_size), device=target.device)
    refused = []
    if not torch.equal(readout.embed(ids), readout.embedding.weight[ids]):
        refused.append(
            "the target scales its embedding, and engines lend the plain table to a head"
        )
    if readout.bias is not None:
        refused.append("the target's lm_head has a bias, and engines lend its weight alone")
    if readout.softcap is not None:
        refused.append("the target caps its logits, and engines do not cap those of a head")
    return refused


class _Eagle1Writer(Writer):
    """What the three have in common."""

    reader = Eagle1Reader()
    architecture: ClassVar[str]

    def refusals(self, head: DraftHead, reference: Reference) -> list[str]:
        refused = borrowed_refusals(reference.target)
        whole = torch.arange(reference.target.readout.usable)
        if not torch.equal(head.draft_ids.cpu(), whole):
            refused.append(
                f"the draft vocabulary of {head.config.draft_vocab_size} tokens has no place: "
                "EAGLE-1 guesses with the target's whole lm_head there; train it without "
                "head.draft_vocab_size"
            )
        return refused

    def encode(self, head: DraftHead, reference: Reference) -> Encoded:
        config = eagle_config.written(head, self.architecture, layers=1)
        tensors = {n: t for n, t in head.state_dict().items() if n not in ("d2t", "t2d")}
        return Encoded(config, tensors)


class SafeAiEagle1Writer(_Eagle1Writer):
    """SafeAILab's own: the config says whether fc has a bias."""

    architecture = "LlamaForCausalLM"

    def refusals(self, head: DraftHead, reference: Reference) -> list[str]:
        return super().refusals(head, reference) + eagle_config.safeai_refusals(head)

    def encode(self, head: DraftHead, reference: Reference) -> Encoded:
        encoded = super().encode(head, reference)
        scaling = eagle_config.safeai_rope(head.config.rope_parameters)
        config = {**encoded.config, **scaling, "bias": head.config.fc_bias}
        return Encoded(config, encoded.tensors)

    def launch(self, head: DraftHead, reference: Reference) -> list[Launch]:
        return [eagle_launch.safeai(head, reference, third=False)]


class VllmEagle1Writer(_Eagle1Writer):
    """No bias: its loader stops at a name it does not know."""

    architecture = "EagleLlamaForCausalLM"
    facts = (("vllm", architecture),)

    def refusals(self, head: DraftHead, reference: Reference) -> list[str]:
        refused = super().refusals(head, reference)
        refused += rope.engine_refusals("vllm", head.config.rope_parameters)
        if head.fc.bias is not None and head.fc.bias.any():
            refused.append(
                "vLLM's fc has no bias, and this head's is not zero: train it with --set "
                "head.fc_bias=false"
            )
        return refused

    def encode(self, head: DraftHead, reference: Reference) -> Encoded:
        encoded = super().encode(head, reference)
        return Encoded(encoded.config, {n: t for n, t in encoded.tensors.items() if n != _BIAS})

    def launch(self, head: DraftHead, reference: Reference) -> list[Launch]:
        return [eagle_launch.vllm(head, reference, "eagle")]


class SglangEagle1Writer(_Eagle1Writer):
    """Always a bias."""

    architecture = "LlamaForCausalLMEagle"
    facts = (("sglang", architecture),)

    def refusals(self, head: DraftHead, reference: Reference) -> list[str]:
        positions = rope.engine_refusals("sglang", head.config.rope_parameters)
        return super().refusals(head, reference) + positions

    def encode(self, head: DraftHead, reference: Reference) -> Encoded:
        encoded = super().encode(head, reference)
        zeros = torch.zeros_like(head.fc.weight[:, 0])
        return Encoded(encoded.config, {_BIAS: zeros, **encoded.tensors})

    def launch(self, head: DraftHead, reference: Reference) -> list[Launch]:
        return [eagle_launch.sglang(head, reference, "EAGLE")]

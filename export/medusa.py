"""The layout of Medusa's own code (FasterDecoding): K heads of residual blocks, by number.

    {k}.{l}.linear.weight [H, H], {k}.{l}.linear.bias [H]    block l of head k
    {k}.{L}.weight [V, H]                                    its output layer

Files of version 2 have no output layers: each head speaks through the target's own. Older files,
and models that were trained together with their heads, put `medusa_head.` before the names. That
code builds one block and uses it L times: of heads with several blocks it runs the last one.

K heads, L blocks of each, H hidden, V vocabulary.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import ClassVar

import torch

from spectrain.core.target import Target
from spectrain.export.found import Found
from spectrain.export.layout import (
    Encoded,
    Finding,
    Launch,
    Reader,
    Reference,
    Writer,
    compare_names,
)
from spectrain.heads.base import TargetFacts
from spectrain.heads.medusa import MedusaConfig, MedusaHead, MedusaOptions

WEIGHTS = "medusa_lm_head.safetensors"
PREFIX = "medusa_head."
OURS = "heads."
_NAME = re.compile(r"(?:medusa_head\.)?(\d{1,2})\.(\d{1,2})\.(linear\.weight|linear\.bias|weight)")
_OF_TARGET = ("model.", "lm_head.")  # beside the heads, where both were saved together


class MedusaReader(Reader):
    """Known by the numbers in its names."""

    name: ClassVar[str] = "medusa"

    def recognises(self, found: Found) -> bool:
        return "family" not in found.config and any(_NAME.fullmatch(n) for n in found.shapes)

    def findings(self, found: Found, target: Target) -> Iterator[Finding]:
        config, own_output = _config(found, target)
        yield _counts(found, config)
        beside = [n for n in found.shapes if n.startswith(_OF_TARGET)]
        if beside:
            text = f"{len(beside)} tensors of the target lie beside the heads"
            yield Finding("target", "warn", text, "give this very model as --target")
        expected = dict(_expected(config, found, own_output))
        yield from compare_names(found, expected, beside)
        if not own_output:
            text = "none in the file: the heads speak through the target's (version 2)"
            yield Finding("output layers", "note", text)

    def build(self, found: Found, target: Target) -> MedusaHead:
        config, own_output = _config(found, target)
        head = MedusaHead(config)
        state = {OURS + name.removeprefix(PREFIX): found.read(name) for name in _names(found)}
        if not own_output:
            for key in ("weight", "bias") if config.output_bias else ("weight",):
                value = getattr(target.readout, key).detach().cpu()
                state |= {f"{OURS}{k}.{config.layers}.{key}": value for k in range(config.steps)}
        head.load_state_dict(state)
        return head

    def called(self, found: Found, name: str) -> str:
        return _prefix(found) + name.removeprefix(OURS)


class MedusaWriter(Writer):
    """Heads over every token, without a bias."""

    reader = MedusaReader()

    def refusals(self, head: MedusaHead, reference: Reference) -> list[str]:
        config, reasons = head.config, []
        if head.reduced:
            reasons.append(
                f"the heads can guess {config.draft_vocab_size} of {config.vocab_size} tokens: the "
                "layout has no draft vocabulary, its output layers have a row for each token; "
                "train it without head.draft_vocab_size"
            )
        if config.output_bias:
            reasons.append("the output layers have a bias, for which the layout has no place")
        return reasons

    def encode(self, head: MedusaHead, reference: Reference) -> Encoded:
        config = {
            "medusa_num_heads": head.config.steps,
            "medusa_num_layers": head.config.layers,
            "base_model_name_or_path": reference.name,
        }
        tensors = {name.removeprefix(OURS): value for name, value in head.state_dict().items()}
        return Encoded(config, tensors, weights=WEIGHTS)

    def launch(self, head: MedusaHead, reference: Reference) -> list[Launch]:
        note = "neither vLLM 0.33.0 nor SGLang 0.5.23 has Medusa any more"
        if head.config.layers > 1:
            note += "; FasterDecoding's code repeats one block and would run other heads than these"
        return [
            Launch(
                "spectrain",
                f"spectrain import {{folder}} --target {shlex.quote(reference.here)}",
                note=note,
            )
        ]


def _names(found: Found) -> list[str]:
    return [name for name in found.shapes if _NAME.fullmatch(name)]


def _prefix(found: Found) -> str:
    return PREFIX if any(name.startswith(PREFIX) for name in found.shapes) else ""


def _config(found: Found, target: Target) -> tuple[MedusaConfig, bool]:
    """What the names say, and whether the heads have output layers of their own."""
    places = [_NAME.fullmatch(name).groups() for name in _names(found)]
    blocks = {int(layer) for _, layer, kind in places if kind != "weight"}
    outputs = {int(layer) for _, layer, kind in places if kind == "weight"}
    options = MedusaOptions()
    config = MedusaConfig(
        steps=max(int(head) for head, _, _ in places) + 1,
        layers=max(blocks) + 1 if blocks else 0,
        step_decay=options.step_decay,
        loss=options.loss,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        output_bias=not outputs and target.readout.bias is not None,
        target=TargetFacts.of(target),
    )
    return config, bool(outputs)


def _expected(
    config: MedusaConfig, found: Found, own_output: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    prefix = _prefix(found)
    with torch.device("meta"):
        state = MedusaHead(config).state_dict()
    for name, value in state.items():
        if own_output or name.split(".")[2] != str(config.layers):
            yield prefix + name.removeprefix(OURS), tuple(value.shape)


def _counts(found: Found, config: MedusaConfig) -> Finding:
    """What config.json says against what is there."""
    there = {"medusa_num_heads": config.steps, "medusa_num_layers": config.layers}
    said = {key: found.config[key] for key in there if key in found.config}
    text = f"{config.steps} heads of {config.layers} blocks"
    different = [f"{key} {value}" for key, value in said.items() if value != there[key]]
    if different:
        text = f"{', '.join(different)} in config.json, the file holds {text}"
        promised = any(isinstance(v, int) and v > there[key] for key, v in said.items())
        return Finding("heads", "fail" if promised else "warn", text, "correct config.json")
    return Finding("heads", "ok", text)

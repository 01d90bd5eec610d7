"""The layout of the `speculators` package (0.9.0), which vLLM reads as well: EAGLE-3 in one folder.

All that an engine has to know lies in config.json, the target's name with it. The tensors are those
of our head, its first layer as `layers.0`, and always an embedding, the target's where the head has
none of its own: the package would fetch that from the target, but tells that it has to by a mark in
memory which its loading may overwrite, and then goes on with whatever lies there. It counts
positions from 1: only their distances matter to a head.

H hidden, A auxiliary layers, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.export import draft_vocabulary, eagle_config, rope
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
from spectrain.export.speculators_config import KIND, LAYER, LAYER_IDS, VERSION, config_of, read
from spectrain.heads import io
from spectrain.heads.eagle3 import Eagle3Config, Eagle3Head

OURS, THEIRS = "midlayer.", "layers.0."
# Copies of the target's that older versions saved beside the head, and nobody reads.
LEFT_BY_TRAINING = {"verifier_lm_head.weight", "verifier_norm.weight"}


class SpeculatorsReader(Reader):
    """Known by its `speculators_model_type`, of which EAGLE-3 can be read."""

    name: ClassVar[str] = "speculators"
    norm_keys: ClassVar[bool] = True

    def recognises(self, found: Found) -> bool:
        return isinstance(found.config.get(KIND), str)

    def findings(self, found: Found, target: Target) -> Iterator[Finding]:
        kind = found.config[KIND]
        if kind != "eagle3":
            text = f"a speculator of kind {kind!r}; only eagle3 can be read"
            yield Finding("kind", "fail", text, "no head here is of that kind")
            return
        said = read(found.config, target)
        yield from said.findings
        if said.config is None:
            return
        for checked in (self._names, self._rope):
            seen = list(checked(found, said.config, target))
            yield from seen
            if any(one.verdict == "fail" for one in seen):  # what comes next cannot be looked at
                return
        maps = (found.read(name) if name in found.shapes else None for name in ("d2t", "t2d"))
        yield from draft_vocabulary.findings(*maps, said.config.draft_vocab_size, target)
        yield _embedding(found, target)

    @staticmethod
    def _rope(found: Found, config: Eagle3Config, target: Target) -> Iterator[Finding]:
        layer = replace(found, config=found.config[LAYER])
        yield from rope.findings(layer, config.head_dim, config.max_position_embeddings, target)

    @staticmethod
    def _names(found: Found, config: Eagle3Config, target: Target) -> Iterator[Finding]:
        # Any rotary positions will do for the names; the file's own are looked at next.
        plain = config.model_copy(update={"rope_parameters": {"rope_type": "default"}})
        try:
            state = io.expected(Eagle3Head, plain, str(found.path))
        except SpectrainError as error:
            yield Finding("sizes", "fail", error.what, f"correct the sizes in {LAYER}")
            return
        expected = {_theirs(name): tuple(value.shape) for name, value in state.items()}
        yield from compare_names(found, expected, _beside(config))

    def build(self, found: Found, target: Target) -> Eagle3Head:
        config = read(found.config, target).config
        if _has_own_embedding(found, target):
            config = config.model_copy(update={"embeddings": "own"})
        head = Eagle3Head(config)
        head.load_state_dict({name: found.read(_theirs(name)) for name in head.state_dict()})
        return head

    def layers_key(self, layers: tuple[int, ...]) -> str:
        return f"{LAYER_IDS} to {[layer + 1 for layer in layers]}"

    def called(self, found: Found, name: str) -> str:
        return _theirs(name)

    def suspects(self, found: Found, target: Target) -> Iterator[Suspect]:
        if "d2t" in found.shapes and (
            (offsets := draft_vocabulary.offsets_of(found.read("d2t"))) is not None
        ):
            yield Suspect(
                "d2t holds absolute ids",
                "subtract 0 … D-1 from d2t: it has to hold offsets",
                found.edited(tensors={"d2t": offsets}),
            )
        config = read(found.config, target).config
        for shift, text in ((1, "low"), (-1, "high")):
            layers = [] if config is None else [layer + shift for layer in config.aux_layers]
            if layers and layers[0] >= 0 and layers[-1] < target.num_layers:
                ids = [layer + 1 for layer in layers]
                yield Suspect(
                    f"the layers read are one too {text}",
                    f"in config.json, set {self.layers_key(tuple(layers))}",
                    found.edited(config={LAYER_IDS: ids}),
                )


class SpeculatorsWriter(Writer):
    """One folder for the package and for vLLM."""

    reader = SpeculatorsReader()
    facts = (("vllm", "Eagle3Speculator"),)

    def refusals(self, head: Eagle3Head, reference: Reference) -> list[str]:
        config = head.config
        refused = rope.engine_refusals("vllm", config.rope_parameters)
        if config.hidden_size != config.target.hidden_size:
            refused.append(
                f"the head is {config.hidden_size} wide, its target {config.target.hidden_size}: "
                "the package has one hidden size for both"
            )
        return refused

    def encode(self, head: Eagle3Head, reference: Reference) -> Encoded:
        model = reference.target.model
        architectures = model.config.architectures or [type(model).__name__]
        tensors = {_theirs(name): value for name, value in head.state_dict().items()}
        if EMBEDDING not in tensors:
            # As the target embeds them, which may be more than its table (Gemma scales it).
            ids = torch.arange(reference.target.vocab_size, device=reference.target.device)
            tensors[EMBEDDING] = reference.target.readout.embed(ids)
        return Encoded(config_of(head, reference.name, architectures), tensors)

    def launch(self, head: Eagle3Head, reference: Reference) -> list[Launch]:
        settings = {
            "method": "eagle3",
            "model": "{folder}",
            "num_speculative_tokens": head.config.steps,
        }
        lines = [
            Launch(
                "vLLM 0.33.0",
                f"vllm serve {shlex.quote(reference.name)} "
                f"--speculative-config {shlex.quote(json.dumps(settings))}",
            ),
            Launch(
                f"speculators {VERSION}",
                "from speculators import SpeculatorModel\n"
                'draft = SpeculatorModel.from_pretrained("{folder}")',
                "python",
                "reads the output layer of the target from where that lies",
            ),
        ]
        if re.fullmatch(r"[\w.-]+/[\w.-]+", reference.name) and not Path(reference.name).exists():
            short = Launch(
                "vLLM 0.33.0",
                "vllm serve {folder}",
                note="starts the target that config.json names; a name on the hub, no folder",
            )
            lines.insert(0, short)
        return lines


def _theirs(name: str) -> str:
    return THEIRS + name.removeprefix(OURS) if name.startswith(OURS) else name


def _beside(config: Eagle3Config) -> set[str]:
    """What may be in the file besides: looked at elsewhere, or of no use."""
    maps = set() if config.draft_vocab_size < config.vocab_size else {"d2t", "t2d"}
    return {EMBEDDING, *LEFT_BY_TRAINING, *maps}


def _embedding(found: Found, target: Target) -> Finding:
    if EMBEDDING not in found.shapes:
        if eagle_config.embedding_was_trained(found):
            return eagle_config.lost_embedding(found)
        text = "none in the file: the target's, which speculators 0.9.0 does not always fetch"
        return Finding("embedding", "note", text)
    shape, expected = found.shapes[EMBEDDING], (target.vocab_size, target.hidden_size)
    if shape != expected:
        text = f"{EMBEDDING} has shape {shape}, expected {expected}"
        return Finding("embedding", "fail", text, "take the target's own, or leave it out")
    text = "the head's own" if _has_own_embedding(found, target) else "a copy of the target's"
    return Finding("embedding", "ok", text)


def _has_own_embedding(found: Found, target: Target) -> bool:
    """One that was trained, or differs from the target's."""
    if EMBEDDING not in found.shapes:
        return False
    if eagle_config.embedding_was_trained(found):
        return True
    own = found.read(EMBEDDING)
    theirs = target.readout.embed(torch.arange(len(own), device=target.device))
    return not torch.equal(own, theirs.cpu().to(own.dtype))

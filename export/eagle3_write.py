"""EAGLE-3 heads for SafeAILab, vLLM, SGLang and TensorRT-LLM: writing (layout in eagle3.py).

The engines differ in how they number the layers that are read, in the name of a further layer's
norm, and in whose embedding a head is given.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from spectrain.export import aux_layers, eagle_config, eagle_launch, rope
from spectrain.export.eagle3 import Eagle3Reader
from spectrain.export.layout import Encoded, Launch, Reference, Writer
from spectrain.heads.base import DraftHead

_ARCHITECTURE = "LlamaForCausalLMEagle3"


class _Eagle3Writer(Writer):
    """What the four have in common."""

    reader = Eagle3Reader()
    # What the input norm of a further layer is called.
    norm: ClassVar[str] = "hidden_norm"

    def refusals(self, head: DraftHead, reference: Reference) -> list[str]:
        return []

    def encode(self, head: DraftHead, reference: Reference) -> Encoded:
        layers = head.config.layers
        config = {
            **eagle_config.written(head, _ARCHITECTURE, layers),
            "draft_vocab_size": head.config.draft_vocab_size,
            # No engine reads it: a file that lost the embedding would pass for a head without one.
            **({eagle_config.TRAINED: True} if head.config.embeddings == "own" else {}),
            **self.own_keys(head, reference),
        }
        tensors = {self._name(n, layers): t for n, t in head.state_dict().items()}
        return Encoded(config, tensors)

    def own_keys(self, head: DraftHead, reference: Reference) -> dict[str, Any]:
        """Keys that this engine reads."""
        return aux_layers.as_outputs(head.config.aux_layers, reference.target.num_layers)

    def _name(self, name: str, layers: int) -> str:
        if layers == 1:
            return name
        # TensorRT-LLM knows the first of several layers by its number alone.
        name = name.replace("midlayer.", "layers.0.")
        return re.sub(r"^(layers\.[1-9])\.input_layernorm\.", rf"\1.{self.norm}.", name)

    def _shared_embedding(self, head: DraftHead, engine: str) -> list[str]:
        """The engine lends the target's embedding to a head of the target's width."""
        config = head.config
        if config.embeddings == "target" or config.hidden_size != config.target.hidden_size:
            return []
        return [
            f"{engine} puts the target's embedding in the place of the head's own: train it with "
            "--set head.embeddings=target"
        ]

    def _one_state(self, head: DraftHead, engine: str) -> list[str]:
        """Where fc's input is as wide as its output it is taken for what is behind fc."""
        if head.fc.in_features != head.config.hidden_size:
            return []
        return [
            f"{engine} skips fc where its input is as wide as its output, as with one auxiliary "
            "layer: train it without head.aux_layers, or with three of them"
        ]


class SafeAiEagle3Writer(_Eagle3Writer):
    """SafeAILab's own code: one layer, and the layers that are read are written into it."""

    def refusals(self, head: DraftHead, reference: Reference) -> list[str]:
        config, count = head.config, reference.target.num_layers
        refused = eagle_config.safeai_refusals(head)
        if config.layers > 1:
            refused.append(
                f"SafeAILab's head has one decoder layer, this one {config.layers}: train it with "
                "--set head.layers=1"
            )
        if not aux_layers.is_default(config.aux_layers, count):
            taken = aux_layers.engines_take(count)
            text = (
                f"SafeAILab's code reads the outputs of {list(taken)}, this head those of "
                f"{list(config.aux_layers)}"
            )
            if len(taken) == 3 and taken[0] >= 0:  # not of a shallow target
                text += f": train it with --set head.aux_layers={str(list(taken)).replace(' ', '')}"
            refused.append(text)
        return refused

    def own_keys(self, head: DraftHead, reference: Reference) -> dict[str, Any]:
        return eagle_config.safeai_rope(head.config.rope_parameters)

    def launch(self, head: DraftHead, reference: Reference) -> list[Launch]:
        return [eagle_launch.safeai(head, reference, third=True)]


class VllmEagle3Writer(_Eagle3Writer):
    """Any layers, any number of decoder layers, own embeddings: vLLM has a place for all."""

    facts = (("vllm", _ARCHITECTURE),)
    norm = "input_layernorm"

    def refusals(self, head: DraftHead, reference: Reference) -> list[str]:
        return rope.engine_refusals("vllm", head.config.rope_parameters)

    def own_keys(self, head: DraftHead, reference: Reference) -> dict[str, Any]:
        # Its own default is false, that of the speculators configs that it reads as well is true.
        layers = aux_layers.as_inputs(head.config.aux_layers, reference.target.num_layers)
        return {"norm_before_residual": False, **layers}

    def launch(self, head: DraftHead, reference: Reference) -> list[Launch]:
        return [eagle_launch.vllm(head, reference, "eagle3")]


class SglangEagle3Writer(_Eagle3Writer):
    """It catches a layer's output at the entry of the next one."""

    facts = (("sglang", _ARCHITECTURE),)

    def refusals(self, head: DraftHead, reference: Reference) -> list[str]:
        refused = self._shared_embedding(head, "SGLang") + self._one_state(head, "SGLang")
        refused += rope.engine_refusals("sglang", head.config.rope_parameters)
        target, chosen = reference.target, head.config.aux_layers
        refused += aux_layers.sglang_refusals(chosen, target.num_layers, target.config.model_type)
        if chosen[-1] == target.num_layers - 1:
            refused.append(
                "SGLang cannot read the output of the target's last layer: train it with other "
                "head.aux_layers"
            )
        return refused

    def launch(self, head: DraftHead, reference: Reference) -> list[Launch]:
        return [eagle_launch.sglang(head, reference, "EAGLE3")]


class TrtllmEagle3Writer(_Eagle3Writer):
    """The layers that are read are told to the engine; the file names them for its readers."""

    def refusals(self, head: DraftHead, reference: Reference) -> list[str]:
        refused = self._shared_embedding(head, "TensorRT-LLM")
        refused += self._one_state(head, "TensorRT-LLM")
        return refused + rope.engine_refusals("trtllm", head.config.rope_parameters)

    def launch(self, head: DraftHead, reference: Reference) -> list[Launch]:
        layers = head.config.aux_layers
        default = aux_layers.is_default(layers, reference.target.num_layers)
        return [eagle_launch.trtllm(head, reference, () if default else layers)]

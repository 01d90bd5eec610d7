"""Where a draft model comes from: a checkpoint of its own, a few layers of the target, a config.

N layers of the target, n layers of the draft.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core import attention
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target


def load(name: str, where: str) -> Target:
    """A causal language model of `transformers` in float32 on the CPU, checked like a target.

    where: what messages call the place that named it.
    """
    with _told_at(where):
        try:
            return Target.load(name, dtype="float32", device="cpu", pack_weights=False)
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            # what the library makes of a config of which it could build the model
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            raise SpectrainError(f"the library cannot run it ({reason})") from error


def description(model: nn.Module) -> dict[str, Any]:
    """What `build` needs to make the text model of `model` again: JSON-ready."""
    config = model.config.get_text_config(decoder=True)
    content = json.loads(config.to_json_string(use_diff=False))
    # The outer config of a model of several modes may be the one that says so.
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return content | {"tie_word_embeddings": tied}


def build(content: dict[str, Any]) -> nn.Module:
    """A model with random weights, float32, from a `description`."""
    try:
        config = AutoConfig.for_model(**content)
        return AutoModelForCausalLM.from_config(
            config,
            attn_implementation=attention.NAME,
            dtype=torch.float32,
            trust_remote_code=False,
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SpectrainError(
            f"transformers cannot build the draft model ({reason})",
            where="config.json of the head",
            fix="use a version of transformers that knows the model",
        ) from error


def description_of_layers(target: Any, count: int) -> dict[str, Any]:
    """The `description` of a model of `count` of the target's own layers."""
    total = target.num_layers
    if not 1 <= count <= total:
        raise SpectrainError(
            f"{count} is not between 1 and {total}, the target's layers", where="head.layers"
        )
    chosen = chosen_layers(total, count)
    content = description(target.model)
    for key, value in content.items():
        if isinstance(value, list) and len(value) == total:  # one entry for each layer
            content[key] = [value[layer] for layer in chosen]
    content["num_hidden_layers"] = count
    return content


def layers_of(target: Any, count: int) -> nn.Module:
    """A model of `count` of the target's own layers, with its embedding, norm and output layer."""
    model = build(description_of_layers(target, count))
    decoder = model.get_decoder()
    try:
        for layer, source in zip(
            decoder.layers, chosen_layers(target.num_layers, count), strict=True
        ):
            layer.load_state_dict(target.layer(source).state_dict())
        rest = {
            name: value
            for name, value in target.decoder.state_dict().items()
            if not name.startswith("layers.")
        }
        own = {f"layers.{name}": value for name, value in decoder.layers.state_dict().items()}
        decoder.load_state_dict(rest | own)
    except RuntimeError as error:  # layers that differ in ways their config does not tell by layer
        raise SpectrainError(
            f"the target cannot be cut into a model of {count} layers "
            f"({str(error).splitlines()[-1].strip()})",
            where="head.layers",
            fix="give a draft model of its own as head.model",
        ) from None
    model.get_output_embeddings().load_state_dict(target.model.get_output_embeddings().state_dict())
    return model


def chosen_layers(total: int, count: int) -> list[int]:
    """Layers at even distances from the first to the last; one alone is the first.

    The last layer writes what the output layer reads. After 30 steps on SmolLM2-135M (20 short
    replies, held-out KL to the target, 4 of 30 layers): even 5.3, the first three and the last 5.7,
    the first four 7.6; 2 layers: first and last 6.1, the first two 7.7, the last two 7.1.
    """
    return [place * (total - 1) // max(1, count - 1) for place in range(count)]


@contextmanager
def _told_at(where: str) -> Iterator[None]:
    try:
        yield
    except SpectrainError as error:
        raise type(error)(
            f"not usable as a draft model: {error.what}",
            where=where,
            fix="give a causal language model by folder or name",
        ) from error

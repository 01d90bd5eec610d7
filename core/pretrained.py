"""Models and tokenizers as `transformers` loads them; a LoRA adapter is merged into its base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from spectrain.core import adapter, attention, models
from spectrain.core.errors import SpectrainError
from spectrain.core.fingerprint import fingerprint_of

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def pretrained(
    source: str, name: str, dtype: str | torch.dtype, device: str, options: dict[str, Any]
) -> tuple[nn.Module, Any, str | None]:
    """Model and tokenizer of a folder or hub id; of an adapter, merged, also its fingerprint."""
    if adapter.is_adapter(source):
        return _adapted(Path(source), dtype, device, options)
    accepted_config(source, name, **options)
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, attn_implementation=attention.NAME, **options
    )
    return model.to(device), tokenizer, None


def accepted_config(source: str, name: str, **options: Any) -> Any:
    """The configuration of a folder or hub id; raises SpectrainError for what no draft can do with
    such a target."""
    config = AutoConfig.from_pretrained(source, **options)
    _refuse_unknown_layers(config.get_text_config(decoder=True), name)
    _refuse_moving_rotary(config.get_text_config(decoder=True), name)
    return config


def generation_of(source: str, config: Any) -> GenerationConfig:
    """The generation settings of a folder or hub id, where there are none those in its config."""
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:  # there is no such file
        return GenerationConfig.from_model_config(config)


def _adapted(
    folder: Path, dtype: str | torch.dtype, device: str, options: dict[str, Any]
) -> tuple[nn.Module, Any, str]:
    base, source = _base(folder, options)
    options = {**options, "revision": None}
    model, tokenizer, fingerprint = pretrained(source, base, dtype, device, options)
    fingerprint = adapter.fingerprint(fingerprint or fingerprint_of(model, tokenizer), folder)
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder)
    return adapter.merge(model, folder), tokenizer, fingerprint


def library_model(name: str, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """The model of a target as the library runs it by itself, with its own attention."""
    source = models.resolve(name)
    with models.load_errors(name):
        if adapter.is_adapter(source):
            base, _ = _base(Path(source), {})
            return adapter.merge(library_model(base, dtype, device), Path(source)).eval()
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()


@dataclass(frozen=True)
class TextSide:
    """What is known of a target without its weights; max_length in tokens."""

    tokenizer: Any
    stop_ids: tuple[int, ...]
    max_length: int


def text_side(name: str) -> TextSide:
    """The tokenizer of a target and what ends its replies, as `Target.load` has them."""
    tokenizer, generation, length = _text_parts(name)
    return TextSide(tokenizer, stop_ids_of(generation, tokenizer), length)


def _text_parts(name: str) -> tuple[Any, GenerationConfig, int]:
    source = models.resolve(name)
    with models.load_errors(name):
        if adapter.is_adapter(source):
            tokenizer, generation, length = _text_parts(_base(Path(source), {})[0])
            if (Path(source) / "tokenizer_config.json").is_file():
                tokenizer = AutoTokenizer.from_pretrained(source)
            return tokenizer, generation, length
        config = AutoConfig.from_pretrained(source)
        generation = generation_of(source, config)
        length = int(config.get_text_config(decoder=True).max_position_embeddings)
        return AutoTokenizer.from_pretrained(source), generation, length


def stored_dtype(name: str) -> torch.dtype | None:
    """The type that a target's own config says its weights are of; None where it says none."""
    source = models.resolve(name)
    with models.load_errors(name):
        if adapter.is_adapter(source):
            return stored_dtype(_base(Path(source), {})[0])
        config = AutoConfig.from_pretrained(source)
        return config.dtype or config.get_text_config(decoder=True).dtype


def stop_ids_of(generation: GenerationConfig | None, tokenizer) -> tuple[int, ...]:
    """Every id that ends a reply: the generation config's and the tokenizer's."""
    own = generation.eos_token_id if generation else None
    ids = set(own if isinstance(own, (list, tuple)) else [own]) | {tokenizer.eos_token_id}
    return tuple(sorted(int(i) for i in ids if i is not None))


def _base(folder: Path, options: dict[str, Any]) -> tuple[str, str]:
    """Name of an adapter's base model, and the folder or hub id behind it."""
    name = adapter.base_name(folder)
    try:
        source = models.resolve(name)
        if not adapter.is_adapter(source):
            with models.load_errors(name):
                AutoConfig.from_pretrained(source, **{**options, "revision": None})
    except SpectrainError as error:
        raise adapter.without_base(folder, name, error.what) from error
    return name, source


def _refuse_moving_rotary(config, name: str) -> None:
    """Rotary angles that depend on the length of the text: the rows of a draft that is later
    rejected would change the angles of those before them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in nested or [parameters]:
        kind = entry.get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise SpectrainError(
                f"the target's rotary positions are of type {kind!r}, which depends on the length "
                "of the text: a draft could change what comes before it",
                where=f"target {name}",
                fix="use a target with fixed rotary positions (default, linear, llama3, yarn)",
            )


def _refuse_unknown_layers(config, name: str) -> None:
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS)
    if odd:
        raise SpectrainError(
            f"the target has {', '.join(odd)} layers, whose state a rejected draft would spoil",
            where=f"target {name}",
            fix="use a target with attention layers only",
        )

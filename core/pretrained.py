"""Models and tokenizers as `transformers` loads them; a LoRA adapter is merged into its base.

Everywhere the library is told whether code of a checkpoint may be run: where it is not told, it
asks on the terminal, and runs it for whoever says yes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import find_adapter_config_file

from spectrain.core import adapter, attention, models
from spectrain.core.checkpoint import require_one
from spectrain.core.errors import SpectrainError
from spectrain.core.fingerprint import fingerprint_of

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def pretrained(
    source: str,
    name: str,
    dtype: str | torch.dtype,
    device: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, Any, str | None]:
    """Model and tokenizer of a folder or hub id; of an adapter, merged, also its fingerprint."""
    if adapter.is_adapter(source):
        return _adapted(Path(source), dtype, device, trust_remote_code)
    accepted_config(source, name, revision, trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(
        source, revision=revision, trust_remote_code=trust_remote_code
    )
    with _without_report():
        model, told = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attention.NAME,
            revision=revision,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _require_whole(told, name)
    return model.to(device), tokenizer, None


@contextmanager
def _without_report() -> Iterator[None]:
    """The library's table of tensors that do not fit is told in one line instead."""
    logger = logging.getLogger("transformers.modeling_utils")

    def wanted(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def _require_whole(told: dict[str, Any], name: str) -> None:
    """Raise SpectrainError where a model has weights that are not its checkpoint's: the library
    makes them up. told: its loading info."""
    odd = [f"there is no {one}" for one in sorted(told["missing_keys"])]
    odd += [
        f"{one} has shape {tuple(stored)}, expected {tuple(shape)}"
        for one, stored, shape in sorted(told["mismatched_keys"])
    ]
    if odd:
        more = f"; and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise SpectrainError(
            f"the weights are not those of the model in config.json: {'; '.join(odd[:3])}{more}",
            where=f"target {name}",
            fix="get the checkpoint again",
        )


def accepted_config(
    source: str, name: str, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The configuration of a folder or hub id; raises SpectrainError for what no draft can do with
    such a target."""
    config = AutoConfig.from_pretrained(
        source, revision=revision, trust_remote_code=trust_remote_code
    )
    _refuse_unknown_layers(config.get_text_config(decoder=True), name)
    _refuse_moving_rotary(config.get_text_config(decoder=True), name)
    weights = getattr(config, "transformers_weights", None)
    require_plain(source, name, weights, find_adapter_config_file(source, revision=revision))
    return config


def require_plain(source: str, name: str, weights: Any, adapter_file: Any) -> None:
    """Raise SpectrainError where the library would compute with other weights than those that the
    names of the files tell of.

    weights: what its config says under `transformers_weights`
    adapter_file: an adapter's configuration beside the model's own, where there is one
    """
    if adapter_file:
        raise SpectrainError(
            f"a LoRA adapter lies beside the model ({adapter.CONFIG}): the library adds it, others "
            "do not; peft's merge_and_unload makes one model of them",
            where=name,
            fix="save that, or move the adapter elsewhere",
        )
    if weights is not None:
        raise SpectrainError(
            f"transformers_weights in config.json names the weights ({weights!r}): engines read "
            "other files",
            where=name,
            fix="give the file its usual name and remove the key",
        )
    if Path(source).is_dir():
        require_one(Path(source))


def generation_of(source: str, config: Any) -> GenerationConfig:
    """The generation settings of a folder or hub id, where there are none those in its config."""
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:  # there is no such file
        return GenerationConfig.from_model_config(config)


def _adapted(
    folder: Path, dtype: str | torch.dtype, device: str, trust_remote_code: bool
) -> tuple[nn.Module, Any, str]:
    base, source = _base(folder, trust_remote_code)
    model, tokenizer, fingerprint = pretrained(
        source, base, dtype, device, trust_remote_code=trust_remote_code
    )
    fingerprint = adapter.fingerprint(fingerprint or fingerprint_of(model, tokenizer), folder)
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return adapter.merge(model, folder), tokenizer, fingerprint


def library_model(name: str, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """The model of a target as the library runs it by itself, with its own attention."""
    source = models.resolve(name)
    with models.load_errors(name):
        if adapter.is_adapter(source):
            base, _ = _base(Path(source))
            return adapter.merge(library_model(base, dtype, device), Path(source)).eval()
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=False)
        return model.to(device).eval()


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
            tokenizer, generation, length = _text_parts(_base(Path(source))[0])
            if (Path(source) / "tokenizer_config.json").is_file():
                tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            return tokenizer, generation, length
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        generation = generation_of(source, config)
        length = int(config.get_text_config(decoder=True).max_position_embeddings)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        return tokenizer, generation, length


def stored_dtype(name: str) -> torch.dtype | None:
    """The type that a target's own config says its weights are of; None where it says none."""
    source = models.resolve(name)
    with models.load_errors(name):
        if adapter.is_adapter(source):
            return stored_dtype(_base(Path(source))[0])
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        return config.dtype or config.get_text_config(decoder=True).dtype


def stop_ids_of(generation: GenerationConfig | None, tokenizer) -> tuple[int, ...]:
    """Every id that ends a reply: the generation config's and the tokenizer's."""
    own = generation.eos_token_id if generation else None
    ids = set(own if isinstance(own, (list, tuple)) else [own]) | {tokenizer.eos_token_id}
    return tuple(sorted(int(i) for i in ids if i is not None))


def _base(folder: Path, trust_remote_code: bool = False) -> tuple[str, str]:
    """Name of an adapter's base model, and the folder or hub id behind it."""
    name = adapter.base_name(folder)
    try:
        source = models.resolve(name)
        if not adapter.is_adapter(source):
            with models.load_errors(name):
                AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
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

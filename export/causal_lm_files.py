"""A causal language model's folder held against what `transformers` would load from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from spectrain.core import adapter, models
from spectrain.core.checkpoint import read_by_the_library
from spectrain.core.errors import SpectrainError
from spectrain.core.pretrained import require_plain
from spectrain.core.target import Target
from spectrain.core.tensor_files import FLOATING
from spectrain.export.found import Found
from spectrain.export.layout import Finding, compare_names
from spectrain.heads.tokenizers import first_difference

# Tables that older files hold and the library computes.
_COMPUTED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# Of the place and type it was trained in: the weights have theirs, whatever they are written in.
_OWN_KEYS = ("_name_or_path", "dtype", "torch_dtype", "auto_map")


def content(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _OWN_KEYS}


def in_file(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a causal LM under the names that the library saves them by."""
    state = revert_weight_conversion(model, model.state_dict())
    output, table = model.get_output_embeddings(), model.get_input_embeddings()
    if output.weight is table.weight:
        state.pop(_name_of(model, output), None)
    return dict(state)


def _name_of(model: nn.Module, layer: nn.Module) -> str:
    """What the weight of a layer of the model is called."""
    return next(name for name, module in model.named_modules() if module is layer) + ".weight"


def require_what_is_loaded(found: Found) -> None:
    """Raise SpectrainError where the library would load other weights than those found."""
    folder, name = folder_of(found), str(found.path)
    beside = folder / adapter.CONFIG
    require_plain(str(folder), name, found.config.get("transformers_weights"), beside.is_file())
    mine, theirs = {path.name for path in found.files}, read_by_the_library(folder)
    if mine != theirs:
        here, there = (", ".join(sorted(files)) or "no file" for files in (mine, theirs))
        raise SpectrainError(
            f"the weights are in {here}, transformers would read {there}",
            where=name,
            fix="give the draft a folder of its own, its weights under their usual name",
        )


def names(found: Found, model: nn.Module) -> Iterator[Finding]:
    if "text_config" in found.config:
        text = "a model of several modes: its names are left to the library"
        yield Finding("tensors", "note", text)
        return
    expected = {name: tuple(value.shape) for name, value in in_file(model).items()}
    prefix = f"{model.base_model_prefix}."
    bare = not any(name.startswith(prefix) for name in found.shapes)
    if bare:  # saved without its output layer
        expected = {name.removeprefix(prefix): shape for name, shape in expected.items()}
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    twice = _name_of(model, output) if output.weight is table.weight else None
    if twice in found.shapes:
        expected[twice] = tuple(output.weight.shape)
    ignored = {name for name in found.shapes if name.endswith(_COMPUTED)}
    yield from compare_names(found, expected, ignored)
    named = _name_of(model, table)
    yield from _tied(found, named.removeprefix(prefix) if bare else named, twice)


def _tied(found: Found, table: str, output: str | None) -> Iterator[Finding]:
    """Where the output layer is said to be the embedding: whether the file says so, too."""
    both = {table, output}
    known = both <= found.shapes.keys() and len({found.shapes[name] for name in both}) == 1
    if not known or any(found.dtypes[name] not in FLOATING for name in both):
        return
    if not torch.equal(*(found.read(name).float() for name in (table, output))):
        text = (
            f"config.json says that {output} is {table}, they differ: transformers uses both, "
            "engines the embedding"
        )
        fix = f"set tie_word_embeddings to false in config.json, or remove {output}"
        yield Finding("tied", "fail", text, fix)


def tokens(found: Found, target: Target) -> Finding:
    folder = folder_of(found)
    if not (folder / "tokenizer_config.json").is_file():
        fix = "copy the tokenizer's files into the folder"
        return Finding("tokenizer", "fail", "the folder has no tokenizer", fix)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        difference = first_difference(tokenizer, target.tokenizer)
    except Exception as error:  # whatever the library makes of the files
        text = f"the tokenizer cannot be loaded ({models.reason(error)})"
        return Finding(
            "tokenizer", "fail", text, "copy the target's tokenizer files into the folder"
        )
    if difference is not None:
        text = f"the tokenizer is not the target's: {difference}"
        return Finding("tokenizer", "fail", text, "use a draft with the target's tokenizer")
    return Finding("tokenizer", "ok", "the target's ids")


def folder_of(found: Found) -> Path:
    return found.path if found.path.is_dir() else found.path.parent

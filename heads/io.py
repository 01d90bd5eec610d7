"""Save and load heads: safetensors and a config.json beside it, strictly.

folder/config.json, folder/model.safetensors (parameters and the draft-vocabulary map).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from spectrain.core.embedded import EMBEDDED
from spectrain.core.errors import SpectrainError
from spectrain.core.files import atomic_folder, give_normal_mode, read_json, write_json
from spectrain.heads.base import DraftHead
from spectrain.heads.registry import family

WEIGHTS = "model.safetensors"


def save_head(head: DraftHead, folder: Path, extra: dict[str, Any] | None = None) -> None:
    """Write the head into `folder` as one atomic step; `extra`: more JSON files, name → content."""
    with atomic_folder(folder) as temporary:
        write_head(head, temporary)
        for name, content in (extra or {}).items():
            write_json(temporary / name, content)


def write_head(
    head: DraftHead, folder: Path, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write config and weights into an existing folder (callers make it atomic); weights: what the
    head's state is where it has only pieces of it."""
    write_json(folder / "config.json", head.config.model_dump(mode="json"))
    tensors = (weights or head.state_dict()).items()
    write_tensors({n: v.detach().cpu().contiguous() for n, v in tensors}, folder / WEIGHTS)


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file that others may read if they may read the files beside it."""
    save_file(tensors, path, metadata={"format": "pt"})
    give_normal_mode(path)


def find_head(folder: Path) -> Path:
    """The folder of the head: `folder` itself, or its `head` when it is that of a training run."""
    inner = Path(folder) / "head"
    if not (Path(folder) / "config.json").is_file() and (inner / "config.json").is_file():
        return inner
    return Path(folder)


def load_head(folder: Path, *, device: torch.device | str = "cpu") -> DraftHead:
    """Load a head. A missing, extra or misshapen tensor is an error that names it.

    A causal language model of `transformers` is a head as it is: its folder, or the name of one
    that is no folder here. The result still has to be bound to its target: `head.check_target`,
    `head.bind`.
    """
    folder = find_head(folder)
    path = folder / "config.json"
    if not path.is_file():
        if _names_a_model(folder):
            try:
                return _language_model(str(folder)).to(device)
            except SpectrainError as error:
                raise SpectrainError(
                    f"neither the folder of a head nor a model that can be had: {error.what}",
                    where=str(folder),
                    fix="give --head the folder of a trained head or of a causal language model",
                ) from error
        raise SpectrainError(
            "no head here (config.json is missing)",
            where=str(folder),
            fix="give --head the folder of a trained head or of a causal language model",
        )
    content = read_json(path)
    if "family" not in content and "model_type" in content:
        return _language_model(str(folder)).to(device)
    kind = family(str(content.get("family")))
    try:
        config = kind.Config.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise SpectrainError(f"{key}: {first['msg']}", where=str(path)) from None
    head = kind(config)
    load_weights(head, folder / WEIGHTS)
    return head.to(device).eval()


def _names_a_model(name: Path) -> bool:
    """Whether it can be the name of a model that is kept elsewhere: embedded, or OWNER/NAME."""
    text = str(name)
    looks_like_one = text.count("/") == 1 and not text.startswith((".", "/", "~"))
    return not name.exists() and (text in EMBEDDED or looks_like_one)


def _language_model(name: str) -> DraftHead:
    return family("draft").load(name, where=name)


def load_weights(head: DraftHead, path: Path) -> None:
    """Fill `head` from a safetensors file; every name and shape has to agree."""
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise SpectrainError("the weights are missing", where=str(path)) from None
    except SafetensorError as error:
        raise SpectrainError(f"not a whole safetensors file ({error})", where=str(path)) from None
    expected = head.state_dict()
    problems = [f"missing {name}" for name in expected.keys() - tensors.keys()]
    problems += [f"unknown {name}" for name in tensors.keys() - expected.keys()]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, expected {tuple(expected[name].shape)}"
        for name in expected.keys() & tensors.keys()
        if tensors[name].shape != expected[name].shape
    ]
    if problems:
        raise SpectrainError("; ".join(sorted(problems)), where=str(path))
    head.load_state_dict(tensors, strict=True)
    head.check_vocabulary(str(path))

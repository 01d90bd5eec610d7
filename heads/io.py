"""Save and load heads: safetensors and a config.json beside it, strictly.

folder/config.json, folder/model.safetensors (parameters and the draft-vocabulary map). What config
and header claim is compared before memory is taken for either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from spectrain.core.embedded import EMBEDDED
from spectrain.core.errors import SpectrainError
from spectrain.core.files import (
    atomic_folder,
    give_normal_mode,
    read_json,
    sha256_file,
    write_json,
)
from spectrain.core.tensor_files import FLOATING, header
from spectrain.heads.base import DraftHead, HeadConfig
from spectrain.heads.registry import family

WEIGHTS = "model.safetensors"
LONGEST_CONFIG = 10_000_000  # bytes
# Keys of a config that count parts of a model, anywhere in it, and what none of them can be: only
# building the parts would show how many there are.
_COUNTS = ("steps", "layers", "num_hidden_layers", "num_layers", "n_layer", "n_layers")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MOST = 4096


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


def weights_digest(folder: Path) -> str | None:
    """What names the weights of a head in `folder` (`find_head`); None where there is no such file,
    as of a model that is kept elsewhere."""
    path = find_head(folder) / WEIGHTS
    return sha256_file(path) if path.is_file() else None


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
                    fix="give the folder of a trained head or of a causal language model",
                ) from error
        if (folder / "checkpoints").is_dir():
            raise SpectrainError(
                "this training is not finished: there are checkpoints and no head",
                where=str(folder),
                fix="run the same train command again",
            )
        raise SpectrainError(
            "no head here (config.json is missing)",
            where=str(folder),
            fix="give the folder of a trained head or of a causal language model",
        )
    content = read_json(path, LONGEST_CONFIG)
    if not isinstance(content, dict):
        raise SpectrainError("not a JSON object", where=str(path))
    if "family" not in content and "model_type" in content:
        return _language_model(str(folder)).to(device)
    kind = family(str(content.get("family")))
    try:
        config = kind.Config.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise SpectrainError(f"{key}: {first['msg']}", where=str(path)) from None
    _require_tensors(folder / WEIGHTS, expected(kind, config, str(path)))
    head = kind(config)
    load_weights(head, folder / WEIGHTS)
    return head.to(device).eval()


def expected(kind: type[DraftHead], config: HeadConfig, where: str) -> dict[str, torch.Tensor]:
    """The tensors of such a head by name, on the meta device: shapes and types without values.

    Raises SpectrainError for a config of which no head can be made.
    """
    _require_countable(config.model_dump(), where)
    try:
        with torch.device("meta"):
            return kind(config).state_dict()
    except SpectrainError:
        raise
    except Exception as error:  # whatever torch and transformers say of sizes that are none
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        raise SpectrainError(
            f"no head can be made of this config ({reason})", where=where
        ) from None


def _require_countable(content: Any, where: str) -> None:
    for key, value in content.items() if isinstance(content, dict) else ():
        if key in _COUNTS + _EXPERTS and isinstance(value, int) and value > _MOST:
            raise SpectrainError(f"{key}: {value} is more than {_MOST}", where=where)
        _require_countable(value, where)


def _names_a_model(name: Path) -> bool:
    """Whether it can be the name of a model that is kept elsewhere: embedded, or OWNER/NAME."""
    text = str(name)
    looks_like_one = text.count("/") == 1 and not text.startswith((".", "/", "~"))
    return not name.exists() and (text in EMBEDDED or looks_like_one)


def _language_model(name: str) -> DraftHead:
    return family("draft").load(name, where=name)


def load_weights(head: DraftHead, path: Path) -> None:
    """Fill `head` from a safetensors file; every name, shape and kind of number has to agree."""
    _require_tensors(path, head.state_dict())
    head.load_state_dict(load_file(path), strict=True)
    head.check_vocabulary(str(path))
    require_finite(head, str(path))


def require_finite(
    head: DraftHead, where: str, called: Callable[[str], str] = lambda name: name
) -> None:
    """Raise SpectrainError for a weight that is NaN or infinite: every guess would be worth
    nothing, and nothing else would say so. called: names of the head → of the file it came from."""
    named = head.named_parameters()
    bad = [called(name) for name, value in named if not torch.isfinite(value).all()]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise SpectrainError(
            f"NaN or infinite numbers in {', '.join(bad[:3])}{more}",
            where=where,
            fix="take an earlier checkpoint, or train again",
        )


def _require_tensors(path: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise SpectrainError unless the file holds these tensors and no others."""
    if not path.is_file():
        raise SpectrainError("the weights are missing", where=str(path))
    found = header(path)
    problems = [f"missing {name}" for name in wanted.keys() - found.keys()]
    problems += [f"unknown {name}" for name in found.keys() - wanted.keys()]
    for name in wanted.keys() & found.keys():
        value, shape = found[name], tuple(wanted[name].shape)
        if value.shape != shape:
            problems.append(f"{name} has shape {value.shape}, expected {shape}")
        if value.dtype not in types_for(wanted[name].dtype):
            problems.append(f"{name} is stored as {value.dtype}, which is not its kind of number")
    if problems:
        more = f" and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise SpectrainError("; ".join(sorted(problems)[:20]) + more, where=str(path))


def types_for(dtype: torch.dtype) -> tuple[str, ...]:
    """Types, as safetensors spells them, that may be stored for a tensor of `dtype`: a number that
    stands for a token is none that is multiplied with."""
    if dtype.is_floating_point:
        return FLOATING
    return ("BOOL",) if dtype is torch.bool else ("I64", "I32")

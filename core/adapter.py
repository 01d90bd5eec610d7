"""LoRA adapters in peft's layout: what a target was tuned by, kept apart from its base model.

    folder/adapter_config.json          rank, scale, layers, and the name of the base model
    folder/adapter_model.safetensors    the matrices
    folder/tokenizer…                   optional; without it the base's is used

Only safetensors are read. A target is used with its adapter merged into the base.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectrain.core.errors import SpectrainError
from spectrain.core.files import give_normal_mode, read_json, write_json

if TYPE_CHECKING:
    from torch import Tensor, nn

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# What, beside the matrices, decides about the merged weights.
_SCALES = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
           "fan_in_fan_out")  # fmt: skip


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    folder = Path(folder)
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_name(folder: Path) -> str:
    """The name of the base model in an adapter's configuration.

    Raises SpectrainError for an adapter that names none or that is of a kind not read here.
    """
    content = read_json(folder / CONFIG)
    if content.get("peft_type") != "LORA":
        raise SpectrainError(
            f"an adapter of type {content.get('peft_type')!r}, only LORA is read",
            where=str(folder / CONFIG),
            fix="merge it into its base model and give the folder of the result",
        )
    name = content.get("base_model_name_or_path")
    if not name:
        raise without_base(folder, name, "it is not named")
    return str(name)


def without_base(folder: Path, name: str | None, reason: str) -> SpectrainError:
    """The one line about an adapter whose base model cannot be had."""
    return SpectrainError(
        f"a LoRA adapter without its base model: base_model_name_or_path {name!r} not found "
        f"({reason})",
        where=str(folder),
        fix=f"give the base's folder, hub id or embedded name in {CONFIG}",
    )


def add(model: nn.Module, decoder: nn.Module, rank: int, alpha: float, targets: list[str] | None):
    """Put trainable LoRA matrices beside linear layers of the decoder; all else is frozen.

    targets: last parts of the layers' names, None for all linear layers. Returns peft's wrapper;
    `model` itself computes with the matrices from now on.
    """
    from peft import LoraConfig, get_peft_model
    from torch import nn

    linear = {name.rpartition(".")[2] for name, layer in decoder.named_modules()
              if isinstance(layer, nn.Linear)}  # fmt: skip
    unknown = sorted(set(targets or ()) - linear)
    if unknown or not linear:
        raise SpectrainError(
            f"the target's decoder has no linear layers named {', '.join(unknown) or 'anything'}",
            where="trunk.targets",
            fix=f"choose from {', '.join(sorted(linear))}" if linear else "use trunk.mode=full",
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(targets or linear),
        task_type="CAUSAL_LM",
    )
    with _quiet():
        return get_peft_model(model, config)


def save(adapted: Any, folder: Path, base: str) -> None:
    """Write what `add` returned into an existing folder; `base`: name of the base model."""
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import save_file

    config = adapted.peft_config["default"].to_dict()
    config |= {"base_model_name_or_path": base, "inference_mode": True}
    config["target_modules"] = sorted(config["target_modules"])
    write_json(folder / CONFIG, config)
    tensors = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    give_normal_mode(folder / WEIGHTS)


def merge(model: nn.Module, folder: Path) -> nn.Module:
    """The base model with the adapter of `folder` added into its weights."""
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict

    tensors = _tensors(folder)
    with _quiet():  # what its warnings are about is refused below
        adapted = PeftModel.from_pretrained(model, str(folder))
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    if odd := sorted(expected ^ tensors.keys()):
        raise SpectrainError(
            f"the adapter does not fit its base model: {odd[0]} and {len(odd) - 1} more are on one "
            "side only",
            where=str(folder / WEIGHTS),
        )
    return adapted.merge_and_unload()


def fingerprint(base: str, folder: Path) -> str:
    """16 hex digits from the base's fingerprint and the adapter's own numbers.

    Not from the merged weights: their rounding depends on type and device.
    """
    content = read_json(folder / CONFIG)
    digest = hashlib.sha256(base.encode())
    digest.update(json.dumps({key: content.get(key) for key in _SCALES}, sort_keys=True).encode())
    for name, value in sorted(_tensors(folder).items()):
        digest.update(name.encode())
        digest.update(value.float().numpy().tobytes())
    return digest.hexdigest()[:16]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise SpectrainError(
            f"the adapter's weights are missing ({WEIGHTS})",
            where=str(folder),
            fix="save the adapter as safetensors",
        ) from None
    except SafetensorError as error:
        raise SpectrainError(
            f"not a whole safetensors file ({error})", where=str(folder / WEIGHTS)
        ) from None

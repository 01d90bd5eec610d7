"""Tensors of a file that torch.save wrote, without running a line of what is in it.

Such a file is a zip archive of a pickle, `data.pkl`, and the tensors' bytes. A pickle names the
functions that make its values: one that names any but those of plain tensors is refused by that
name before it is opened, and torch's own `weights_only` keeps the same promise once more. The bytes
are mapped, not loaded; a tensor that claims more of them than there are is refused.
"""

from __future__ import annotations

import pickletools
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.core.files import disk_errors
from spectrain.core.tensor_files import LONGEST_HEADER, TYPES, require_name, require_shape

WRAPPERS = ("state_dict", "model")  # keys under which trainers keep the weights
_FIX = "convert it to safetensors where it comes from"
_KINDS = ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
_HARMLESS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in _KINDS),
}
_NAMES = {dtype: name for name, dtype in TYPES.items()}


def load_pickled(path: Path) -> dict[str, Tensor]:
    """name → tensor, mapped to the file. Raises SpectrainError for anything but plain tensors, in a
    dictionary or in one within it (WRAPPERS)."""
    try:
        with disk_errors(path), zipfile.ZipFile(path) as archive:
            _require_plain(archive, path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they are about is an error here
            content = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        return _tensors(content)
    except FileNotFoundError:
        raise SpectrainError("no such file", where=str(path), fix="check the path") from None
    except SpectrainError:
        raise
    except zipfile.BadZipFile:
        raise SpectrainError(
            "not a whole file of torch.save (of torch 1.6 or later)", where=str(path), fix=_FIX
        ) from None
    except Exception as error:  # whatever a pickle that is damaged on purpose makes of torch
        reason = " ".join(str(error).split())[:160]
        raise SpectrainError(
            f"no tensors can be read from it ({type(error).__name__}: {reason})",
            where=str(path),
            fix=_FIX,
        ) from None


def type_of(value: Tensor) -> str:
    """As safetensors spells it; of a type that is not read, torch's own name."""
    return _NAMES.get(value.dtype) or str(value.dtype).removeprefix("torch.").upper()


def _require_plain(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse an archive that is packed (it might unpack to anything), or one whose pickle is not of
    tensors alone."""
    members = archive.infolist()
    pickles = [one for one in members if one.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or len({one.filename for one in members}) < len(members):
        raise SpectrainError("an archive that is not of torch.save", where=str(path), fix=_FIX)
    packed = [one for one in members if one.compress_type != zipfile.ZIP_STORED]
    if packed or pickles[0].file_size > LONGEST_HEADER:
        raise SpectrainError("a packed archive, not of torch.save", where=str(path), fix=_FIX)
    strange = next((name for name in _named(archive.read(pickles[0])) if name not in _HARMLESS), "")
    if strange:
        raise SpectrainError(
            f"a pickle that asks for {strange.replace(' ', '.')[:80]!r}, which is no part of a "
            "tensor; nothing of it was run",
            where=str(path),
            fix="do not load it elsewhere either unless you trust it; ask for safetensors",
        )


def _named(pickle: bytes) -> Iterator[str]:
    """What the pickle asks for by name, "module name"."""
    for opcode, argument, _ in pickletools.genops(pickle):
        if opcode.name in ("GLOBAL", "INST"):
            yield str(argument)
        elif opcode.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            yield opcode.name  # torch.save never writes these


def _tensors(content: Any) -> dict[str, Tensor]:
    if isinstance(content, dict) and not any(isinstance(v, Tensor) for v in content.values()):
        inner = [content[name] for name in WRAPPERS if isinstance(content.get(name), dict)]
        content = inner[0] if len(inner) == 1 else content
    if not isinstance(content, dict) or not content:
        raise ValueError("it is no dictionary of tensors")
    for name, value in content.items():
        require_name(name)
        plain = isinstance(value, Tensor) and value.layout is torch.strided
        if not plain or value.is_quantized or value.device.type != "cpu":
            raise ValueError(f"{name} is no plain tensor")
        require_shape(name, tuple(value.shape))
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"{name} claims to be larger than the file")
    return {name: value.detach() for name, value in content.items()}

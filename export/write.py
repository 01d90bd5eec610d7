"""Write a checkpoint into a folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

import torch

from spectrain.core.files import atomic_write, require_free, write_json
from spectrain.export.layout import CONFIG, Encoded
from spectrain.heads.io import write_tensors


def write(
    encoded: Encoded,
    folder: Path,
    dtype: torch.dtype | None = None,
    files: Literal["copy", "link"] = "copy",
) -> None:
    """Into an existing folder (callers make it atomic).

    dtype: of all floating tensors, None as they are. files: whether what lies beside is copied, or
    linked to (a symbolic link: the export then needs the target's folder to stay).
    Raises RunFailed when the disk has no room for it.
    """
    tensors = {
        name: value.detach().cpu().to(dtype if value.is_floating_point() else None).contiguous()
        for name, value in encoded.tensors.items()
    }
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    paths = {name: one for name, one in encoded.beside.items() if isinstance(one, Path)}
    if files == "copy":
        size += sum(path.stat().st_size for path in paths.values())
    require_free(folder, size)
    config = dict(encoded.config)
    if dtype is not None and encoded.own_config and "torch_dtype" in config:
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / CONFIG, config)
    if tensors:
        write_tensors(tensors, folder / encoded.weights)
    for name, content in encoded.beside.items():
        if isinstance(content, Path):
            source = content.resolve()
            if files == "copy":
                shutil.copyfile(source, folder / name)
            else:
                os.symlink(source, folder / name)
        elif isinstance(content, str):
            atomic_write(folder / name, content)
        else:
            write_json(folder / name, dict(content))

"""The files of a feature store: a folder with a manifest, shards, and a checksum for every file.

manifest.json              settings, their fingerprint, counts, shards with checksums
shard-00000.safetensors    tensors, see data/shard.py
shard-00000.json           facts: one record per row, and checksums of the tensors and of itself
replies/                   answers of the target, kept so that a rerun need not ask again
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json, sha256_file

FORMAT = 1
MANIFEST = "manifest.json"
KEYS = {"format", "complete", "settings", "about", "counts", "shards"}
REBUILD = "prepare it again with --overwrite"
MEND = "run the same `spectrain prepare` again, it makes the damaged part anew"


def shard_name(number: int) -> str:
    """Stem of the files of a shard."""
    return f"shard-{number:05d}"


def fingerprint_of(settings: dict) -> str:
    """16 hex digits that change with any setting that shaped the store."""
    canonical = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def read_manifest(path: Path) -> dict | None:
    """The manifest of a folder, None where there is none; SpectrainError when it cannot be used."""
    file = path / MANIFEST
    if not file.is_file():
        return None
    manifest = read_json(file)
    if not isinstance(manifest, dict) or KEYS - set(manifest):
        raise SpectrainError("not the manifest of a feature store", where=str(file), fix=REBUILD)
    if manifest["format"] != FORMAT:
        raise SpectrainError(
            f"store format {manifest['format']}, this version reads format {FORMAT}",
            where=str(file),
            fix=REBUILD,
        )
    return manifest


def read_facts(path: Path, shard: dict) -> list[dict]:
    """The records of the rows of a shard, in their order; SpectrainError when they are damaged."""
    file = path / shard["facts"]
    require_intact(file, shard["facts_sha256"], None)
    return read_json(file)["rows"]


def read_tensors(path: Path, shard: dict) -> dict[str, Tensor]:
    """The mapped tensors of a shard; SpectrainError when they are damaged."""
    file = path / shard["file"]
    require_intact(file, shard["sha256"], shard["bytes"])
    return map_tensors(file)


def map_tensors(file: Path) -> dict[str, Tensor]:
    """Mapped, not read; SpectrainError when it is no file of tensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise SpectrainError(f"cannot be read ({error})", where=str(file), fix=MEND) from error


def require_intact(file: Path, sha256: str, size: int | None) -> None:
    """Raise SpectrainError unless the file is there, of `size` bytes if known, and undamaged."""
    if not file.is_file():
        raise SpectrainError("missing from the store", where=str(file), fix=MEND)
    if size is not None and file.stat().st_size != size:
        raise SpectrainError(
            f"truncated: {file.stat().st_size} bytes of {size}", where=str(file), fix=MEND
        )
    if sha256_file(file) != sha256:
        raise SpectrainError(
            "damaged: its checksum is not the one in the manifest", where=str(file), fix=MEND
        )

"""Stores with planted faults whose checksums are right: only what is inside tells of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
from torch import Tensor

from spectrain.data.manifest import shard_name


def seal(
    store: Path, number: int, change: Callable[[dict[str, Tensor], list[dict]], object]
) -> None:
    """Apply `change` (tensors, facts of the rows) to a shard, as if it had been written so."""
    tensors_file = store / f"{shard_name(number)}.safetensors"
    facts_file = tensors_file.with_suffix(".json")
    tensors = safetensors.torch.load(tensors_file.read_bytes())
    facts = json.loads(facts_file.read_text())
    change(tensors, facts["rows"])
    data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
    tensors_file.write_bytes(data)
    facts |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    facts_file.write_text(json.dumps(facts))

    def agree(manifest: dict) -> None:
        record = manifest["shards"][number]
        record |= {key: facts[key] for key in ("sha256", "bytes")}
        record |= {"facts_sha256": hashlib.sha256(facts_file.read_bytes()).hexdigest()}
        record["rows"] = len(facts["rows"])

    edit(store, agree)


def edit(store: Path, change: Callable[[dict], object]) -> None:
    """Apply `change` to the manifest."""
    file = store / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))

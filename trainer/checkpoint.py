"""Checkpoints: whole folders, checked by checksum, safetensors and JSON only.

    run/checkpoints/step-00000123/
        config.json, model.safetensors   the head, loadable as any other head
        optimizer.safetensors            the optimisers' memory
        state.json                       counters, the run's settings, checksums of the above

There is no random state in it: order and noise are functions of seed and step.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from spectrain.core.errors import SpectrainError
from spectrain.core.files import (
    atomic_folder,
    read_json,
    require_free,
    sha256_file,
    write_json,
)
from spectrain.heads.base import DraftHead
from spectrain.heads.io import WEIGHTS, load_weights, write_head, write_tensors
from spectrain.trainer import optim
from spectrain.trainer.sharding import gathered

FOLDER = "checkpoints"
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"


def save(
    run: Path,
    head: DraftHead,
    parts: dict[str, optim.Part],
    state: Mapping[str, Any],
    keep: int,
    main: bool = True,
) -> Path:
    """Write the checkpoint of state["step"] as one atomic step, then drop all but `keep`.

    main: whether this process writes; the others give their pieces.
    Raises RunFailed on a full disk; the checkpoints before it stay as they are.
    """
    folder = run / FOLDER / f"step-{state['step']:08d}"
    weights = gathered(head.state_dict(), main)
    memory = gathered(optim.flatten(parts), main)
    if not main:
        return folder
    require_free(run, size(head))
    with atomic_folder(folder) as temporary:
        write_head(head, temporary, weights)
        write_tensors(memory, temporary / OPTIMIZER)
        sums = {name: sha256_file(temporary / name) for name in ("config.json", WEIGHTS, OPTIMIZER)}
        write_json(temporary / STATE, {**state, "sha256": sums})
    for old in _folders(run)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def size(head: DraftHead) -> int:
    """Bytes of a checkpoint, estimated generously: weights and at most two moments for each."""
    tensors = head.state_dict().values()
    return 1_000_000 + 3 * sum(value.numel() * value.element_size() for value in tensors)


def newest(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """Folder and state of the newest whole checkpoint; damaged ones are named and passed over."""
    for folder in _folders(run):
        problem, state = _examine(folder)
        if problem is None:
            return folder, state
        print(f"checkpoint {folder} is damaged ({problem}); using the one before", file=sys.stderr)
    return None


def restore(folder: Path, head: DraftHead, parts: dict[str, optim.Part]) -> None:
    """Fill head and optimisers from a folder that `newest` found."""
    load_weights(head, folder / WEIGHTS)
    optim.restore(parts, load_file(folder / OPTIMIZER))


def clean(run: Path) -> None:
    """Remove what a process that was killed while saving left behind."""
    for left in (run / FOLDER).glob(".*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def require_same(old: Mapping[str, Any], new: Mapping[str, Any], where: str, extend: bool) -> None:
    """Refuse to continue a run with other settings, naming the first that differs.

    extend: `steps` may be larger than before (the schedule then follows the new number).
    """
    before, now = _flat(old), _flat(new)
    for key in [*now, *(key for key in before if key not in now)]:
        if before.get(key) == now.get(key):
            continue
        if key == "steps" and extend and now["steps"] > before["steps"]:
            continue
        hint = "use the old value, choose another --out, or --overwrite to start anew"
        if key == "steps":
            hint = "add --set extend=true to go on to a larger number, " + hint
        raise SpectrainError(
            f"the run was started with {key} = {before.get(key)!r}, now it is {now.get(key)!r}",
            where=where,
            fix=hint,
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys, values as JSON gives them back."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = json.loads(json.dumps(value))
    return result


def _folders(run: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    return sorted((run / FOLDER).glob("step-*"), reverse=True)


def _examine(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """What is wrong with a checkpoint (None: nothing), and its state."""
    try:
        state = read_json(folder / STATE)
        for name, expected in state["sha256"].items():
            if not (folder / name).is_file():
                return f"{name} is missing", {}
            if sha256_file(folder / name) != expected:
                return f"{name} does not have its checksum", {}
    except (SpectrainError, FileNotFoundError, KeyError, TypeError, AttributeError):
        return f"{STATE} is missing or not whole", {}
    return None, state

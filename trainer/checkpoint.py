"""Checkpoints: whole folders, checked by checksum, safetensors and JSON only.

    run/checkpoints/step-00000123/
        config.json, model.safetensors   the head, loadable as any other head
        optimizer.safetensors            the optimisers' memory
        ema.safetensors                  the running mean of the weights, where there is one
        state.json                       counters, the run's settings, checksums of all files

There is no random state in it: order and noise are functions of seed and step.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from spectrain.core.errors import SpectrainError
from spectrain.core.files import (
    atomic_folder,
    leftovers,
    read_json,
    require_free,
    sha256_file,
    write_json,
)
from spectrain.core.progress import main_process
from spectrain.heads.base import DraftHead
from spectrain.heads.io import WEIGHTS, load_weights, write_head, write_tensors
from spectrain.trainer.ema import Ema
from spectrain.trainer.sharding import gathered
from spectrain.trainer.update import Update

FOLDER = "checkpoints"
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
EMA = "ema.safetensors"


def save(
    run: Path,
    head: DraftHead,
    update: Update,
    ema: Ema,
    state: Mapping[str, Any],
    keep: int,
    main: bool = True,
) -> Path:
    """Write the checkpoint of state["step"] as one atomic step, then drop all but `keep`.

    main: whether this process writes; the others give their pieces.
    Raises RunFailed on a full disk; the checkpoints before it stay as they are.
    """
    folder = run / FOLDER / _name(state["step"])
    weights = gathered(head.state_dict(), main)
    memory = update.memory(main)
    means = gathered(ema.means, main)
    if not main:
        return folder
    require_free(run, size(head, ema))
    with atomic_folder(folder) as temporary:
        write_head(head, temporary, weights)
        write_tensors(memory, temporary / OPTIMIZER)
        if means:
            write_tensors(means, temporary / EMA)
        sums = {file.name: sha256_file(file) for file in sorted(temporary.iterdir())}
        content = {**state, "sha256": sums}
        write_json(temporary / STATE, {**content, "own_sha256": _digest(content)})
    # Folders of later steps are damaged: this run began before them.
    others = [other for other in _folders(run) if other.name <= folder.name]
    for old in {*_folders(run)} - {*others[:keep]}:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def size(head: DraftHead, ema: Ema) -> int:
    """Bytes of a checkpoint, estimated generously: weights, at most two moments for each, means."""
    tensors = [*head.state_dict().values()] * 3 + [*ema.means.values()]
    return 1_000_000 + sum(value.numel() * value.element_size() for value in tensors)


def newest(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """Folder and state of the newest whole checkpoint, None before the first one was written.

    Raises SpectrainError when there are some and all are damaged: hours of work may be in them.
    """
    found = next(whole(run), None)
    if found is None and _folders(run):
        raise SpectrainError(
            "every checkpoint of this run is damaged",
            where=str(run / FOLDER),
            fix="bring back a copy of one of them, or use --overwrite to start anew",
        )
    return found


def whole(run: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folders and states of checkpoints, newest first; damaged ones are named and passed over."""
    for folder in _folders(run):
        problem, state = _examine(folder)
        if problem is None:
            yield folder, state
        elif main_process():
            print(f"checkpoint {folder} is damaged ({problem}), not used", file=sys.stderr)


def restore(folder: Path, head: DraftHead, update: Update, ema: Ema) -> None:
    """Fill head, optimisers and mean from a folder that `newest` found."""
    load_weights(head, folder / WEIGHTS)
    update.restore(load_file(folder / OPTIMIZER))
    if ema.means:
        ema.restore(load_file(folder / EMA), str(folder))


def clean(run: Path) -> None:
    """Remove what a process that was killed while writing left behind."""
    for left in leftovers(run) + leftovers(run / FOLDER):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


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
        # Absent in checkpoints of earlier versions.
        if state.pop("own_sha256", None) not in (None, _digest(state)):
            return f"{STATE} does not have its checksum", {}
        if folder.name != _name(state["step"]):
            return f"{STATE} is that of step {state['step']}", {}
        for name, expected in state["sha256"].items():
            if not (folder / name).is_file():
                return f"{name} is missing", {}
            if sha256_file(folder / name) != expected:
                return f"{name} does not have its checksum", {}
    except (SpectrainError, FileNotFoundError, KeyError, TypeError, ValueError, AttributeError):
        return f"{STATE} is missing or not whole", {}
    return None, state


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _digest(content: Mapping[str, Any]) -> str:
    """The SHA-256 of JSON values, whatever the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

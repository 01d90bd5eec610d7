"""The head on held-out conversations while it is trained, and the best of its states kept.

out/best/   a head as in out/head, and best.json: the step, what was measured, and how
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from spectrain.core.batch import Batch
from spectrain.core.files import read_json
from spectrain.core.progress import say
from spectrain.core.target import Target
from spectrain.data.online import OnlineStore, read
from spectrain.data.shard import RowInfo
from spectrain.data.store import FeatureStore
from spectrain.evaluation.bootstrap import Floats
from spectrain.evaluation.heldout import nothing, tally, told
from spectrain.evaluation.measure import Source, batches, rows_for
from spectrain.evaluation.summary import DEFINITIONS
from spectrain.heads.base import DraftHead
from spectrain.heads.io import save_head
from spectrain.recipes.train_config import REPORT, TrainConfig
from spectrain.trainer.checkpoint import FOLDER
from spectrain.trainer.trunk import JointHead

BEST, FACTS = "best", "best.json"


def heldout(
    config: TrainConfig,
    store: FeatureStore,
    source: FeatureStore | OnlineStore,
    head: DraftHead | JointHead,
    trunk: Target | None,
    accelerator: Accelerator,
    provenance: Mapping[str, Any],
) -> Heldout | None:
    """What measures `head` on the first eval_rows of the store's held-out rows, which lie in the
    order of their content hash, so they are the same ones every time; None where nothing is asked
    for or there are no such rows.

    source: where training has its features from; trunk: the target, where it is trained along
    (then it says itself what the rows' features are now, and no state is kept as the best: a head
    is of no use without its trunk).
    """
    if not config.eval_every:
        return None
    rows = rows_for(0.0, store.rows("heldout"))[: config.eval_rows]
    if not rows:
        say("the store has no held-out rows: nothing is measured on the way")
        return None
    if trunk is None:
        return Heldout(head, source, rows, accelerator, config.out, provenance)
    return Heldout(head.head, Live(store, trunk, head.head.needs.aux_layers), rows, accelerator)


class Live:
    """Where a trunk that is trained stands for the store that the original has filled."""

    def __init__(self, store: FeatureStore, trunk: Target, aux_layers: tuple[int, ...]) -> None:
        self._store, self._trunk, self._aux_layers = store, trunk, aux_layers

    def batch(self, rows: list[RowInfo], with_aux: bool) -> Batch:
        """As of a store, with what the trunk says now."""
        texts = self._store.batch(rows, with_aux=False)
        return read(self._trunk, texts, self._aux_layers if with_aux else ())


class Heldout:
    """Called with the number of steps that are done, by all processes; see `heldout`.

    It works on a copy of the head in the target's own type, as the head will be used: neither its
    mode nor what it keeps of its target is touched while it is in training.
    """

    def __init__(
        self,
        head: DraftHead,
        source: Source,
        rows: list[RowInfo],
        accelerator: Accelerator,
        out: Path | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        """out: the run's folder, where the best is kept; None: it is not."""
        self._head, self._source, self._rows = head, source, rows
        self._accelerator, self._out, self._provenance = accelerator, out, provenance
        self._parts = list(batches(rows, head))
        self._copy: DraftHead | None = None

    def __call__(self, step: int) -> dict[str, Any]:
        """rows, and what evaluation/heldout.py tells."""
        found = {"rows": len(self._rows), **told(self._sums(), self._head.weights(1.0))}
        if self._out is not None and self._accelerator.is_main_process:
            self._keep_if_best(self._out, step, found)
        return found

    def _sums(self) -> dict[str, Floats]:
        """Over all rows. The processes deal the batches among them; all read equally many, for a
        target that is cut over them needs them all at each of its forwards."""
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        head = self._as_used()
        readout, own = head.readout, nothing(head)
        for place in range(rank, ceil(len(self._parts) / world) * world, world):
            part = self._parts[min(place, len(self._parts) - 1)]
            batch = self._source.batch(part, bool(head.needs.aux_layers))
            tallied = tally(readout, head, batch.to(readout.weight.device, readout.weight.dtype))
            if place < len(self._parts):
                own = {name: own[name] + tallied[name] for name in own}
        flat = torch.from_numpy(np.concatenate([values.ravel() for values in own.values()]))
        flat = self._accelerator.reduce(flat.to(self._accelerator.device), "sum").cpu().numpy()
        cuts = np.cumsum([values.size for values in own.values()])[:-1]
        parts = zip(own.items(), np.split(flat, cuts), strict=True)
        return {name: part.reshape(values.shape) for (name, values), part in parts}

    def _as_used(self) -> DraftHead:
        """The head as it is now, in the type and on the device of its target, in eval mode."""
        head, readout = self._head, self._head.readout
        if self._copy is None:
            copy = type(head)(head.config)
            self._copy = copy.to(readout.weight.device, readout.weight.dtype)
        self._copy.load_state_dict(head.state_dict())
        return self._copy.bind(readout).eval()

    def _keep_if_best(self, out: Path, step: int, found: Mapping[str, Any]) -> None:
        """What is measured otherwise (other rows, another γ) does not compare, nor what was said
        after a later step before the run went back behind it."""
        old, tau = read_best(out), found["tau"]
        alike = old is not None and all(old.get(key) == found[key] for key in ("rows", "draft"))
        alike = alike and old["step"] < step
        # Of equal τ, as of short runs, the head with the smaller loss.
        if tau is None or (alike and _worth(old) >= _worth(found)):
            return
        names = ("tau", "marginal", "conditional", "rule", "rejections")
        words = {name: DEFINITIONS[name] for name in names}
        facts = {"step": step, **found, "temperature": 0.0, "definitions": words}
        save_head(self._head, out / BEST, {"provenance.json": self._provenance, FACTS: facts})


def _worth(found: Mapping[str, Any]) -> tuple[float, float]:
    return found["tau"], -(found["loss"] or 0.0)


def read_best(out: Path) -> dict[str, Any] | None:
    """best.json of a run; None where there is none."""
    path = out / BEST / FACTS
    return read_json(path) if path.is_file() else None


def tidy(out: Path) -> None:
    """Remove what a process that was killed while saving left, and the best of a run that begins
    anew because it was killed before its first checkpoint."""
    for left in out.glob(f".{BEST}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    if not any((out / FOLDER).glob("step-*")) and not (out / REPORT).is_file():
        shutil.rmtree(out / BEST, ignore_errors=True)

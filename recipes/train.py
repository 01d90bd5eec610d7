"""`spectrain train-…`: from a feature store to a trained head.

out/checkpoints/step-…   what a run that was interrupted goes on from
out/metrics.jsonl        one row for each logged step
out/head/                the result: weights, config, provenance, training curve
out/best/                the best head by held-out τ, where that is measured on the way
out/target/, out/adapter/   the target, where it was trained along: as a model, or as an adapter
out/report.json          the report; with it the run is finished
"""

from __future__ import annotations

import gc
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import BaseModel

from spectrain.core.batch import counted
from spectrain.core.errors import SpectrainError
from spectrain.core.files import disk_errors, write_json
from spectrain.core.models import lasting_name, resolve
from spectrain.core.provenance import provenance
from spectrain.core.target import Target
from spectrain.data.online import OnlineStore
from spectrain.data.shard import RowInfo
from spectrain.data.store import FeatureStore
from spectrain.heads.base import DraftHead
from spectrain.heads.io import load_head, save_head
from spectrain.heads.registry import family
from spectrain.recipes.given_head import given_head
from spectrain.recipes.heldout import BEST, heldout, tidy
from spectrain.recipes.train_config import (
    REPORT,
    TrainConfig,
    check_options,
    finished_report,
    identity_of,
    options_of,
)
from spectrain.recipes.train_report import (
    HEAD,
    about_store,
    about_trunk,
    about_vocabulary,
    make_report,
    render,
    vocabulary_line,
)
from spectrain.trainer import spread, zero, zero_config
from spectrain.trainer.asked import sharding_asked_for
from spectrain.trainer.changes import digests, require_changes
from spectrain.trainer.checkpoint import FOLDER
from spectrain.trainer.estimate import shortage
from spectrain.trainer.launch import start_all
from spectrain.trainer.loop import Data, train
from spectrain.trainer.metrics import METRICS, read_metrics
from spectrain.trainer.quality import heldout_loss
from spectrain.trainer.tracking import WANDB_ID, make_accelerator, precision
from spectrain.trainer.trunk import ADAPTER, TARGET, JointHead, from_scratch

__all__ = ["TrainConfig", "check_options", "render", "run"]


def run(config: TrainConfig) -> dict[str, Any]:
    """Train (or finish training) a head; returns the report that is also in out/report.json.

    Raises SpectrainError for input that cannot be used or another run in the same folder,
    RunFailed when training cannot go on; KeyboardInterrupt after Ctrl-C, Terminated after SIGTERM,
    with a checkpoint written.
    """
    kind = family(config.family)
    options = options_of(config)
    config = config.model_copy(update={"mixed_precision": precision(config)})
    start_all()
    asked_for, way = sharding_asked_for(), zero.way(zero_config.asked_for(), config)
    accelerator = make_accelerator(config, config.out)
    main = accelerator.is_main_process
    try:
        if main:
            with disk_errors(config.out):
                config.out.mkdir(parents=True, exist_ok=True)
            if config.overwrite:
                _clear(config.out)
            tidy(config.out)
        accelerator.wait_for_everyone()
        store = FeatureStore.open(config.store)
        rows = store.rows("train")
        _require_anchors(store, rows)
        steps, online = config.total_steps(len(rows)), _online(config, store)
        settings = config.model_copy(update={"steps": steps, "online": online})
        identity = identity_of(settings, options, store)
        finished = finished_report(settings, identity)
        if finished is not None:
            if main:
                print(f"this run is finished: {config.out / HEAD}", file=sys.stderr)
                if config.put_back:
                    load_head(config.out / HEAD).put_back(resolve(config.target), config.put_back)
            return finished | about_store(store)

        torch.manual_seed(config.seed)
        kept = online or settings.trunk.trained
        cut = spread.wanted(settings.shard, asked_for, kept, accelerator)
        make = partial(_made, kind, options, settings, store)
        head: DraftHead | JointHead
        if cut:
            target, head = spread.target_and_head(make, accelerator, settings.trunk.trained)
        else:
            target, head = make(str(accelerator.device))
        if config.put_back and not head.native:
            head.put_back(resolve(config.target), config.put_back)  # tells why it cannot
        vocabulary = about_vocabulary(store, head)
        if main and vocabulary["vocabulary"]:  # now, not after hours of work
            print(vocabulary_line(vocabulary["vocabulary"]), file=sys.stderr)
        if settings.trunk.trained:
            quality = [heldout_loss(target, store, accelerator)]
            head = JointHead(head, target, settings.trunk)
            if settings.trunk.first:  # the processes wait for no gradient of what still rests
                accelerator.ddp_handler.find_unused_parameters = True
        else:
            del target  # its readout is all that is needed from here on
            gc.collect()
        source = _asking(settings, store, head, accelerator, cut) if online else store
        extents = [(row.length, row.supervised) for row in rows]
        short = shortage(head, extents, settings, accelerator.num_processes, accelerator.device)
        if main and short:  # now, not when the first long batch comes
            print(short, file=sys.stderr)
        watched = head.everything() if settings.trunk.trained else head
        before = digests(watched)
        about = provenance(config.model_dump(mode="json"), config.seed, store=identity["store"])
        live = target if settings.trunk.trained else None
        evaluate = heldout(settings, store, source, head, live, accelerator, about)
        with_aux = bool(head.needs.aux_layers)
        data = Data(
            lengths=[row.length for row in rows],
            supervised=[row.supervised for row in rows],
            load=lambda places: source.packed([[rows[i] for i in row] for row in places], with_aux),
            ahead=not online,  # the target is asked on the device that computes the step
        )
        state = train(
            head, data, settings, accelerator, config.out, identity, config.extend, evaluate, way
        )
        require_changes(watched, before, str(config.out), state.unreached or ())
        accelerator.wait_for_everyone()  # the metrics are complete
        report = make_report(settings, state, store, accelerator, head.weights(1.0))
        trained = [value for value in head.parameters() if value.requires_grad]
        report |= {"trained_parameters": sum(value.numel() for value in trained), **vocabulary}
        if settings.trunk.trained:
            quality.append(heldout_loss(target, store, accelerator))
            report |= about_trunk(settings, quality)
            head.save_trunk(config.out, lasting_name(settings.target), main)
            head = head.head
        if main:
            extra = {
                "provenance.json": about,
                "training.json": {"report": report, "curve": read_metrics(config.out)},
            }
            save_head(head, config.out / HEAD, extra)
            write_json(config.out / REPORT, {"report": report, "config": identity})
            if config.put_back:
                head.put_back(resolve(config.target), config.put_back)
        accelerator.wait_for_everyone()
        return report
    finally:
        accelerator.end_training()


def tuned_target(out: Path) -> Path | None:
    """Where a run that trained the target along left it: the whole model or the adapter."""
    found = [out / name for name in (TARGET, ADAPTER) if (out / name).is_dir()]
    return found[0] if found else None


def _require_anchors(store: FeatureStore, rows: list[RowInfo]) -> None:
    """Refuse rows of which none has anything to learn; as a rule the first one has."""
    if rows and not any(bool(counted(store.batch([row]).reply, 0).any()) for row in rows):
        raise SpectrainError(
            "no training row has a reply of two tokens or more, so there is nothing to learn",
            where=str(store.path),
            fix="prepare a store with longer replies",
        )


def _online(config: TrainConfig, store: FeatureStore) -> bool:
    """Whether the target is asked for features."""
    online = not store.features if config.online == "auto" else config.online
    if not online:
        store.require_features((), False)
    return online


def _clear(out: Path) -> None:
    """Remove an earlier run, and nothing else that may lie in the folder."""
    for name in (FOLDER, HEAD, BEST, TARGET, ADAPTER):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in (METRICS, REPORT, WANDB_ID):
        (out / name).unlink(missing_ok=True)


def _made(
    kind: type[DraftHead],
    options: BaseModel,
    settings: TrainConfig,
    store: FeatureStore,
    device: str,
) -> tuple[Target, DraftHead]:
    """The target and a head bound to it."""
    target = _target(settings, store, device)
    return target, _head(kind, options, settings, target, store)


def _target(settings: TrainConfig, store: FeatureStore, device: str) -> Target:
    """The target that the store was prepared with, or a new one of its shape."""
    trunk = settings.trunk
    if trunk.trained and (settings.steps - 1) / settings.steps < trunk.first:
        raise SpectrainError(
            f"with trunk.heads_first {trunk.first:g} of {settings.steps} steps none is left for "
            "the target itself",
            where="trunk.heads_first",
            fix="train more steps or choose a smaller share",
        )
    # What is trained is kept in float32, whatever the products are made in.
    exact = settings.mixed_precision == "no" or trunk.trained
    target = Target.load(
        settings.target,
        dtype="float32" if exact else "auto",
        device=device,
        pack_weights=False,
    )
    store.require_target(target.fingerprint)
    return from_scratch(target) if trunk.mode == "scratch" else target


def _asking(
    settings: TrainConfig,
    store: FeatureStore,
    head: DraftHead | JointHead,
    accelerator: Accelerator,
    cut: bool,
) -> OnlineStore:
    """The store with a target of its own, as the one that `prepare` asks: in the type that it was
    asked in, and neither the one whose readout a head shares nor a trunk that is trained."""
    if accelerator.is_main_process and not store.features:
        print("the store holds tokens alone: the target is asked at every step", file=sys.stderr)
    dtype = store.manifest["settings"]["target"].get("dtype", "auto").removeprefix("torch.")
    load = partial(Target.load, settings.target, dtype=dtype)
    if cut:
        target = spread.loaded(partial(load, pack_weights=False), accelerator)
    else:
        target = load(device=str(accelerator.device))
    return OnlineStore(store, target, head.needs.aux_layers)


def _head(
    kind: type[DraftHead],
    options: BaseModel,
    settings: TrainConfig,
    target: Target,
    store: FeatureStore,
) -> DraftHead:
    """A head bound to its target."""
    if settings.init is None:
        head = kind.create(options, target, store.token_counts("train", target.vocab_size))
    else:
        head = given_head(settings.init, target.name, target.device)
        if not isinstance(head, kind):
            raise SpectrainError(
                f"the head is of family {head.family}, not {settings.family}",
                where=str(settings.init),
                fix="give the family or version of that head",
            )
        head.check_target(target, str(settings.init))
        head.bind(target.readout)
    if not (settings.trunk.trained or settings.online):  # else they are computed at every step
        store.require_features(head.needs.aux_layers, head.needs.last_everywhere)
    return head.float()

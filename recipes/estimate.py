"""`spectrain estimate`: what a training will take, told from shapes alone.

No weight is read and no store is needed; one that is there gives the real lengths. Parameters and
FLOPs are exact, memory and time are estimates: scripts/bench_estimate.py holds them against steps.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from spectrain.core.environment import describe, free_memory
from spectrain.core.files import read_json
from spectrain.core.outline import outline
from spectrain.core.target import Target
from spectrain.data.shard import DTYPES, bytes_needed
from spectrain.data.store import FeatureStore
from spectrain.heads.base import DraftHead
from spectrain.heads.io import find_head
from spectrain.heads.registry import family
from spectrain.heads.work import Work
from spectrain.recipes.estimate_report import render
from spectrain.recipes.train_config import TrainConfig, options_of
from spectrain.trainer import estimate as told
from spectrain.trainer.estimate import Memory, Step
from spectrain.trainer.speeds import Speeds
from spectrain.trainer.tracking import precision
from spectrain.trainer.trunk import JointHead

__all__ = ["EstimateConfig", "render", "run"]

_LIKELY = 1000  # conversations, where neither a store nor a number is given


class EstimateConfig(TrainConfig):
    """Settings of `estimate`: those of `train-…`, and the data where there is no store yet."""

    store: Path | None = Field(None, description="feature store whose lengths are taken")
    conversations: int | None = Field(
        None, ge=1, description=f"training conversations; default: the store's, or {_LIKELY}"
    )
    length: int = Field(512, ge=4, description="tokens of a conversation, without a store")
    supervised: float = Field(
        0.5, gt=0, le=1, description="share of tokens that lie in replies, without a store"
    )
    processes: int = Field(1, ge=1, description="processes that share a step")
    dtype: str = Field("bfloat16", description="type of a store's features")


def run(config: EstimateConfig) -> dict[str, Any]:
    """The report. Raises SpectrainError for a target or options that cannot be."""
    config = config.model_copy(update={"mixed_precision": precision(config)})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store = FeatureStore.open(config.store) if config.store else None
    lengths = _lengths(config, store)
    target, head, asked = _parts(config, device, store)
    steps = config.total_steps(len(lengths))
    some = told.steps_of(lengths, config, config.processes, device.type)
    # The largest step decides about memory and is no typical one.
    memory, usual = told.memory_of(head, some, config, asked), some[:-1]
    works = [_work(head, step, config, asked, steps) for step in usual]
    speeds = Speeds(device, config.mixed_precision == "bf16")
    seconds = [speeds.by_part(work) for work in works]
    per_step = sum(sum(parts.values()) for parts in seconds) / len(seconds)
    flops = _mean([work.flops for work in works])
    tokens = sum(sum(t for t, _ in step.lengths) for step in usual) / len(usual)
    replies = sum(sum(r for _, r in step.lengths) for step in usual) / len(usual)
    world, free = config.processes, free_memory(device)
    rows = told.parameters_of(head)
    return {
        "target": config.target,
        "family": config.family,
        "trunk": config.trunk.mode,
        "device": describe(device)["device"] if device.type == "cuda" else describe(device)["cpu"],
        "precision": config.mixed_precision,
        "parameters": rows,
        "data": {
            "conversations": len(lengths),
            "tokens": sum(t for t, _ in lengths),
            "reply_tokens": sum(r for _, r in lengths),
            "from": str(config.store) if store else "assumed",
        },
        "steps": steps,
        "batch_size": config.batch_size,
        "micro_batch": config.micro_batch,
        "flops": {
            "per_token": sum(flops.values()) / tokens,
            "step": sum(flops.values()) * world,
            "run": sum(flops.values()) * world * steps,
            "by_part": flops,
        },
        "speed": {
            "product_flops": speeds.product(),
            "tokens_per_second": tokens * world / per_step,
            "reply_tokens_per_second": replies * world / per_step,
            "step_seconds": per_step,
            "run_seconds": per_step * steps,
            "by_part": _mean(seconds),
        },
        "memory": asdict(memory)
        | {"peak": memory.peak, "free": free, "fits": memory.peak <= free}
        | {"host": _host(target, device)},
        "advice": _advice(head, some, config, memory, free, asked),
        "disk": _disk(head, config, lengths, memory),
        "environment": describe(device),
    }


def _lengths(config: EstimateConfig, store: FeatureStore | None) -> list[tuple[int, int]]:
    """(tokens, reply tokens) of each training conversation."""
    if store is not None:
        rows = store.rows("train")
        found = [(row.length, row.supervised) for row in rows]
        count = config.conversations or len(found)
        return [found[place % len(found)] for place in range(count)] if found else []
    one = config.length, max(2, round(config.length * config.supervised))
    return [one] * (config.conversations or max(_LIKELY, config.batch_size))


def _parts(
    config: EstimateConfig, device: torch.device, store: FeatureStore | None
) -> tuple[Target, DraftHead | JointHead, Target | None]:
    """Outlines of the target, of what is trained, and of the target that is asked online."""
    kind, options = family(config.family), options_of(config)
    exact = config.mixed_precision == "no" or config.trunk.trained or device.type == "cpu"
    target = outline(config.target, torch.float32 if exact else None)
    if config.init is None:
        head: DraftHead | JointHead = kind.outline(options, target)
    else:
        content = read_json(find_head(config.init) / "config.json")
        with torch.device("meta"):
            head = kind(kind.Config.model_validate(content)).bind(target.readout)
    if config.trunk.trained:
        head = JointHead(head, target, config.trunk)
    online = config.online is True or (
        config.online == "auto" and store is not None and not store.features
    )
    asked = outline(config.target, torch.float32 if device.type == "cpu" else None)
    return target, head, asked if online else None


def _work(
    head: DraftHead | JointHead,
    step: Step,
    config: EstimateConfig,
    asked: Target | None,
    steps: int,
) -> Work:
    """Of a step in the middle of the run; a trunk rests in a share of the steps."""
    work = told.step_work(head, step, config, asked)
    if not config.trunk.trained or not config.trunk.first:
        return work
    rest = told.step_work(head, step, config, asked, resting=True)
    share = config.trunk.first
    return rest.scaled(share) + work.scaled(1 - share)


def _advice(
    head: DraftHead | JointHead,
    steps: list[Step],
    config: EstimateConfig,
    memory: Memory,
    free: int,
    asked: Target | None,
) -> list[str]:
    """What makes it fit, best first; nothing where it does."""
    if memory.peak <= free:
        return []
    found = []
    size = config.micro_batch
    lengths = [one for step in steps for one in step.lengths]
    while size > 1:
        size //= 2
        smaller = config.model_copy(update={"micro_batch": size})
        cut = told.steps_of(lengths, smaller, config.processes, steps[0].shapes[0].device)
        if told.memory_of(head, cut, smaller, asked).peak <= free:
            return [f"--set micro_batch={size} fits: the same gradient in smaller pieces"]
    if config.micro_batch > 1 and memory.step + memory.batch > memory.gradients:
        found.append("--set micro_batch=1: the same gradient in smaller pieces")
    if memory.gradients + memory.optimizer > free // 2:
        if config.trunk.mode in ("full", "scratch"):
            found.append("--set trunk.mode=lora: the target's own weights get no optimiser")
        if "draft_vocab_size" in family(config.family).Options.model_fields:
            found.append("a smaller --set head.draft_vocab_size, or fewer head.layers or steps")
        if config.optimizer == "adamw":
            found.append("--set optimizer=muon: one number of memory for each weight in place of 2")
    if asked is not None:
        found.append("store the features (prepare), so that no target has to be held")
    return found or ["shorter conversations (prepare --set max_length=…), or a larger device"]


def _host(target: Target, device: torch.device) -> dict[str, Any]:
    """The target is read whole into the machine's memory before anything else."""
    need, free = told.bytes_of(target.model.parameters()), free_memory(torch.device("cpu"))
    return {"loading": need, "free": free, "fits": need <= free}


def _disk(
    head: DraftHead | JointHead,
    config: EstimateConfig,
    lengths: list[tuple[int, int]],
    memory: Memory,
) -> dict[str, int]:
    """Bytes of the files of a run, and of a store that holds what the family reads."""
    own = head.head if isinstance(head, JointHead) else head
    needs = own.needs
    weights = told.bytes_of(own.state_dict().values())
    return {
        "head": weights,
        "checkpoint": told.bytes_of(head.state_dict().values()) + memory.optimizer,
        "checkpoints_kept": config.keep,
        "store": bytes_needed(
            sum(t for t, _ in lengths),
            sum(r for _, r in lengths),
            len(lengths),
            own.config.target.hidden_size,
            len(needs.aux_layers),
            DTYPES[config.dtype],
            needs.last_everywhere,
        ),
    }


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}

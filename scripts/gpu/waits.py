"""Part 5 of gpu_validate.py: does the host wait for the device within a step?"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu.scene import WAYS, Scene, good_head, make_head
from gpu.tokens import FAMILIES, SAMPLED
from torch.utils._python_dispatch import TorchDispatchMode

from spectrain.generator.rules import Typical
from spectrain.generator.run import Run
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator


def waits(scene: Scene) -> dict[str, Any]:
    """Synchronising operations in `Run._step` without graphs, the first step of a run left out."""
    target, prompts = scene.target("small", torch.float32), scene.prompts()
    heads = {"half good": good_head(target, 0.5)}
    heads |= {
        name: make_head(target, name.split(",")[0], **options) for name, options in FAMILIES.items()
    }
    cases: dict[str, tuple[Any, dict[str, Any], Sampling]] = {
        f"{name}, {way}": (head, options, Sampling())
        for name, head in heads.items()
        for way, options in WAYS.items()
    }
    head = heads["eagle3"]
    for way, options in WAYS.items():
        cases[f"sampled, {way}"] = head, {**options, "proposal": "top-k"}, SAMPLED
        cases[f"typical, {way}"] = head, {**options, "typical": Typical()}, SAMPLED
    cases["drawn, chain"] = head, {"draft_tokens": 4, "proposal": "drawn"}, SAMPLED
    cases["drawn, static tree"] = head, {**WAYS["static tree"], "proposal": "drawn"}, SAMPLED
    cases["plain"] = None, {}, SAMPLED
    cases["lookup"] = None, {"lookup": 3, "draft_tokens": 4}, SAMPLED

    found: dict[str, Any] = {}
    for name, (own, options, sampling) in cases.items():
        if scene.time_for(name):
            with _counted(scene.device) as places:
                generator = Generator(target, own, **options, graphs=False)
                generator.generate(prompts[:3], 8, sampling, rows=2)
            found[name] = dict(places)
    total = sum(sum(places.values()) for places in found.values())
    return {
        "verdict": "fail" if total else "pass",
        "says": f"{total} waits in the steps of {len(found)} cases",
        "cases": found,
    }


@contextmanager
def _counted(device: torch.device) -> Iterator[Counter[str]]:
    """Counts waits in all steps but the first, by place."""
    places: Counter[str] = Counter()
    step, calls = Run._step, []

    def watched(self: Run, view: int, head_view: int) -> torch.Tensor:
        calls.append(view)
        if len(calls) == 1:
            return step(self, view, head_view)
        if device.type != "cuda":
            with _Names(places):
                return step(self, view, head_view)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                result = step(self, view, head_view)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for warning in told:
            if "synchroniz" in str(warning.message):
                places[f"{warning.filename}:{warning.lineno}"] += 1
        return result

    Run._step = watched
    try:
        yield places
    finally:
        Run._step = step
    if len(calls) < 2:
        raise RuntimeError("no step was watched")


class _Names(TorchDispatchMode):
    """Without a GPU: operations that would make the host wait for one."""

    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        waiting = ("_local_scalar_dense", "nonzero", "masked_select", "unique")
        if any(name in str(function) for name in waiting):
            self.places[str(function)] += 1
        return function(*args, **(kwargs or {}))

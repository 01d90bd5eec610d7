"""Training steps of one EAGLE-3 trainer, timed or weighed; the part of bench_peers.py that runs
under that trainer's own Python. The last line it prints is JSON.

    PYTHON scripts/peer_step.py --trainer specforge-full --part time --target DIR

Needs torch and the trainer; for `spectrain` the step is that of bench_train.py.

    time      {walls, seconds, learnt, versions}: wall seconds and process seconds (all threads) of
              each step after two that are not counted
    memory    {memory_mb, left_mb}, the first the most resident at once in the second step above
              what was resident before it: parameters, optimiser, inputs and what the first step
              has left behind. That is the second: kernels made for these shapes, mostly; null for
              a trainer that torch compiles, whose compiler stays. Run it with
              MALLOC_MMAP_THRESHOLD_=100000, so that freed blocks go back to the system at once

A trainer has `step()` and `optimizer`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from importlib import metadata
from pathlib import Path

from peer_trainers import specforge, speculators

COMPILED = ("specforge-full", "specforge-compact")
PACKAGES = {  # trainer: the package that has it
    "spectrain": "spectrain",
    "speculators": "speculators",
    **dict.fromkeys(COMPILED, "specforge"),
}
WARM_UP = 2  # the second step of code that torch compiles is still a slow one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainer", choices=PACKAGES, required=True)
    parser.add_argument("--part", choices=("time", "memory"), required=True)
    parser.add_argument("--target", required=True, help="folder with config.json and embedding")
    parser.add_argument("--length", type=int, required=True, help="tokens of a row, T")
    parser.add_argument("--batch", type=int, required=True, help="rows, B")
    parser.add_argument("--steps", type=int, required=True, help="draft steps, K")
    parser.add_argument("--draft-vocab", type=int, required=True, help="D")
    parser.add_argument("--share", type=float, required=True, help="supervised share of the tokens")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=2, help="steps that are timed")
    options = parser.parse_args()
    print(json.dumps({"time": timed, "memory": weighed}[options.part](options)))


def timed(options: argparse.Namespace) -> dict:
    trainer = MAKE[options.trainer](options)
    for _ in range(WARM_UP):
        trainer.step()
    walls, seconds = [], []
    for _ in range(options.repeats):
        wall, start = time.perf_counter(), time.process_time()
        trainer.step()
        walls.append(time.perf_counter() - wall)
        seconds.append(time.process_time() - start)
    learnt = check(trainer.optimizer)
    return {"walls": walls, "seconds": seconds, "learnt": learnt, "versions": versions(options)}


def weighed(options: argparse.Namespace) -> dict:
    trainer = MAKE[options.trainer](options)
    compiled = options.trainer in COMPILED
    if not compiled:  # whose kernels would be others after a second shape
        small = MAKE[options.trainer](
            argparse.Namespace(**vars(options) | {"length": 32, "batch": 1})
        )
        small.step()  # code that is loaded is no memory of a step
        del small
    gc.collect()
    start = resident("VmRSS")
    trainer.step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    trainer.step()
    memory = resident("VmHWM") - before
    check(trainer.optimizer)
    return {"memory_mb": memory, "left_mb": None if compiled else before - start}


def resident(name: str) -> float:
    """A size of this process in MB, as Linux tells it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"{name} is not told by this system")


def versions(options: argparse.Namespace) -> dict[str, str]:
    names = PACKAGES[options.trainer], "torch", "transformers"
    there = {one.name: one.version for one in metadata.distributions()}
    return {name: there[name] for name in names if name in there}


def check(optimizer) -> int:
    """How many parameters are learnt. Each has had a gradient, none infinite or no number."""
    learnt = optimizer.param_groups[0]["params"]
    for value in learnt:
        if not 0 < float(optimizer.state[value]["exp_avg"].norm()) < float("inf"):
            raise SystemExit(f"a parameter of shape {tuple(value.shape)} does not learn")
    return sum(value.numel() for value in learnt)


def ours(options: argparse.Namespace):
    from spectrain.core.environment import settle

    settle()  # before torch
    from bench_train import Work

    options.whole = False
    return Work(options)


MAKE = {
    "spectrain": ours,
    "speculators": speculators,
    **dict.fromkeys(COMPILED, specforge),
}

if __name__ == "__main__":
    main()

"""Throughput of several training processes on the cores of one; JSON on stdout.

    python scripts/bench_processes.py --store STORE [--target smollm2-135m] [--config demo-smollm2]
        [--steps 12] [--processes 2] [--cores 2] [--rounds 2]

The same steps of the same batches, once by one process with all the cores as its threads, once by
N processes that share them (torchrun, gloo), in turn. What is lost is what the processes say to
each other, and products that are a Nth as large. Batches are the configuration's; the processes cut
each into N parts.

    tokens/s   reply tokens that were trained on over the seconds of the training loop, its first
               steps included; the median of the rounds
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from spectrain.core.environment import describe, settle

ASKED = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--config", default="demo-smollm2")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.processes < 2:
        parser.error("--processes: 2 or more")
    settle()
    speeds: dict[int, list[float]] = {1: [], options.processes: []}
    losses: dict[int, float] = {}
    for _ in range(options.rounds):
        for count, found in speeds.items():
            report = train(options, count)
            assert report["processes"] == count, "the launcher started another number"
            found.append(report["supervised_tokens"] / report["seconds"])
            losses[count] = report["loss"]
    one, several = (statistics.median(found) for found in speeds.values())
    parted = abs(losses[options.processes] / losses[1] - 1)
    result = {
        "ratio": round(several / one, 3),
        "asked": f"at least {ASKED}",
        "met": several / one >= ASKED,
        "tokens_per_second": {count: round(statistics.median(v), 1) for count, v in speeds.items()},
        "loss": losses,
        "losses_part_by": parted,  # by rounding; under bf16 autocast by more
        "steps": options.steps,
        "cores": options.cores,
        "definition": "reply tokens per second of N processes over those of one on the same cores",
        "environment": describe("cpu"),
    }
    print(json.dumps(result, indent=1))


def train(options: argparse.Namespace, count: int) -> dict:
    """The report of a training by so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command = [sys.executable, *(launcher if count > 1 else []), "-m", "spectrain"]
        command += ["train-eagle", "--config", options.config, "--target", options.target]
        command += ["--store", str(options.store), "--out", str(Path(folder) / "run")]
        command += ["--steps", str(options.steps), "--json", str(report)]
        command += [part for one in options.set for part in ("--set", one)]
        threads = str(max(1, options.cores // count))
        environment = os.environ | {"OMP_NUM_THREADS": threads, "SPECTRAIN_QUIET": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"training failed: {done.stderr.strip().splitlines()[-1:]}")
        content = json.loads(report.read_text())
        return content.get("report", content)


if __name__ == "__main__":
    main()

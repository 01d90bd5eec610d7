"""What share of a training step is spent on reading the store; JSON on stdout.

    python scripts/bench_loader.py --store STORE [--target smollm2-135m] [--config demo-smollm2]
        [--steps 20] [--family eagle3]

A head is trained for some steps as `train-…` does it, in a folder of its own, and the calls that
make batches (reading, putting together, checksums at first use) are timed inside the loop.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from spectrain.core.environment import describe, settle

ASKED = 0.03  # of step time, at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--config", default="demo-smollm2")
    parser.add_argument("--family", default="eagle3")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    settle()

    from spectrain.core.config import load_config
    from spectrain.data.store import FeatureStore
    from spectrain.recipes import train

    spent: list[float] = []
    real = FeatureStore.packed

    def packed(store: FeatureStore, *arguments, **named):
        start = time.perf_counter()
        batch = real(store, *arguments, **named)
        spent.append(time.perf_counter() - start)
        return batch

    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "target": options.target,
            "store": str(options.store),
            "out": str(Path(folder) / "train"),
            "family": options.family,
            "steps": options.steps,
        }
        overrides = ["epochs=null"]
        config = load_config(train.TrainConfig, "train", options.config, overrides, flags)
        FeatureStore.packed = packed
        try:
            report = train.run(config)
        finally:
            FeatureStore.packed = real
        seconds = report["seconds"]
    # The batches before the loop (is there anything to learn?) are no part of a step.
    inside = spent[-report["steps"] * (len(spent) // report["steps"]) :]
    share = sum(inside) / seconds
    result = {
        "share_of_step_time": round(share, 4),
        "asked": f"at most {ASKED}",
        "met": share <= ASKED,
        "steps": report["steps"],
        "seconds": round(seconds, 2),
        "seconds_reading": round(sum(inside), 3),
        "batches": len(inside),
        "definition": "seconds inside FeatureStore.packed over seconds of the training loop",
        "environment": describe("cpu"),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""What features stored as int8 cost in acceptance; JSON on stdout.

    python scripts/bench_int8.py [--target smollm2-135m] [--work runs/int8] [--limit 128]
        [--dtypes bfloat16,int8]

The same conversations are stored in each number type, the same head is trained on each store (same
seed, order and steps), and all heads are measured on the same held-out rows with exact (float32)
features, as they would get them from the target when they draft. Differences are paired: intervals
are drawn over conversations for both heads together. Interrupted, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from spectrain.core.environment import describe, settle

EXACT = "float32"
MANIFEST = "manifest.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, default=None, help="default: the shipped ones")
    parser.add_argument("--work", type=Path, default=Path("runs/int8"))
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--heldout", type=float, default=0.25)
    parser.add_argument("--dtypes", default="bfloat16,int8", help="the first is compared with")
    parser.add_argument("--family", default="eagle")
    parser.add_argument("--config", default="demo-smollm2", help="how the head is trained")
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--max-draft", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def spectrain(*given: object) -> None:
    """A command; what it says goes to stderr, where stdout is kept for the report."""
    command = [sys.executable, "-m", "spectrain", *map(str, given)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def prepare(options: argparse.Namespace, dtype: str, source: Path | None) -> Path:
    """The store of one number type; replies are those of `source`, if they are there already."""
    store = options.work / f"store-{dtype}"
    flags = ["--store", store, "--temperature", 0, "--set", f"dtype={dtype}"]
    for name in ("target", "limit", "max_new_tokens", "heldout", "seed", "prompts"):
        value = getattr(options, name)
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", value]
    if source is not None and not (store / MANIFEST).is_file():
        unfinished = store.with_name(store.name + ".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns("shard-*", ".lock"))
        unfinished.rename(store)
    if (store / MANIFEST).is_file():
        held = json.loads((store / MANIFEST).read_text())["settings"]["dtype"]
        flags += ["--overwrite"] * (held != dtype)  # replies stay, they are not asked for again
    spectrain("prepare", *flags)
    return store


def main() -> None:
    options = arguments()
    settle()
    dtypes = options.dtypes.split(",")
    exact = prepare(options, EXACT, None)
    for dtype in dtypes:
        store = exact if dtype == EXACT else prepare(options, dtype, exact)
        settings = ["--config", options.config, "--target", options.target, "--seed", options.seed]
        settings += ["--set", "steps=null", "--set", f"epochs={options.epochs:g}"]
        out = options.work / f"train-{dtype}"
        spectrain(f"train-{options.family}", "--store", store, "--out", out, *settings)

    from spectrain.core.target import Target
    from spectrain.data.store import FeatureStore
    from spectrain.evaluation.measure import measure, rows_for
    from spectrain.evaluation.summary import DEFINITIONS, differences, summarise
    from spectrain.heads.io import load_head

    target = Target.load(options.target, dtype=EXACT)
    store = FeatureStore.open(exact)
    rows, steps = store.rows("heldout"), options.max_draft
    used = {temperature: rows_for(temperature, rows) for temperature in (0.0, 1.0)}
    found, report = {}, {}
    for dtype in dtypes:
        head = load_head(options.work / f"train-{dtype}", device=target.device)
        head.check_target(target, str(options.work))
        head.bind(target.readout).to(target.dtype)
        found[dtype] = measure(target, head, store, used, steps)
        folder = options.work / ("store-" + dtype)
        shards = json.loads((folder / MANIFEST).read_text())["shards"]
        report[dtype] = {"store_bytes": sum(shard["bytes"] for shard in shards)} | {
            f"temperature {t:g}": summarise(found[dtype][t], steps, options.seed) for t in used
        }
    first = dtypes[0]
    for dtype in dtypes[1:]:
        report[f"{dtype} less {first}"] = {
            f"temperature {t:g}": differences(found[dtype][t], found[first][t], steps, options.seed)
            for t in used
        }
    report["definitions"] = DEFINITIONS | {
        "x less y": "marginal by position and tau by length of draft, paired by conversation"
    }
    report["train"] = store.manifest["counts"]
    report["environment"] = describe(target.device)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""How much memory and time a preparation takes before the target reads anything; JSON on stdout.

    python scripts/bench_million.py [--rows 1000000] [--folder DIR]

Short synthetic conversations with given replies go through sources, masks and manifest (`prepare
--set features=none`) with the embedded target's tokenizer, in a process of its own: a tenth of
them, then all. The difference of the peaks over the difference of the rows is the growth per row.
The target is a tiny one with that tokenizer, so that its weights (2.5 GB for an 8B model in int8,
540 MB for the embedded one) do not hide what the rows take.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from spectrain.core.environment import describe, settle

ASKED_MB = 1500  # at most
WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an
they which one you were her all she there would their we him been has when who will apple seven
river code list sum print letter table question answer number word
"""
MEASURE = """
import json, resource, sys
from spectrain.core.config import load_config
from spectrain.recipes.prepare import PrepareConfig, run
report = run(load_config(PrepareConfig, "prepare", flags=json.loads(sys.argv[1])))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"report": report, "peak_kb": peak}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None, help="where the files lie meanwhile")
    options = parser.parse_args()
    settle()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        target = tiny_target(folder / "target")
        parts = [measure(folder, target, rows) for rows in (options.rows // 10, options.rows)]
    small, large = parts
    growth = (large["peak_mb"] - small["peak_mb"]) * 1e6 / (large["rows"] - small["rows"])
    report = {
        "runs": parts,
        "growth_bytes_per_row": round(growth, 1),
        "asked": {"peak_mb": ASKED_MB, "met": large["peak_mb"] < ASKED_MB},
        "definition": "peak resident memory of the whole process, tiny target and libraries "
        "included; conversations of one user and one assistant turn",
        "environment": describe("cpu"),
    }
    print(json.dumps(report, indent=1))


def tiny_target(folder: Path) -> Path:
    """Four small random layers with the embedded target's tokenizer and template."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from spectrain.core.models import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve("smollm2-135m"), trust_remote_code=False)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measure(folder: Path, target: Path, rows: int) -> dict:
    """One preparation of so many rows in a process of its own."""
    prompts = folder / f"{rows}.jsonl"
    chance, words = random.Random(rows), WORDS.split()
    with open(prompts, "w") as file:
        for number in range(rows):
            user = f"{number}: " + " ".join(chance.choices(words, k=chance.randint(5, 20)))
            reply = " ".join(chance.choices(words, k=chance.randint(10, 40)))
            messages = [
                {"role": "user", "content": user},
                {"role": "assistant", "content": reply},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    store = folder / f"store-{rows}"
    flags = {
        "target": str(target),
        "prompts": str(prompts),
        "store": str(store),
        "features": "none",
        "regenerate": False,
    }
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(flags)], stdout=subprocess.PIPE, check=True
    )
    seconds = time.perf_counter() - started
    found = json.loads(done.stdout)
    counts = found["report"]["counts"]
    assert sum(counts["rows"].values()) + sum(counts["dropped"].values()) == rows
    size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    return {
        "rows": rows,
        "kept": counts["rows"],
        "tokens": counts["tokens"],
        "peak_mb": round(found["peak_kb"] * 1024 / 1e6, 1),
        "seconds": found["report"]["seconds"] | {"all": round(seconds, 1)},
        "microseconds_per_row": round(seconds / rows * 1e6, 1),
        "source_mb": round(prompts.stat().st_size / 1e6, 1),
        "store_mb": round(size / 1e6, 1),
    }


if __name__ == "__main__":
    main()

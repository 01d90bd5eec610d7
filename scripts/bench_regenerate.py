"""Replies for training, in units, against the library one at a time; JSON on stdout.

    python scripts/bench_regenerate.py [--target smollm2-135m] [--limit 64] [--units 32,64,128]
        [--rows 32,64]

All ways answer the same prompts greedily and stop where the target ends, so that they do the same
work; ids are compared. `units of n` is what `prepare` does: n prompts of similar length as one
batch (fixed composition: a rerun gives the same replies). `m rows of n` decodes such a unit m at a
time and gives a free row to the next prompt at once. The library (its own model, loop and cache)
answers one prompt at a time; its prompts are spread between the turns of the others, so that other
load on the machine hits all about equally.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from spectrain.core.environment import describe, settle

ASKED = 3.0  # times the library's throughput, at least


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=Path, default=None, help="default: the shipped ones")
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--units", default="32,64,128")
    parser.add_argument("--rows", default="32,64", help="of the largest unit")
    return parser.parse_args()


def ways(count: int, units: str, rows: str) -> dict[str, tuple[int, int]]:
    """name → (prompts of a unit, rows decoded at a time); what is no way of its own is left out."""
    sizes = sorted({min(int(n), count) for n in units.split(",")})
    found = {f"units of {size}": (size, size) for size in sizes}
    for at_once in (int(n) for n in filter(None, rows.split(","))):
        if at_once < sizes[-1]:
            found[f"{at_once} rows of {sizes[-1]}"] = (sizes[-1], at_once)
    return found


def in_units(target, prompts, longest: int, size: int, rows: int) -> dict:
    """Replies in the order of `prompts`, and where the time went."""
    from spectrain.generator.speculate import Clock, Generator

    # As data/replies.plan_units groups them.
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), prompts[i].tolist()))
    replies, clock, slots, steps = {}, Clock(), 0, 0
    started, of_cpu = time.perf_counter(), time.process_time()
    for first in range(0, len(order), size):
        unit = order[first : first + size]
        generator = Generator(target)
        done = generator.generate([prompts[i] for i in unit], longest, rows=rows)
        replies |= dict(zip(unit, (c.tokens for c in done), strict=True))
        clock.add(generator.clock)
        steps += sum(c.forwards for c in done)
        slots += generator.clock.steps * min(rows, len(unit))
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - of_cpu,
        "replies": [replies[i] for i in range(len(prompts))],
        "prefill_seconds": clock.prefill,
        "steps": clock.steps,
        "step_ms": 1e3 * clock.total / clock.steps,
        "verify_share": clock.verify / clock.total if clock.verify else None,
        "rows_in_work": steps / slots,
    }


def main() -> None:
    options = arguments()
    settle()
    from spectrain.core.target import Target
    from spectrain.data.reading import read_conversations
    from spectrain.evaluation.race import stock
    from spectrain.recipes.generate import ids_of
    from spectrain.recipes.prepare import SHIPPED_PROMPTS

    target = Target.load(options.target, dtype=options.dtype)
    found = read_conversations(options.prompts or SHIPPED_PROMPTS, "last", keep_order=True)
    prompts = [ids_of(target, conversation) for conversation in found[: options.limit]]
    longest = options.max_new_tokens
    chosen = ways(len(prompts), options.units, options.rows)
    library = stock(target, longest)
    library(prompts[0])  # warm up
    in_units(target, prompts[:4], 4, 4, 4)

    results, seconds, of_cpu, replies = {}, 0.0, 0.0, []
    for turn, (name, (size, rows)) in enumerate(chosen.items()):
        results[name] = in_units(target, prompts, longest, size, rows)
        ends = [len(prompts) * place // len(chosen) for place in (turn, turn + 1)]
        started, cpu = time.perf_counter(), time.process_time()
        replies += [library(prompt).tokens for prompt in prompts[slice(*ends)]]
        seconds += time.perf_counter() - started
        of_cpu += time.process_time() - cpu
        print(f"{turn + 1}/{len(chosen)} {name}", file=sys.stderr)

    baseline = sum(map(len, replies)) / seconds
    report = {
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_new_tokens": longest,
        "dtype": str(target.dtype).removeprefix("torch."),
        "transformers, one at a time": {
            "seconds": seconds,
            "cpu_seconds": of_cpu,
            "tokens": sum(map(len, replies)),
            "tokens_per_second": baseline,
        },
    }
    for name, own in results.items():
        ours = own.pop("replies")
        rate = sum(map(len, ours)) / own["seconds"]
        same = sum(a == b for a, b in zip(ours, replies, strict=True))
        report[name] = {
            "tokens": sum(map(len, ours)),
            "tokens_per_second": rate,
            "over transformers": rate / baseline,
            "over transformers, by cpu time": of_cpu / own["cpu_seconds"],
            "same ids as transformers": same,
            **own,
        }
    best = max(report[name]["over transformers"] for name in results)
    report["asked"] = {"the best way over transformers": ASKED, "met": best >= ASKED}
    report["definitions"] = {
        "tokens_per_second": "new tokens, the stop token included, over all seconds, prefill too",
        "by cpu time": "the same of the time this process spent on all its threads, which other "
        "processes on the machine disturb less (both did the same work)",
        "verify_share": "of the time in steps: the target's forwards; the rest is choosing tokens, "
        "cache and bookkeeping (null where steps are replayed)",
        "rows_in_work": "rows that still had something to say, of the rows a unit began with, mean "
        "over steps; on a CPU rows that are done are dropped once they are a quarter",
        "same ids": "in float32 all but near ties; in half precision other batches round otherwise",
    }
    report["environment"] = describe(target.device)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

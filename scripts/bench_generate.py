"""What speculation is worth on this machine, and what it is compared with; JSON on stdout.

    python scripts/bench_generate.py --head runs/demo/train/head [--prompts FILE] [--limit 24]
        [--batches 8,32] [--quantize int8]

1. verify(n): one target forward over n tokens behind a context, against n = 1; a draft step.
2. One prompt at a time, greedily, all ways in turn on the same prompts: the head as
   `spectrain plan` chose (if it has a plan), as a chain, prompt lookup and plain decoding by this
   engine; `transformers` plain and with its own prompt lookup. Ids are compared. Speedups are of
   tokens a second over all prompts with a bootstrap interval, and quartiles over the prompts.
3. The same with the target's weights quantised (no `transformers` there: it runs another target).
4. Batches: so many prompts at a time, plain and as planned in turn, `--repeats` times; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from spectrain.core.environment import describe, settle

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 16)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--head", required=True)
    parser.add_argument("--prompts", type=Path, default=None, help="default: the shipped ones")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=2)
    parser.add_argument("--lookup", type=int, default=3)
    parser.add_argument("--context", type=int, default=150)
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--batches", default="")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def costs(target, head, options) -> dict:
    """Medians of verify(n) and of the draft step, all widths in turn."""
    from spectrain.generator.costs import measure

    found = measure(target, head, 1, options.context, WIDTHS, 15, (1, 2, 3))
    one = found.verify[1]
    return {
        "context": options.context,
        "verify_ms": found.verify,
        "verify_over_one": {n: round(ms / one, 3) for n, ms in found.verify.items()},
        "extend_ms": found.extend,
        "expand_ms": found.expand,
        "expand_over_verify_one": round(found.expand[1] / one, 3),
    }


def planned(target, head, folder, rows) -> dict | None:
    """What `spectrain plan` chose, as options of `Generator`; None without a plan that fits."""
    from spectrain.generator.saved_plan import SavedPlan
    from spectrain.heads.io import find_head
    from spectrain.heads.tree import TreeShape

    plan = SavedPlan.beside(find_head(folder), target)
    if plan is None or plan.unfit(target):
        print("no plan for this target, dtype and machine", file=sys.stderr)
        return None
    return {"tree": plan.for_batch(rows).tree or TreeShape.chain(0)}


def one_at_a_time(target, head, prompts, options, library: bool) -> dict:
    from spectrain.evaluation.race import of_generator, race, speedup, stock, summary
    from spectrain.generator.sampling import Sampling
    from spectrain.generator.speculate import Clock, Generator

    ways = {"head, chain": (head, {"draft_tokens": options.draft_tokens})}
    plan = planned(target, head, options.head, 1)
    if plan is not None:
        ways = {"head, planned": (head, plan), **ways}
    ways |= {
        "prompt lookup": (None, {"lookup": options.lookup, "draft_tokens": options.draft_tokens}),
        "plain": (None, {}),
    }
    longest = options.max_new_tokens
    clocks = {name: Clock() for name in ways}
    methods = {
        name: of_generator(Generator(target, own, **way), longest, Sampling(), clocks[name])
        for name, (own, way) in ways.items()
    }
    baselines = ["plain"]
    if library:
        methods["transformers"] = stock(target, longest)
        methods["transformers, prompt lookup"] = stock(target, longest, prompt_lookup_num_tokens=10)
        baselines += ["transformers"]
    results = race(methods, prompts, clocks)
    report = {}
    for name, own in results.items():
        row = summary(own["done"], own["seconds"], clocks.get(name))
        for baseline in baselines:
            other = results[baseline]
            ratios = [
                (len(a.tokens) / s) / (len(b.tokens) / t)
                for a, s, b, t in zip(
                    own["done"], own["seconds"], other["done"], other["seconds"], strict=True
                )
                if a.tokens and b.tokens
            ]
            row[f"over {baseline}"] = speedup(own, other, 0) | {
                "quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)]
            }
        row["same tokens as plain"] = sum(
            a.tokens == b.tokens for a, b in zip(own["done"], results["plain"]["done"], strict=True)
        )
        report[name] = row
    return report


def in_batches(target, head, prompts, options, rows: int) -> dict:
    """Tokens a second of all prompts, `rows` at a time."""
    from spectrain.generator.speculate import Generator

    ways = {"plain": (None, {}), "head, chain": (head, {"draft_tokens": options.draft_tokens})}
    plan = planned(target, head, options.head, rows)
    if plan is not None:
        ways["head, planned"] = (head, plan)
    prompts = (prompts * -(-2 * rows // len(prompts)))[: 2 * rows]
    rates: dict[str, list[float]] = {name: [] for name in ways}
    replies = {}
    for turn in range(options.repeats + 1):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            own, way = ways[name]
            generator = Generator(target, own, **way)
            started = time.perf_counter()
            done = generator.generate(prompts, options.max_new_tokens, rows=rows)
            seconds = time.perf_counter() - started
            replies[name] = [c.tokens for c in done]
            if turn:  # the first warms up
                rates[name].append(sum(len(c.tokens) for c in done) / seconds)
    plain = rates["plain"]
    return {
        name: {
            "tokens_per_second": statistics.median(own),
            "over plain": statistics.median(a / b for a, b in zip(own, plain, strict=True)),
            "spread": [min(own), max(own)],
            "nodes": None if name != "head, planned" else ways[name][1]["tree"].nodes,
            "same tokens as plain": sum(
                a == b for a, b in zip(replies[name], replies["plain"], strict=True)
            ),
            "prompts": len(prompts),
        }
        for name, own in rates.items()
    }


def main() -> None:
    options = arguments()
    settle()
    from spectrain.core.target import Target
    from spectrain.data.reading import read_conversations
    from spectrain.heads.io import load_head
    from spectrain.recipes.drafting import make_ready
    from spectrain.recipes.generate import ids_of
    from spectrain.recipes.prepare import SHIPPED_PROMPTS

    found = read_conversations(options.prompts or SHIPPED_PROMPTS, "last", keep_order=True)
    report: dict = {"max_new_tokens": options.max_new_tokens}
    for kind in (None, options.quantize) if options.quantize else (None,):
        target = Target.load(options.target, quantize=kind)
        head = load_head(options.head, device=target.device)
        head.check_target(target, options.head)
        make_ready(head, target)
        prompts = [ids_of(target, conversation) for conversation in found[: options.limit]]
        report["prompts"] = len(prompts)
        own = {"costs": costs(target, head, options)}
        own["one at a time"] = one_at_a_time(target, head, prompts, options, kind is None)
        for rows in map(int, filter(None, options.batches.split(","))):
            own[f"{rows} at a time"] = in_batches(target, head, prompts, options, rows)
        report[kind or "as loaded"] = own
    report["environment"] = describe(target.device)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

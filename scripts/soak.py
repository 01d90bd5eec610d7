"""Thousands of requests with random settings: every reply right, and no memory kept.

    python scripts/soak.py --requests 10000 --seed 0

A tiny seeded target decodes short prompts in streams whose settings are drawn at random: greedy or
sampled, warps, penalties, shortest and longest replies, stop tokens and strings, rows, and a way to
draft (none, chain, static or grown tree, prompt lookup; likeliest or drawn children). Every reply
that plain decoding of the same request determines (all but those of drawn children) is compared
with it. The last quarter are the first requests once more: then neither resident memory nor the
number of live tensors or other objects may grow. (Before, libraries under torch keep something for
every new shape, up to a limit of their own.)

JSON on stdout; exit 1 on a wrong reply or growth.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from spectrain.core.environment import settle

settle()

import psutil  # noqa: E402
import torch  # noqa: E402
from gpu.scene import Scene, good_head, make_head  # noqa: E402
from torch import Tensor  # noqa: E402

from spectrain.core.target import Target  # noqa: E402
from spectrain.generator.completion import Completion  # noqa: E402
from spectrain.generator.sampling import Sampling  # noqa: E402
from spectrain.generator.speculate import Generator  # noqa: E402
from spectrain.heads.tree import TreeDefaults, TreeShape  # noqa: E402

# Growth in the last quarter that is called a leak.
MOST = {"rss_mb": 8, "tensors": 0, "objects": 100}


@dataclass
class Case:
    """One stream of requests."""

    way: str
    drawn: bool
    sampling: Sampling
    rows: int
    new: int
    prompts: list[Tensor]


class Requests:
    """Cases one after the other, all from one seed."""

    def __init__(self, target: Target, seed: int) -> None:
        self.random, self.target = random.Random(seed), target
        self.heads = {
            "eagle3": make_head(target, "eagle3", steps=4),
            "good": good_head(target, 0.2),
            "half good": good_head(target, 0.5),
            "medusa": make_head(target, "medusa", steps=4),
            "mtp": make_head(target, "mtp-sequential", steps=4),
        }

    def case(self) -> Case:
        pick = self.random
        way = pick.choice(["plain", "chain", "chain", "static", "grown", "lookup"])
        sampling = Sampling(seed=pick.randrange(1 << 30))
        if pick.random() < 0.6:
            sampling = replace(
                sampling,
                temperature=pick.choice([0.3, 0.8, 1.0, 1.5]),
                top_k=pick.choice([0, 1, 5, 40, 1000]),
                top_p=pick.choice([1.0, 0.95, 0.5]),
                min_p=pick.choice([0.0, 0.0, 0.02, 0.3]),
            )
        if pick.random() < 0.4:
            sampling = replace(
                sampling,
                repetition_penalty=pick.choice([1.0, 1.1, 1.6, 0.8]),
                min_new_tokens=pick.choice([0, 1, 6, 30]),
                suppress=tuple(pick.sample(range(3, 380), pick.choice([0, 1, 50]))),
            )
        if pick.random() < 0.5:
            # Frequent ids and texts, so that replies end in the middle of blocks.
            sampling = replace(
                sampling,
                stop_ids=tuple(pick.sample(range(3, 380), pick.choice([0, 3, 20]))),
                stop_strings=tuple(
                    pick.sample(["e", "th", "a", " o", "Qu", "<"], pick.randint(0, 2))
                ),
            )
        count, words = pick.randint(1, 12), torch.Generator().manual_seed(pick.randrange(1 << 30))
        prompts = [
            torch.randint(3, 380, (pick.choice([1, 2, 5, 9, 20]),), generator=words).repeat(
                pick.choice([1, 1, 3])
            )
            for _ in range(count)
        ]
        drawn = way in ("chain", "static") and not sampling.greedy and pick.random() < 0.5
        new = pick.choice([0, 1, 2, 5, 12, 24])
        return Case(way, drawn, sampling, pick.randint(1, 8), new, prompts)

    def generator(self, case: Case) -> Generator:
        pick = self.random
        if case.way == "plain":
            return Generator(self.target)
        if case.way == "lookup":
            return Generator(
                self.target, lookup=pick.randint(1, 4), draft_tokens=pick.randint(1, 6)
            )
        head = self.heads[pick.choice(list(self.heads))]
        proposal = "drawn" if case.drawn else "top-k"
        if case.way == "chain":
            return Generator(self.target, head, pick.randint(1, 4), proposal=proposal)
        if case.way == "static":
            return Generator(self.target, head, tree=self.shape(), proposal=proposal)
        top_k, depth = pick.randint(1, 4), pick.randint(1, 4)
        nodes = pick.randint(1, top_k + (depth - 1) * top_k**2)
        return Generator(
            self.target, head, tree=TreeDefaults(top_k=top_k, depth=depth, nodes=nodes)
        )

    def shape(self) -> TreeShape:
        """A random tree of at most 10 nodes and 4 levels."""
        paths: list[tuple[int, ...]] = [()]
        for _ in range(self.random.randint(1, 10)):
            parent = self.random.choice([path for path in paths if len(path) < 4])
            child = (*parent, sum(path[:-1] == parent for path in paths if path))
            paths.append(child)
        return TreeShape(paths=tuple(paths[1:]))


def replies(generator: Generator, case: Case) -> Iterator[tuple[int, Completion]]:
    """Through the stream; its parts have to be the whole."""
    parts: dict[int, int] = Counter()
    for told in generator.stream(case.prompts, case.new, case.sampling, case.rows):
        parts[told.index] += told.added
        if told.completion.finish:
            assert parts[told.index] == len(told.completion.tokens), "told parts are not the whole"
            yield told.index, told.completion


def plain(target: Target, case: Case, index: int) -> Completion:
    """The same request alone and without drafts."""
    stream = Generator(target).stream(
        [case.prompts[index]], case.new, case.sampling, numbers=[index]
    )
    return [told.completion for told in stream][-1]


def soak(requests: int, seed: int, every: int = 200) -> dict[str, Any]:
    """Decode until so many requests are done; see the top of the file."""
    torch.set_num_threads(1)
    target = Scene(torch.device("cpu"), rehearse=True).target("small", torch.float32)
    source, counts, wrong = Requests(target, seed), Counter(), []
    started, memory, done, next_look, again = time.monotonic(), [], 0, 0, False
    while done < requests:
        if not again and done >= 0.75 * requests:
            source, again, next_look = Requests(target, seed), True, done + every
            before = held()
        case = source.case()
        generator = source.generator(case)
        finished = dict(replies(generator, case))
        missing = set(range(len(case.prompts))) - finished.keys()
        if missing:
            wrong.append({"missing": sorted(missing), "case": describe(case)})
        for index, got in finished.items():
            counts["tokens"] += len(got.tokens)
            counts[f"ended by {'string' if got.stopped_by else got.finish}"] += 1
            counts["accepted"] += max(0, got.committed - got.forwards)
            if case.drawn:
                counts["not compared"] += 1
                continue
            counts["compared"] += 1
            truth = plain(target, case, index)
            if (got.tokens, got.finish, got.stopped_by) != (
                truth.tokens, truth.finish, truth.stopped_by
            ):  # fmt: skip
                told = {
                    "got": got.tokens,
                    "plain": truth.tokens,
                    "finish": [got.finish, truth.finish],
                }
                wrong.append({"request": index, **told, "case": describe(case)})
        done += len(case.prompts)
        counts[f"requests, {case.way}"] += len(case.prompts)
        del case, generator, finished
        if done >= next_look:
            memory.append({"requests": done, **held()})
            next_look += every
            print(f"{done} requests, {len(wrong)} wrong, {memory[-1]}", file=sys.stderr, flush=True)
    after = held()
    growth = {key: round(after[key] - before[key], 1) for key in MOST}
    return {
        "requests": done,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "wrong": len(wrong),
        "first_wrong": wrong[:5],
        "growth": growth,
        "grows": any(growth[key] > most for key, most in MOST.items()),
        "memory": memory,
        "counts": dict(sorted(counts.items())),
    }


def describe(case: Case) -> str:
    return f"{case.way}, drawn {case.drawn}, {case.rows} rows, {case.new} new, {case.sampling}"


def held() -> dict[str, float]:
    """Resident memory after everything that is free went back, in MB; live tensors; all objects
    that the collector knows."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    objects = [type(thing) for thing in gc.get_objects()]
    return {
        "rss_mb": round(psutil.Process().memory_info().rss / 1e6, 1),
        "tensors": sum(issubclass(kind, torch.Tensor) for kind in objects),
        "objects": len(objects),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = soak(options.requests, options.seed)
    print(json.dumps(report, indent=1))
    return int(report["wrong"] > 0 or report["grows"])


if __name__ == "__main__":
    sys.exit(main())

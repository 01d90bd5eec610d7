"""Decode the same prompts by several methods in one run, in turn, so that the ratios are fair."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spectrain.core.pretrained import library_model
from spectrain.core.progress import progress
from spectrain.core.target import Target
from spectrain.evaluation.bootstrap import intervals, ratio
from spectrain.generator.speculate import Clock, Completion, Generator

Method = Callable[[Tensor], Completion]
WARM_UP = 2


def race(methods: dict[str, Method], prompts: list[Tensor], clocks: dict[str, Clock]) -> dict:
    """Every method on every prompt; returns name → {"done": completions, "seconds": [P]}.

    The order of the methods rotates from prompt to prompt: other load on the machine hits all of
    them about equally. Two prompts are decoded before, unmeasured, to warm up. `clocks` collects
    the seconds by stage of those methods that keep a clock.
    """
    names = list(methods)
    result: dict[str, dict[str, list]] = {name: {"done": [], "seconds": []} for name in names}
    for prompt in prompts[:WARM_UP]:
        for name in names:
            methods[name](prompt)
    for clock in clocks.values():
        clock.clear()
    with progress(len(prompts) * len(names), "generate", "replies") as bar:
        for index, prompt in enumerate(prompts):
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                started = time.perf_counter()
                completion = methods[name](prompt)
                _settle()
                result[name]["seconds"].append(time.perf_counter() - started)
                result[name]["done"].append(completion)
                bar.update(1, method=name)
    return result


def stock(
    target: Target, max_new_tokens: int, model: nn.Module | None = None, **options: Any
) -> Method:
    """Greedy decoding by `transformers` itself: its own model, cache and loop, nothing of ours.

    model: what `library_model` gave, if it is loaded already; options: further ones of generate().
    """
    if model is None:
        model = library_model(target.name, target.dtype, target.device)

    @torch.inference_mode()
    def decode(prompt: Tensor) -> Completion:
        row = prompt[None].to(target.device)
        tokens = model.generate(
            row,
            attention_mask=torch.ones_like(row),
            do_sample=False,
            max_new_tokens=min(max_new_tokens, target.max_length - len(prompt)),
            eos_token_id=list(target.stop_ids),
            pad_token_id=target.stop_ids[0] if target.stop_ids else None,
            **options,
        )[0, len(prompt) :].tolist()
        finish = "stop" if tokens and tokens[-1] in target.stop_ids else "length"
        return Completion(tokens, finish, max(0, len(tokens) - 1))

    return decode


def summary(done: list[Completion], seconds: list[float], clock: Clock | None) -> dict[str, Any]:
    """Tokens, speed and τ of one method; `stages` are shares of the time after the prefill."""
    tokens = sum(len(completion.tokens) for completion in done)
    forwards = sum(completion.forwards for completion in done)
    runs: Counter[int] = Counter()
    for completion in done:
        runs.update(completion.runs)
    report: dict[str, Any] = {
        "tokens": tokens,
        "seconds": round(sum(seconds), 3),
        "tokens_per_second": tokens / sum(seconds),
        "target_forwards": forwards,
        "tau": sum(c.committed for c in done) / forwards if forwards else None,
        "runs": {str(run): runs[run] for run in sorted(runs)},
    }
    if clock is not None and clock.steps:
        report["stages"] = {
            "prefill_seconds": round(clock.prefill, 3),
            "step_ms": 1e3 * clock.total / clock.steps,
        }
        if clock.verify:  # unknown where steps are replayed
            report["stages"] |= {
                "draft": clock.draft / clock.total,
                "verify": clock.verify / clock.total,
                "overhead": clock.overhead / clock.total,
            }
    return report


def speedup(fast: dict[str, list], slow: dict[str, list], seed: int) -> dict[str, float | None]:
    """Tokens per second of `fast` over `slow`, with a bootstrap interval over prompts."""

    def columns(entry: dict[str, list], name: str) -> dict[str, np.ndarray]:
        tokens = [len(completion.tokens) for completion in entry["done"]]
        return {
            f"{name}_tokens": np.array(tokens, dtype=float)[:, None],
            f"{name}_seconds": np.array(entry["seconds"])[:, None],
        }

    def statistic(sums: dict[str, np.ndarray]) -> np.ndarray:
        quick = ratio(sums["fast_tokens"], sums["fast_seconds"])
        return ratio(quick, ratio(sums["slow_tokens"], sums["slow_seconds"]))

    return intervals(columns(fast, "fast") | columns(slow, "slow"), statistic, seed)[0]


def of_generator(generator: Generator, max_new_tokens: int, sampling, clock: Clock) -> Method:
    """A generator as a method; its seconds by stage are added to `clock`."""

    def decode(prompt: Tensor) -> Completion:
        completion = generator.generate([prompt], max_new_tokens, sampling)[0]
        clock.add(generator.clock)
        return completion

    return decode


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

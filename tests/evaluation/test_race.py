"""Comparisons in one run: numerator and baseline, fair turns, no double counting."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

from spectrain.evaluation import race
from spectrain.generator.speculate import Clock, Completion


def entry(tokens, seconds):
    return {"done": [Completion([0] * n, "length") for n in tokens], "seconds": seconds}


def test_speedup_is_fast_over_slow():
    """30 tokens in 3 s against 20 in 5 s: 10 per second over 4 per second."""
    fast, slow = ([10, 20], [1.0, 2.0]), ([10, 10], [2.0, 3.0])
    result = race.speedup(entry(*fast), entry(*slow), seed=0)
    assert result == {"value": pytest.approx(2.5), "low": None, "high": None}
    fast, slow = ([4 * part for part in one] for one in (fast, slow))
    result = race.speedup(entry(*fast), entry(*slow), seed=0)
    assert result["value"] == pytest.approx(2.5)
    assert result["low"] < 2.5 < result["high"]


def test_turns_rotate_and_the_warm_up_is_not_counted(monkeypatch):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")
    calls = []
    clocks = {"a": Clock()}

    def method(name, pause):
        def decode(prompt):
            calls.append((name, int(prompt[0])))
            time.sleep(pause)
            clocks["a"].add(Clock(verify=1.0, total=1.0, steps=1))
            return Completion([1, 2], "length", 1, Counter({0: 1}))

        return decode

    prompts = [torch.tensor([n]) for n in range(3)]
    result = race.race({"a": method("a", 0.0), "b": method("b", 0.02)}, prompts, clocks)
    warm, raced = calls[: 2 * race.WARM_UP], calls[2 * race.WARM_UP :]
    assert warm == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert raced == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert min(result["b"]["seconds"]) >= 0.02 > max(result["a"]["seconds"])
    assert clocks["a"].steps == 6


def test_summary_counts_by_hand():
    """5 tokens by 2 forwards after the prefill's own: τ = 4 / 2."""
    done = [
        Completion([1, 2, 3, 4, 5], "stop", 2, Counter({1: 2})),
        Completion([7], "stop", 0, Counter()),
    ]
    clock = Clock(prefill=0.5, draft=1.0, verify=2.5, total=4.0, steps=2)
    report = race.summary(done, [2.0, 1.0], clock)
    assert report["tokens"] == 6
    assert report["tokens_per_second"] == 2.0
    assert report["tau"] == 2.0
    assert report["runs"] == {"1": 2}
    assert report["stages"]["overhead"] == pytest.approx(0.125)
    assert report["stages"]["step_ms"] == 2000
    assert race.summary(done[1:], [1.0], None)["tau"] is None

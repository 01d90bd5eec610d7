"""Stores to train on, and `spectrain train-…` as a process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain.recipes import prepare

WORDS = ["apple", "dog", "two", "word", "letter", "seven", "fox", "quick", "lazy", "question"]
TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def make_store(tiny_path, tmp_path_factory):
    """make_store(seed, answer, heldout) → a store of 24 conversations, some answered by a single
    letter."""

    def make(seed, answer=str.upper, heldout=0.1):
        folder = tmp_path_factory.mktemp("store")
        draw = random.Random(seed)
        prompts = folder / "prompts.jsonl"
        with prompts.open("w") as file:
            for number in range(24):
                words = " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))
                reply = answer(words) if number % 4 else "a"
                turns = [("user", f"{number} {words}"), ("assistant", reply)]
                messages = [{"role": role, "content": text} for role, text in turns]
                file.write(json.dumps({"messages": messages}) + "\n")
        prepare.run(
            prepare.PrepareConfig(
                target=str(tiny_path),
                prompts=prompts,
                store=folder / "store",
                regenerate=False,
                heldout=heldout,
                dtype="float32",
            )
        )
        return folder / "store"

    return make


@pytest.fixture(scope="session")
def store(make_store):
    return make_store(0)


@pytest.fixture
def command(store, tiny_path, tmp_path):
    """command(out, verb="train-eagle", processes=1, at=None, **settings) → the finished process.

    The folder of the run is tmp_path / out, a key of settings may be dotted (as `**{"a.b": 1}`);
    at: what signalled.py is told, (step, signal, whom).
    """

    def run(out, verb="train-eagle", processes=1, at=None, **settings):
        settings = {
            **{"steps": 6, "batch_size": 8, "micro_batch": 4, "save_every": 2, "log_every": 1},
            **{"head.steps": 2, "lr": 1e-2},
            **settings,
        }
        if verb != "train-draft":
            settings.setdefault("head.draft_vocab_size", 40)
        launcher = []
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone"]
            launcher += ["--nproc-per-node", str(processes)]
        if at is not None:
            what = [str(TESTS / "signalled.py"), *map(str, at)]
        else:
            what = ["-m", "spectrain"]
        flags = ["--target", str(tiny_path), "--store", str(store), "--out", str(tmp_path / out)]
        flags += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        return subprocess.run(
            [sys.executable, *launcher, *what, verb, *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run

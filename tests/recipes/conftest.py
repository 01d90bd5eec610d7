"""Stores to train on, and the command line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState, GradientState
from typer.testing import CliRunner

from spectrain.cli import app
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
    """command(out, verb="train-eagle", processes=1, at=None, **settings) → returncode, stdout,
    stderr of the command, whose `--out` is tmp_path / out; keys of settings may be dotted.

    at: what signalled.py is told, (step, signal, whom). Without it one process is this one.
    """

    def run(out, verb="train-eagle", processes=1, at=None, store=store, **settings):
        settings = {
            **{"steps": 6, "batch_size": 8, "micro_batch": 4, "save_every": 2, "log_every": 1},
            **{"head.steps": 2, "head.draft_vocab_size": 40, "lr": 1e-2},
            **settings,
        }
        flags = ["--target", str(tiny_path), "--store", str(store), "--out", str(tmp_path / out)]
        flags += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        if processes == 1 and at is None:
            done = CliRunner().invoke(app, [verb, *flags])
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
            return SimpleNamespace(
                returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr
            )
        launcher = []
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone"]
            launcher += ["--nproc-per-node", str(processes)]
        what = [str(TESTS / "signalled.py"), *map(str, at)] if at else ["-m", "spectrain"]
        return subprocess.run(
            [sys.executable, *launcher, *what, verb, *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run

"""`train-…` stopped from outside: by signals, by the death of a process, with other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spectrain.trainer.metrics import read_metrics


def weights(out, part="head/model"):
    return load_file(out / f"{part}.safetensors")


def assert_equal_runs(one, two):
    """Bit for bit: the head, what the run learnt on the way, and the report but for its times."""
    for name, value in weights(one).items():
        assert torch.equal(value, weights(two)[name]), name
    rows = [read_metrics(out) for out in (one, two)]
    for row in (*rows[0], *rows[1]):
        del row["tokens_per_second"]
    assert rows[0] == rows[1]


def assert_close_runs(one, two):
    """The same rows in the same steps, and losses equal to rounding."""
    expected, rows = read_metrics(one), read_metrics(two)
    assert [r["step"] for r in rows] == [r["step"] for r in expected]
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in expected], rel=1e-4)
    for key in ("seen", "supervised_tokens"):
        assert [r[key] for r in rows] == [r[key] for r in expected]


def steps_saved(out):
    return sorted(int(path.name[-8:]) for path in (out / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_saves_and_the_same_command_goes_on(
    command, tmp_path, ctrl_c_interrupts, number, code
):
    """With everything that has a memory of its own: moments, the mean of the weights, the order."""
    more = {"ema": 0.9, "optimizer": "muon", "save_every": 100}
    more |= {"lr_factors.lm_head.*": 0.5, "lr_factors.fc.*": 2.0}
    done = command("whole", **more)
    assert done.returncode == 0, done.stderr
    assert "the head is the running mean of its weights (decay 0.9)" in done.stdout
    done = command("cut", at=(3, int(number), 0), **more)
    assert done.returncode == code, done.stderr
    assert "checkpoint of step 4 of 6 written" in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "error: interrupted; the same command goes on where it was"
    )
    assert steps_saved(tmp_path / "cut") == [4]
    done = command("cut", **more)
    assert "going on from step 4 of 6" in done.stderr
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")
    refused = command("cut", **more | {"lr_factors.fc.*": 3.0})
    assert refused.returncode == 2
    assert "started with lr_factors = [['lm_head.*', 0.5], ['fc.*', 2.0]]" in refused.stderr


def test_other_numbers_of_processes_and_every_way_to_stop(command, tmp_path, ctrl_c_interrupts):
    """Cases 26 and 27. Two processes, told to stop by their launcher; two again, one of which is
    killed (the launch fails); one; and two to the end: the rows and losses of one process alone."""
    one = command("one", steps=9)
    assert one.returncode == 0, one.stderr
    out = tmp_path / "many"

    def part(expected, **options):
        done = command("many", steps=9, **options)
        assert (done.returncode == 0) == expected, done.stderr
        return done.stderr

    said = part(False, processes=2, at=(2, int(signal.SIGTERM), "launcher"))
    assert "checkpoint of step 3 of 9 written" in said
    assert max(steps_saved(out)) == 3
    said = part(False, processes=2, at=(4, int(signal.SIGKILL), 1))
    assert "going on from step 3 of 9" in said
    assert "exitcode  : -9" in said
    assert max(steps_saved(out)) == 4
    said = part(False, at=(5, int(signal.SIGINT), 0))
    assert "going on from step 4 of 9" in said
    assert max(steps_saved(out)) == 6
    said = part(True, processes=2)
    assert "going on from step 6 of 9" in said
    assert_close_runs(tmp_path / "one", out)


def test_a_stop_of_one_process_is_a_stop_of_all(command, tmp_path, ctrl_c_interrupts):
    """None is left behind waiting for the other; rank 0 writes, though rank 1 was asked. (The
    launcher ends the one that is a moment later, the checkpoint is written by then.)"""
    done = command("run", processes=2, at=(2, int(signal.SIGTERM), 1))
    assert done.returncode != 0
    assert "checkpoint of step 3 of 6 written" in done.stderr
    assert "exitcode  : 143" in done.stderr
    assert "error: interrupted; the same command goes on where it was" in done.stderr
    assert steps_saved(tmp_path / "run") == [2, 3]


@pytest.mark.parametrize("verb", ["train-eagle", "train-mtp"])
def test_a_batch_of_8_is_2_of_4_and_4_of_2(command, tmp_path, verb):
    """One process at once; two processes with half of it each; four micro-batches of two, as they
    come and packed into rows: Σ over all of them is divided once, so nothing else can come out."""
    ways = {
        "1 x 8": {"micro_batch": 8},
        "2 x 4": {"micro_batch": 4, "processes": 2},
        "4 of 2": {"micro_batch": 2},
        "packed": {"micro_batch": 1, "pack_length": 90},
    }
    for name, changes in ways.items():
        done = command(name, verb, steps=4, lr=1e-3, **changes)
        assert done.returncode == 0, done.stderr
    for name in ways:
        assert_close_runs(tmp_path / "1 x 8", tmp_path / name)
        for tensor, value in weights(tmp_path / "1 x 8").items():
            # Adam divides by the gradient's size: rounding shows where that is near zero.
            assert torch.allclose(value, weights(tmp_path / name)[tensor], atol=2e-4), tensor


def test_a_launcher_that_is_terminated_takes_its_processes_along(store, tiny_path, tmp_path):
    """accelerate's launcher for CPUs passes nothing on: what it started hears of its end."""
    settings = {"steps": 100_000, "save_every": 100_000, "save_minutes": 0, "head.steps": 2}
    settings |= {"head.draft_vocab_size": 40}
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2", "--cpu"]
    running = subprocess.Popen(
        [sys.executable, *launch, "-m", "spectrain", "train-eagle", "--target", str(tiny_path)]
        + ["--store", str(store), "--out", str(tmp_path / "run")]
        + [part for key, value in settings.items() for part in ("--set", f"{key}={value}")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        while not (metrics.is_file() and metrics.stat().st_size):
            assert running.poll() is None, running.stderr.read()
            # A pause that notices the end of the launcher.
            try:
                running.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        running.terminate()
        said = running.communicate(timeout=120)[1]  # until the last process has closed it
    finally:
        running.kill()
    assert "of 100000 written" in said
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert json.loads((Path(folder) / "state.json").read_text())["step"] > 0

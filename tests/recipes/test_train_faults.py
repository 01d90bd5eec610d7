"""`train-…` and what breaks under it: a kill at any moment, a full disk, poisoned features."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from damaged import seal
from safetensors.torch import load_file

from spectrain.data.store import FeatureStore
from spectrain.trainer.metrics import read_metrics
from spectrain.trainer.order import Order

TIMES = {"seconds", "tokens_per_second", "peak_rss_mb", "head", "best_head"}


def outcome(out):
    """All that a run leaves but its times: the head's bytes, the curve, the report."""
    curve = read_metrics(out)
    for row in curve:
        del row["tokens_per_second"]
    report = json.loads((out / "report.json").read_text())
    report["report"] = {k: v for k, v in report["report"].items() if k not in TIMES}
    return (out / "head" / "model.safetensors").read_bytes(), curve, report


AT_ANY_MOMENT = """
import functools, os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from spectrain.recipes import train

config = train.TrainConfig.model_validate_json(sys.argv[1])
train.Target.load = functools.cache(train.Target.load)  # once, before forking
train.Target.load(config.target, dtype="float32", device="cpu", pack_weights=False)

def start(name):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        train.run(config.model_copy(update={"out": config.out / name}))
        os._exit(0)
    return pid

def finish(name):
    assert os.waitpid(start(name), 0)[1] == 0

begun = time.perf_counter()
finish("whole")
longest = 1.2 * (time.perf_counter() - begun)
random = random.Random(0)
kills = runs = 0
while kills < 8:
    pid = start(f"run-{runs}")
    time.sleep(random.uniform(0, longest))
    os.kill(pid, signal.SIGKILL)
    if os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
        kills += 1
    else:  # it was faster: the next one gets a folder of its own
        runs += 1
finish(f"run-{runs}")
"""


def test_killed_at_8_random_moments_the_rerun_equals_an_uninterrupted_run(
    store, tiny_path, tmp_path
):
    """Case 26, whatever it was doing: kills after random times (seeded, spread over the length of a
    run), each run going on from what the one before it left; bit for bit, and nothing is left."""
    from spectrain.recipes.train import TrainConfig

    config = TrainConfig(
        target=str(tiny_path),
        store=store,
        out=tmp_path,
        head={"steps": 2, "draft_vocab_size": 40},
        steps=12,
        batch_size=4,
        save_every=1,
        log_every=2,
        ema=0.9,
        lr=1e-2,
    )
    command = [sys.executable, "-c", AT_ANY_MOMENT, config.model_dump_json()]
    subprocess.run(command, check=True)
    expected = outcome(tmp_path / "whole")
    runs = [path for path in tmp_path.iterdir() if path.name.startswith("run-")]
    assert runs
    for run in runs:
        assert outcome(run) == expected
        assert not list(run.rglob("*.tmp"))


SMALL_DISK = """
import os, shutil, subprocess, sys

disk, out, size, *arguments = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
real = shutil.disk_usage
# The check before a checkpoint is passed: others take the room after it.
shutil.disk_usage = lambda path: real("/")

def run():
    pid = os.fork()
    if pid == 0:
        from spectrain import cli
        sys.argv = ["spectrain", *arguments, "--out", f"{disk}/run"]
        cli.main()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

print("first", run(), sorted(os.listdir(f"{disk}/run/checkpoints")))
subprocess.run(["mount", "-o", "remount,size=1g", disk], check=True)
print("second", run())
shutil.copytree(f"{disk}/run", out)
"""


@pytest.fixture(scope="module")
def own_mounts():
    """How a process gets mounts that nobody else sees and that end with it."""
    for command in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        try:
            if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
                return command
        except FileNotFoundError:
            break
    pytest.skip("no mounts allowed here; test_checkpoint.py has the same without a real disk")


def test_a_disk_that_is_full(command, own_mounts, tmp_path, store, tiny_path):
    """Room for two checkpoints and a half: the third one meets ENOSPC while it is written. One
    line, exit 1, the two are whole; with room the same command goes on to the same end."""
    more = {"steps": 5, "save_every": 1}
    assert command("whole", **more).returncode == 0
    folder = tmp_path / "whole" / "checkpoints" / "step-00000005"
    size = sum(file.stat().st_size for file in folder.iterdir())
    (tmp_path / "disk").mkdir()
    settings = {"batch_size": 8, "micro_batch": 4, "log_every": 1, "head.steps": 2, "lr": 1e-2}
    settings |= {"head.draft_vocab_size": 40, **more}
    arguments = ["train-eagle", "--target", str(tiny_path), "--store", str(store)]
    arguments += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    driver = [sys.executable, "-c", SMALL_DISK, str(tmp_path / "disk"), str(tmp_path / "cut")]
    done = subprocess.run(
        [*own_mounts, *driver, str(int(2.5 * size)), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("first", "second"))]
    assert said == ["first 1 ['step-00000001', 'step-00000002']", "second 0"]
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "step-00000003: disk full; free some space and run the same command again" in error
    assert "going on from step 2 of 5" in done.stderr
    whole, cut = (load_file(tmp_path / out / "head/model.safetensors") for out in ("whole", "cut"))
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())


def test_a_row_of_the_store_that_is_not_finite(command, make_store, tmp_path):
    """Case 29. Its steps are skipped, counted and told; all others are taken."""
    clean, poisoned = make_store(3), make_store(3)
    rows, steps, size = FeatureStore.open(poisoned).rows("train"), 7, 8
    order = Order([row.length for row in rows], size, 0)
    turns = [[s for s in range(steps) if row in order.batch(s)] for row in range(len(rows))]
    # One that is seen twice, neither at the beginning nor at the end.
    hit = next(r for r, own in enumerate(turns) if len(own) == 2 and own[0] > 0 and own[1] < 6)
    bad = turns[hit]

    def poison(tensors, _facts):
        tensors["aux"][int(tensors["offsets"][rows[hit].index]) + 2] = float("nan")

    seal(poisoned, 0, poison)
    for out, store in (("clean", clean), ("poisoned", poisoned)):
        done = command(out, store=store, steps=steps, batch_size=size)
        assert done.returncode == 0, done.stderr
    assert f"{len(bad)} steps skipped" in done.stdout
    report = json.loads((tmp_path / "poisoned" / "report.json").read_text())["report"]
    assert report["skipped_steps"] == len(bad)
    expected, got = read_metrics(tmp_path / "clean"), read_metrics(tmp_path / "poisoned")
    assert [row["step"] - 1 for row in got if row["skipped"]] == bad
    assert [row["loss"] is None for row in got] == [step in bad for step in range(steps)]
    first = bad[0]
    assert [row["loss"] for row in got[:first]] == [row["loss"] for row in expected[:first]]
    head = load_file(tmp_path / "poisoned" / "head" / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in head.values())


def test_all_checkpoints_damaged_is_an_error_until_overwrite(command, tmp_path):
    done = command("run", steps=4)
    assert done.returncode == 0, done.stderr
    (tmp_path / "run" / "report.json").unlink()  # as if it had been killed before the end
    for file in (tmp_path / "run" / "checkpoints").glob("*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    done = command("run", steps=4)
    assert done.returncode == 2
    assert done.stderr.count("is damaged (model.safetensors does not have its checksum)") == 2
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ")
    assert "every checkpoint of this run is damaged" in error
    assert "use --overwrite to start anew" in error
    assert command("run", steps=4, overwrite=True).returncode == 0

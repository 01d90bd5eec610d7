"""Runs whose target is in pieces, or whose optimiser is (DeepSpeed), leave what runs of one process
leave: curve, weights, files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from accelerate.state import AcceleratorState, GradientState
from preparing import PROMPTS, write
from ranks import free_port, run_on_ranks
from safetensors.torch import load_file
from same_runs import require_same

from spectrain.core.config import load_config
from spectrain.recipes import prepare, train
from spectrain.trainer.metrics import read_metrics

LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
FSDP = [*LAUNCH, "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2"]
DEEPSPEED = [*LAUNCH, "--use_deepspeed", "--num_processes", "2"]


@pytest.fixture(scope="module")
def bare(tiny_path, tmp_path_factory):
    """A store of tokens alone: the target is asked."""
    folder = tmp_path_factory.mktemp("stores")
    flags = {"target": str(tiny_path), "prompts": str(write(folder / "prompts.jsonl", PROMPTS))}
    flags |= {"store": str(folder / "store"), "heldout": 0.4, "max_new_tokens": 16}
    flags |= {"features": "none", "dtype": "float32"}
    prepare.run(load_config(prepare.PrepareConfig, "prepare", flags=flags))
    return folder / "store"


@pytest.fixture
def config(bare, tiny_path, tmp_path, monkeypatch):
    """config(out, **changes) → a short training in the folder `out` of this test."""
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")

    def make(out, **changes):
        settings = {
            "target": str(tiny_path),
            "store": bare,
            "out": tmp_path / out,
            "head": {"steps": 2, "draft_vocab_size": 60},
            "steps": 4,
            "batch_size": 4,
            "micro_batch": 1,
            "save_every": 2,
            "log_every": 1,
            "lr": 1e-3,
        }
        return train.TrainConfig(**{**settings, **changes})

    yield make
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def flags(config):
    """The same as a command line."""
    settings = {"head.steps": 2, "head.draft_vocab_size": 60}
    names = ("steps", "batch_size", "micro_batch", "save_every", "log_every", "lr")
    settings |= {name: getattr(config, name) for name in names}
    own = ["--target", config.target, "--store", str(config.store), "--out", str(config.out)]
    return own + [part for k, v in settings.items() for part in ("--set", f"{k}={v}")]


MODES = {
    "frozen": {},
    "lora": {"trunk": {"mode": "lora", "rank": 4, "heads_first": 0.5}},
    "full": {"trunk": {"mode": "full", "heads_first": 0.5}},
    "scratch": {"trunk": {"mode": "scratch"}, "seed": 5},
}


def by_two(config, monkeypatch, stage=None):
    """Train in two processes; stage: of ZeRO, as accelerate hands it on."""
    with monkeypatch.context() as patch:
        if stage is not None:
            patch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
            patch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(stage))
        run_on_ranks(lambda: train.run(config), patch)


@pytest.mark.parametrize("way", ["pieces", pytest.param("zero", marks=pytest.mark.deepspeed)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_pieces_train_what_the_whole_does(config, tmp_path, monkeypatch, family, mode, way):
    """Then the run is cut off after its first half: one process goes on from the checkpoint of two,
    and two from that of one."""
    stage = {"eagle3": 1, "medusa": 2}[family] if way == "zero" else None
    # Of a frozen target the layers may be cut beside the head's optimiser.
    shard = way == "pieces" or (mode == "frozen" and family == "medusa")
    changes = {"family": family, "pack_length": 90, **MODES[mode]}
    expected = config("one", **changes)
    train.run(expected)
    cut = {name: config(name, **changes, shard=shard) for name in ("two", "two after one")}
    for name in ("two after one", "one after two"):
        first = tmp_path / ("one" if name == "two after one" else "two")
        if name == "one after two":
            by_two(cut["two"], monkeypatch, stage)
            require_same(tmp_path / "one", first)
        shutil.copytree(first, tmp_path / name)
        for left in ("head", "target", "adapter", "checkpoints/step-00000004"):
            shutil.rmtree(tmp_path / name / left, ignore_errors=True)
        (tmp_path / name / "report.json").unlink()
    by_two(cut["two after one"], monkeypatch, stage)
    train.run(config("one after two", **changes))
    for name in ("two after one", "one after two"):
        require_same(tmp_path / "one", tmp_path / name)
    if mode != "frozen":
        reports = [json.loads((tmp_path / out / "report.json").read_text()) for out in
                   ("one", "two")]  # fmt: skip
        one, two = (report["report"]["quality"] for report in reports)
        assert two == pytest.approx(one, rel=1e-5)


def test_products_in_bf16(config, tmp_path, monkeypatch):
    """Weights and gradients stay float32; what is rounded otherwise are the weights of norms."""
    changes = {"family": "medusa", "mixed_precision": "bf16", "trunk": {"mode": "full"}}
    train.run(config("one", **changes))
    by_two(config("two", **changes, shard=True), monkeypatch)
    losses = [[r["loss"] for r in read_metrics(tmp_path / out)] for out in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    saved = load_file(tmp_path / "two" / "target" / "model.safetensors")
    assert {str(value.dtype) for value in saved.values()} == {"torch.float32"}


def launched(*commands):
    """Run them side by side → their standard errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=environment, **options) for command in commands]
    try:
        told = [process.communicate(timeout=180)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(told)
    return told


def test_accelerate_asks_for_pieces_by_fsdp(config, tmp_path):
    train.run(config("one"))
    (told,) = launched([*FSDP, "-m", "spectrain", "train-eagle", *flags(config("two"))])
    assert told.count("the target's layers are spread over 2 processes") == 1
    assert json.loads((tmp_path / "two" / "report.json").read_text())["report"]["processes"] == 2
    require_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.deepspeed
def test_accelerate_asks_for_zero_by_flags(config, tmp_path):
    """Held-out rows are measured on the way, and the best head is kept."""
    train.run(config("one", eval_every=2))
    line = [*DEEPSPEED, "--zero_stage", "1", "-m", "spectrain", "train-eagle"]
    (told,) = launched([*line, *flags(config("two")), "--set", "eval_every=2"])
    assert told.count("DeepSpeed ZeRO-1 over 2 processes") == 1
    assert json.loads((tmp_path / "two" / "report.json").read_text())["report"]["processes"] == 2
    require_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.deepspeed
def test_accelerate_asks_for_zero_by_a_file(config, tmp_path):
    train.run(config("one", family="medusa"))
    file = tmp_path / "zero.json"
    section = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 9000}
    auto = dict.fromkeys(("train_batch_size", "gradient_clipping", "bf16"), "auto")
    file.write_text(json.dumps({"zero_optimization": section, **auto}))
    line = [*DEEPSPEED, "--deepspeed_config_file", str(file), "-m", "spectrain", "train-medusa"]
    (told,) = launched([*line, *flags(config("two"))])
    assert told.count("DeepSpeed ZeRO-2 over 2 processes") == 1
    require_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_two_machines_of_a_process_each_train_what_one_does(config, tmp_path):
    """The launch line of the documentation, on one machine twice."""
    train.run(config("one"))
    meet = ["--num_machines", "2", "--main_process_ip", "127.0.0.1"]
    meet += ["--main_process_port", str(free_port()), "--num_processes", "2", "--cpu"]
    command = ["-m", "spectrain", "train-eagle", *flags(config("two"))]
    launched(*([*LAUNCH, *meet, "--machine_rank", str(rank), *command] for rank in range(2)))
    require_same(tmp_path / "one", tmp_path / "two")

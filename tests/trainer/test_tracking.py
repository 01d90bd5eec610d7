"""Trackers, and the number of processes that a launcher really started."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from spectrain.core.errors import SpectrainError
from spectrain.trainer import asked, launch, tracking
from spectrain.trainer.loop import train
from spectrain.trainer.settings import TrainerSettings

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
OPTIONS = ["--num_processes", "3", "--cpu", "-m", "spectrain", "train-eagle"]


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tracking, "get_available_trackers", list)
    with pytest.raises(SpectrainError, match="wandb is not installed; pip install wandb"):
        tracking.make_accelerator(TrainerSettings(tracker="wandb"), tmp_path)


def test_processes_that_were_asked_for_and_not_started_are_missed(monkeypatch):
    """What `accelerate launch --cpu --num_processes 2` sets, which starts one process."""
    assert launch._asked_for().processes == 1
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    parent = SimpleNamespace(cmdline=lambda: ["python", "accelerate", "launch", *OPTIONS])
    monkeypatch.setattr(launch.psutil, "Process", lambda pid: parent)
    assert launch._asked_for().processes == 3
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")  # no --cpu, on a machine with CPUs only
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: False)
    assert launch._asked_for().processes == 3
    parent.cmdline = lambda: ["bash"]
    with pytest.raises(SpectrainError, match="torchrun"):
        launch.start_all()


@pytest.mark.parametrize("where", ["flag", "default"])
def test_processes_that_a_file_asks_for_are_missed_too(monkeypatch, tmp_path, where):
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    options = ["-m", "spectrain", "train-eagle"]
    if where == "flag":
        options = ["--config_file", str(file), *options]
    else:
        monkeypatch.setattr(launch.config_args, "default_config_file", str(file))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    parent = SimpleNamespace(cmdline=lambda: ["python", "accelerate", "launch", *options])
    monkeypatch.setattr(launch.psutil, "Process", lambda pid: parent)
    assert launch._asked_for().processes == 2
    options.insert(0, "--num_processes=4")  # a flag is stronger than a file
    assert launch._asked_for().processes == 4
    file.write_text("distributed_type: MULTI_CPU\nnum_machines: 2\nuse_cpu: true\n")
    with pytest.raises(SpectrainError, match=r"4 processes on 2 machines.*--main_process_ip"):
        launch.start_all()


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM is not supported; use --use_fsdp"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "--use_parallelism_config is not supp"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP of version 1 .*; add --fsdp_version 2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP of version 1"),
        (FSDP2 | {"FSDP_OFFLOAD_PARAMS": "true"}, "--fsdp_offload_params true is not supp"),
        (FSDP2 | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "--fsdp_activation_checkpointing"),
        (FSDP2 | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, "--fsdp_reshard_after_forward false is"),
        (
            FSDP2 | {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
            "--fsdp_auto_wrap_policy size_based",
        ),
    ],
)
def test_ways_to_share_a_model_that_are_not_built_are_refused(monkeypatch, variables, told):
    """None is left aside in silence; what stands for "no" is no request."""
    assert not asked.sharding_asked_for()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpectrainError, match=told) as caught:
        asked.sharding_asked_for()
    assert "\n" not in str(caught.value)


def test_fsdp_2_is_ours_and_no_longer_the_libraries_to_do(monkeypatch):
    """transformers would load empty weights in all processes but the first."""
    for name, value in (FSDP2 | {"FSDP_OFFLOAD_PARAMS": "false"}).items():
        monkeypatch.setenv(name, value)
    assert asked.sharding_asked_for()
    assert "ACCELERATE_USE_FSDP" not in os.environ


@pytest.mark.parametrize("machines", [1, 2])
def test_processes_are_started_by_torchrun(monkeypatch, machines):
    group = launch.Group(4, machines, machines - 1, "10.0.0.1", 29500)
    monkeypatch.setattr(launch, "_asked_for", lambda: group)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    started = []
    monkeypatch.setattr(launch.os, "execve", lambda *command: started.append(command))
    launch.start_all()
    ((_, command, environment),) = started
    assert f"--nproc-per-node={4 // machines}" in command
    assert ("--standalone" in command) == (machines == 1)
    where = {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500"}
    assert where <= set(command) if machines == 2 else not where & set(command)
    assert "MASTER_ADDR" not in environment


def test_a_key_decides_whether_wandb_is_online(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert not tracking._has_wandb_key()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert tracking._has_wandb_key()
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert tracking._has_wandb_key()


@pytest.mark.slow
def test_wandb_works_offline_and_goes_on_under_the_same_id(accelerator, monkeypatch, tmp_path):
    """A run that goes on behind a step is the same one; one that begins anew is another."""
    pytest.importorskip("wandb")
    monkeypatch.setattr(tracking, "_has_wandb_key", lambda: False)
    settings = TrainerSettings(tracker="wandb")
    ids = []
    for step in (0, 3, 0):
        tracked = tracking.make_accelerator(settings, tmp_path)
        tracking.start_trackers(tracked, {"lr": 1e-3, "init": None}, tmp_path, step)
        ids.append(tracked.trackers[0].tracker.id)
        tracked.log({"loss": 1.0}, step=step + 1)
        tracked.end_training()
        assert list(tmp_path.glob(f"wandb/offline-run-*-{ids[-1]}/*.wandb"))
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.slow
def test_wandb_offline_says_one_line(accelerator, monkeypatch, tmp_path, capfd):
    """Where the run lies and how it is sent, and none of wandb's own report."""
    pytest.importorskip("wandb")
    monkeypatch.setattr(tracking, "_has_wandb_key", lambda: False)
    tracked = tracking.make_accelerator(TrainerSettings(tracker="wandb"), tmp_path)
    tracking.start_trackers(tracked, {"lr": 1e-3}, tmp_path, 0)
    for step in range(3):
        tracked.log({"loss": 1.0}, step=step + 1)
    tracked.end_training()
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    said = capfd.readouterr()
    told = f"wandb is offline; when the run is done: wandb sync {folder}\n"
    assert (said.out, said.err) == ("", told)


class Crash(Exception):
    pass


def evaluation(step):
    """What is told of held-out rows."""
    return {"rows": 9, "draft": 2, "tau": 1 + step / 10, "conditional": [0.5, None]}


def test_tensorboard_has_no_point_twice(accelerator, make_head, make_data, tmp_path):
    """Steps 3 and 4 were told, then the run died; it goes on behind step 2 and tells them again."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loads = iter(range(100))

    def before_load(_batch):
        if next(loads) == 4:
            raise Crash

    settings = TrainerSettings(
        steps=6, batch_size=4, log_every=1, save_every=2, eval_every=2, tracker="tensorboard"
    )

    def part(data):
        tracked = tracking.make_accelerator(settings, tmp_path)
        try:
            head = make_head()
            train(head, data, settings, tracked, tmp_path, {}, evaluate=evaluation)
        finally:
            tracked.end_training()

    with pytest.raises(Crash):
        part(make_data(before_load=before_load))
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    part(make_data())
    events = accumulator.EventAccumulator(str(tmp_path / tracking.PROJECT))
    events.Reload()
    assert [point.step for point in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [point.step for point in events.Scalars("heldout/tau")] == [2, 4, 6]
    assert events.Scalars("heldout/tau")[-1].value == pytest.approx(1.6)
    assert "heldout/conditional/1" not in events.Tags()["scalars"]


@pytest.mark.parametrize("units", [True, False])
def test_auto_precision_is_bfloat16_where_there_are_units_for_it(units, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: units, raising=False)
    found = [tracking.precision(TrainerSettings(mixed_precision=m)) for m in ("auto", "no", "bf16")]
    assert found == ["bf16" if units else "no", "no", "bf16"]

"""Trackers, and the number of processes that a launcher really started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spectrain.core.errors import SpectrainError
from spectrain.trainer import launch, tracking
from spectrain.trainer.settings import TrainerSettings

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
    with pytest.raises(SpectrainError, match="4 processes on 2 machines.*--main_process_ip"):
        launch.start_all()


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
def test_wandb_works_offline(accelerator, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setattr(tracking, "_has_wandb_key", lambda: False)
    settings = TrainerSettings(tracker="wandb")
    tracked = tracking.make_accelerator(settings, tmp_path)
    tracking.start_trackers(tracked, {"lr": 1e-3, "init": None}, tmp_path)
    tracked.log({"loss": 1.0}, step=1)
    tracked.end_training()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("units", [True, False])
def test_auto_precision_is_bfloat16_where_there_are_units_for_it(units, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: units, raising=False)
    found = [tracking.precision(TrainerSettings(mixed_precision=m)) for m in ("auto", "no", "bf16")]
    assert found == ["bf16" if units else "no", "no", "bf16"]

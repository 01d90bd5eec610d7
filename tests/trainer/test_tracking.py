"""Trackers, and the number of processes that a launcher really started."""

from __future__ import annotations

import pytest

from spectrain.core.errors import SpectrainError
from spectrain.trainer import tracking
from spectrain.trainer.settings import TrainerSettings


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tracking, "get_available_trackers", list)
    with pytest.raises(SpectrainError, match="wandb is not installed; pip install wandb"):
        tracking.make_accelerator(TrainerSettings(tracker="wandb"), tmp_path)


def test_a_launcher_that_starts_fewer_processes_than_asked_is_reported(
    accelerator, monkeypatch, tmp_path, capsys
):
    """What `accelerate launch --cpu --num_processes 2` sets, which starts one process."""
    tracking.make_accelerator(TrainerSettings(), tmp_path)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    tracking.make_accelerator(TrainerSettings(), tmp_path)
    assert "torchrun --nproc-per-node N -m spectrain" in capsys.readouterr().err


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

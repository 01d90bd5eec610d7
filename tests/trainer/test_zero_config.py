"""What a launcher may ask of DeepSpeed: taken, or refused by name."""

from __future__ import annotations

import json
import os
import sys

import pytest

from spectrain.core.errors import SpectrainError
from spectrain.trainer import zero, zero_config
from spectrain.trainer.settings import TrainerSettings
from spectrain.trainer.update import Plain

SETTINGS = {"batch_size": 8, "micro_batch": 2, "clip": 1.0}


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """asked(file=None, **flags) → what zero_config.asked_for makes of it; flags by what follows
    ACCELERATE_."""

    def ask(file=None, **flags):
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        if file is not None:
            path = tmp_path / "zero.json"
            path.write_text(file if isinstance(file, str) else json.dumps(file))
            monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
        for name, value in flags.items():
            monkeypatch.setenv(f"ACCELERATE_{name}", value)
        return zero_config.asked_for()

    return ask


def taken(file=None, processes=2, zero=None, **changes):
    """What is left of a config with stage 2 when the run has said its own."""
    config = {"zero_optimization.stage": 2, **(file or {})}
    config |= {f"zero_optimization.{key}": value for key, value in (zero or {}).items()}
    settings = TrainerSettings(**{**SETTINGS, **changes})
    return zero_config.checked(config, settings, processes)


def test_flags_and_file_make_one_config(asked, monkeypatch):
    assert zero_config.asked_for() is None
    assert asked() == {"zero_optimization.stage": 2}  # accelerate's default
    assert "ACCELERATE_USE_DEEPSPEED" not in os.environ
    found = asked(DEEPSPEED_ZERO_STAGE="1", GRADIENT_CLIPPING="1.0")
    assert found == {"zero_optimization.stage": "1", "gradient_clipping": "1.0"}
    monkeypatch.delenv("ACCELERATE_GRADIENT_CLIPPING")
    file = {"zero_optimization": {"stage": "auto", "overlap_comm": True}, "steps_per_print": 9}
    told = {"stage": "1", "overlap_comm": True}
    expected = {f"zero_optimization.{key}": value for key, value in told.items()}
    assert asked(file) == expected | {"steps_per_print": 9}


def test_accelerate_divides_no_loss(asked):
    """It would by what was meant for DeepSpeed."""
    assert asked(GRADIENT_ACCUMULATION_STEPS="4")["gradient_accumulation_steps"] == "4"
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in os.environ


@pytest.mark.parametrize(
    ("file", "flags", "told"),
    [
        ("{", {}, r"zero\.json:1: not valid JSON"),
        ([], {}, "not a DeepSpeed config; give a JSON object"),
        ({"zero_optimization": 2}, {}, "not a DeepSpeed config"),
        (
            {"zero_optimization": {"stage": 1}},
            {"DEEPSPEED_ZERO_STAGE": "2"},
            "zero_optimization.stage is 1, by flag 2; say it once",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(asked, file, flags, told):
    with pytest.raises(SpectrainError, match=told):
        asked(file, **flags)


def test_what_the_run_says_itself_is_left_out_and_the_rest_passed_on():
    """As a common config file has it."""
    file = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "2",
        "gradient_clipping": 1,
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "bf16": {"enabled": False},
        "steps_per_print": 100,
        "wall_clock_breakdown": False,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": False,
    }
    kept = {"overlap_comm": False, "reduce_bucket_size": 5000, "contiguous_gradients": True}
    section = {
        **kept,
        "allgather_bucket_size": "auto",
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "round_robin_gradients": False,
    }
    passed = {f"zero_optimization.{key}": value for key, value in {"stage": 2, **kept}.items()}
    told = {"steps_per_print": 100, "wall_clock_breakdown": False}
    assert taken(file, zero=section) == passed | told


@pytest.mark.parametrize(
    ("file", "section", "changes", "told"),
    [
        ({}, {"stage": 3}, {}, "stage 3 is not supported; use --zero_stage 1 or 2, or --use_fsdp"),
        ({}, {"stage": "0"}, {}, "stage 0 is.*leave DeepSpeed out: this stage cuts nothing"),
        ({}, {"stage": "many"}, {}, "stage many is not supported; use --zero_stage 1 or 2$"),
        ({}, {"offload_optimizer": {"device": "cpu"}}, {}, "offload_optimizer is not supported"),
        ({}, {"offload_param": "nvme"}, {}, "zero_optimization.offload_param is not supported"),
        ({}, {"cpu_offload": True}, {}, "cpu_offload is not supported; leave it out"),
        ({}, {"round_robin_gradients": True}, {}, "round_robin_gradients is not supported; a ch"),
        ({}, {"compute_grad_norm": False}, {}, "compute_grad_norm is False, here it is True"),
        ({"fp16": {"enabled": True}}, {}, {}, "fp16 is not supported; float16 is not offered"),
        ({"bf16": {"enabled": True}}, {}, {}, "bf16 .*; it rounds the weights; --set mixed_prec"),
        ({"torch_autocast": {"enabled": True}}, {}, {}, "torch_autocast is not supported"),
        ({"optimizer": {"type": "AdamW"}}, {}, {}, "optimizer is not supported; --set lr"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, {}, "scheduler is not supported; --set sched"),
        ({"flops_profiler": {"enabled": True}}, {}, {}, "flops_profiler is not supported"),
        ({"communication_data_type": "bf16"}, {}, {}, "is bf16, here it is fp32; say"),
        ({"train_batch_size": 4}, {}, {}, "train_batch_size is 4, here it is 8; say .auto"),
        ({"train_micro_batch_size_per_gpu": 4}, {}, {}, "per_gpu is 4, here it is 2"),
        ({"gradient_accumulation_steps": "1"}, {}, {}, "steps is 1, here it is 2"),
        ({"gradient_accumulation_steps": 2}, {}, {"pack_length": 99}, "2, here it is as pack_le"),
        ({"gradient_clipping": "0.5"}, {}, {}, "gradient_clipping is 0.5, here it is 1.0"),
        ({}, {}, {"optimizer": "muon"}, "optimizer muon needs whole matrices.*optimizer=adamw"),
        ({}, {}, {"shard": True, "trunk": {"mode": "full"}}, "by FSDP 2 or by ZeRO, not by both"),
    ],
)  # fmt: skip
def test_what_contradicts_the_run_or_is_not_built_is_refused(file, section, changes, told):
    with pytest.raises(SpectrainError, match=told) as caught:
        taken(file, zero=section, **changes)
    assert str(caught.value).startswith("DeepSpeed: ")
    assert "\n" not in str(caught.value)


def test_one_process_has_nothing_to_cut(monkeypatch, capsys):
    monkeypatch.setattr(zero, "version", lambda name: "0.19.8")
    settings = TrainerSettings()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert zero.way(None, settings) is Plain
    assert capsys.readouterr().err == ""
    config = {"zero_optimization.stage": 1}
    assert zero.way(config, settings) is Plain
    assert "there is one process" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert zero.way(config, settings).func is zero.Zero
    assert "deepspeed" not in sys.modules


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise zero.PackageNotFoundError(name)

    monkeypatch.setattr(zero, "version", missing)
    with pytest.raises(
        SpectrainError, match=r"not installed; pip install 'spectrain\[deepspeed\]'"
    ):
        zero.way({"zero_optimization.stage": 1}, TrainerSettings())

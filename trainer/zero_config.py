"""What `accelerate launch --use_deepspeed` was asked for, by flags or by a config file, and what of
it is built here (trainer/zero.py): ZeRO stages 1 and 2.

What the run itself says (batch, clipping, precision, rates) the config may leave out, call "auto",
or say alike. How DeepSpeed does its work (the other keys of its ZeRO section) is passed on as it
is. All else is refused by name: none is left aside in silence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import ceil
from typing import Any

from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json
from spectrain.trainer.asked import is_set
from spectrain.trainer.settings import TrainerSettings

ZERO = "zero_optimization"
_ASKED = "ACCELERATE_USE_DEEPSPEED"
_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
# What accelerate turns flags, and keys of a file of its own, into: the key of a config for each.
_FLAGS = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": f"{ZERO}.stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": f"{ZERO}.offload_optimizer",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": f"{ZERO}.offload_param",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
    _STEPS: "gradient_accumulation_steps",
}
_DEFAULT_STAGE = 2  # accelerate's, where it is given no file
# Keys that change only what DeepSpeed tells; so they are passed on, too.
_TELLING = frozenset({"steps_per_print", "wall_clock_breakdown", "dump_state", "comms_logger"})
# Keys of the ZeRO section that are refused.
_NOT_BUILT = frozenset({"offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"})
_NOT_BUILT |= {"zenflow", "round_robin_gradients"}
_INSTEAD = {
    "fp16": "float16 is not offered; --set mixed_precision=bf16 is",
    "bf16": "it rounds the weights; --set mixed_precision=bf16 keeps them float32",
    "torch_autocast": "--set mixed_precision=bf16 says it",
    "optimizer": "--set lr, weight_decay and lr_factors say it",
    "scheduler": "--set schedule and warmup say it",
    f"{ZERO}.round_robin_gradients": "a checkpoint finds tensors by their order",
}


def asked_for() -> dict[str, Any] | None:
    """The config that the launcher hands over, keys of its ZeRO section as zero_optimization.key;
    None where it was not asked for DeepSpeed. From here on that is no longer accelerate's to do.

    Raises SpectrainError for a file that cannot be used and for flags that contradict it.
    """
    if not is_set(_ASKED):
        return None
    file = os.environ.get(_FILE)
    config = {} if file is None else _flat(read_json(file), file)
    for variable, key in _FLAGS.items():
        told = os.environ.get(variable, "auto")
        if told == "auto":
            continue
        if config.get(key, "auto") == "auto":
            config[key] = told
        elif str(config[key]) != told:
            raise _refused(f"{key} is {config[key]}, by flag {told}", f"say it once ({file})")
    if file is None:
        config.setdefault(f"{ZERO}.stage", _DEFAULT_STAGE)
    del os.environ[_ASKED]
    os.environ.pop(_STEPS, None)  # an Accelerator would divide the loss by it
    return config


def checked(config: Mapping[str, Any], settings: TrainerSettings, processes: int) -> dict[str, Any]:
    """What DeepSpeed is to be told beside what the run says itself, keys as `asked_for` gives them.

    Raises SpectrainError for what contradicts the run and for what is not built.
    """
    stage = _number(config.get(f"{ZERO}.stage", 0))
    _check_stage(stage)
    _check_run(settings)
    own, passed = _own(settings, processes), {f"{ZERO}.stage": int(stage)}
    for key, value in config.items():
        section, _, name = key.rpartition(".")
        if value == "auto" or key in passed:
            continue
        if key in own:
            if _number(value) != own[key]:
                raise _refused(f"{key} is {value}, here it is {own[key]}", 'say "auto" or the same')
        elif (section and name not in _NOT_BUILT) or key in _TELLING:
            passed[key] = value
        elif not _is_off(value):
            raise _refused(f"{key} is not supported", _INSTEAD.get(key, "leave it out"))
    return passed


def _flat(config: Any, file: str) -> dict[str, Any]:
    zero = config.get(ZERO, {}) if isinstance(config, dict) else None
    if not isinstance(zero, dict):
        raise SpectrainError("not a DeepSpeed config", where=file, fix="give a JSON object")
    flat = {key: value for key, value in config.items() if key != ZERO}
    return flat | {f"{ZERO}.{key}": value for key, value in zero.items()}


def _check_stage(stage: Any) -> None:
    if stage in (1, 2):
        return
    fix = "use --zero_stage 1 or 2"
    if stage == 0:
        fix += ", or leave DeepSpeed out: this stage cuts nothing"
    if stage == 3:
        fix += ", or --use_fsdp --fsdp_version 2, which cuts the target; a head's weights are whole"
    told = f"{stage:g}" if isinstance(stage, float) else stage
    raise _refused(f"ZeRO stage {told} is not supported", fix)


def _check_run(settings: TrainerSettings) -> None:
    if settings.optimizer != "adamw":
        raise _refused(
            f"optimizer {settings.optimizer} needs whole matrices and ZeRO cuts them anywhere",
            "use --set optimizer=adamw, or leave DeepSpeed out",
        )
    if settings.trunk.trained and settings.shard is True:
        raise _refused(
            "a target that is trained is cut by FSDP 2 or by ZeRO, not by both",
            "leave out shard=true or DeepSpeed",
        )


def _own(settings: TrainerSettings, processes: int) -> dict[str, Any]:
    """What the run says, by the keys of a config."""
    rows = settings.batch_size // processes
    pieces = ceil(rows / settings.micro_batch)
    return {
        "train_batch_size": settings.batch_size,
        "train_micro_batch_size_per_gpu": min(settings.micro_batch, rows),
        "gradient_accumulation_steps": "as pack_length has it" if settings.pack_length else pieces,
        "gradient_clipping": settings.clip,
        "communication_data_type": "fp32",
        f"{ZERO}.compute_grad_norm": True,
    }


def _number(value: Any) -> Any:
    """Flags come as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _is_off(value: Any) -> bool:
    """Whether a key or section asks for nothing."""
    if isinstance(value, dict):
        value = value.get("enabled", value.get("device", value))
    return value in (None, False, {}, "auto", "none", "false")


def _refused(what: str, fix: str) -> SpectrainError:
    return SpectrainError(what, where="DeepSpeed", fix=fix)

"""How `accelerate launch` was asked, by flag or by file, to share a model among processes.

FSDP2 is done by trainer/sharding.py, DeepSpeed by trainer/zero.py (what it was asked for is read by
trainer/zero_config.py). The others are refused: none is left aside in silence.
"""

from __future__ import annotations

import os

from spectrain.core.errors import SpectrainError

_INSTEAD = "use --use_fsdp --fsdp_version 2, which spreads the target's layers"
_OTHER_WAYS = {
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", _INSTEAD),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("--use_parallelism_config", _INSTEAD),
}
# Values that ask for more than cutting the decoder's layers and dropping each after its use.
_NOT_BUILT = {
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_AUTO_WRAP_POLICY": "size_based_wrap",
}


def sharding_asked_for() -> bool:
    """Whether the launcher was asked for FSDP2, which is then no longer accelerate's to do.

    Raises SpectrainError for its other ways to share a model and for parts of FSDP not built here.
    """
    for variable, (flag, fix) in _OTHER_WAYS.items():
        if is_set(variable):
            raise SpectrainError(f"{flag} is not supported", where="accelerate launch", fix=fix)
    if not is_set("ACCELERATE_USE_FSDP"):
        return False
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise SpectrainError(
            "FSDP of version 1 is not supported",
            where="accelerate launch",
            fix="add --fsdp_version 2 (fsdp_version: 2 in its file)",
        )
    for variable, value in _NOT_BUILT.items():
        if os.environ.get(variable, "").lower() == value:
            raise SpectrainError(
                f"--{variable.lower()} {value} is not supported",
                where="accelerate launch",
                fix="leave it out",
            )
    # Accelerator would want to wrap the whole model, and transformers would load empty weights in
    # all processes but the first.
    del os.environ["ACCELERATE_USE_FSDP"]
    return True


def is_set(variable: str) -> bool:
    """Whether an environment variable says yes, as accelerate reads it."""
    return os.environ.get(variable, "").lower() in ("true", "1", "yes", "on", "y", "t")

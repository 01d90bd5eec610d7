"""What `accelerate launch` was asked for, by flag or by file, and would not do by itself.

On CPUs it starts a single process unless it finds MPI, and says nothing: the run would take N times
as long, or look like a test of N processes that never was. We start the N ourselves.

Of its ways to share a model among processes one is built here (trainer/sharding.py); it stands for
FSDP2. The others are refused: none is left aside in silence.
"""

from __future__ import annotations

import argparse
import os
import sys

import psutil
import torch
from accelerate.commands.config import config_args
from accelerate.commands.launch import launch_command_parser

from spectrain.core.errors import SpectrainError


def start_all() -> None:
    """Replace this process by N of them if N were asked for and this is the only one."""
    count = _asked_for()
    if count < 2:
        return
    environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [sys.executable, *torchrun, "-m", "spectrain", *sys.argv[1:]]
    sys.stderr.write(f"starting {count} processes\n")
    sys.stderr.flush()
    os.execve(sys.executable, command, environment)


def sharding_asked_for() -> bool:
    """Whether the launcher was asked for FSDP2, which is then no longer accelerate's to do.

    Raises SpectrainError for its other ways to share a model and for parts of FSDP not built here.
    """
    for variable, (flag, fix) in _OTHER_WAYS.items():
        if _is_set(variable):
            raise SpectrainError(f"{flag} is not supported", where="accelerate launch", fix=fix)
    if not _is_set("ACCELERATE_USE_FSDP"):
        return False
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise SpectrainError(
            "FSDP of version 1 is not supported",
            where="accelerate launch",
            fix="add --fsdp_version 2 (fsdp_version: 2 in its file)",
        )
    for variable, flag in _NOT_BUILT.items():
        if _is_set(variable):
            raise SpectrainError(
                f"{flag} is not supported", where="accelerate launch", fix="leave it out"
            )
    # Accelerator would want to wrap the whole model, and transformers would load empty weights in
    # all processes but the first.
    del os.environ["ACCELERATE_USE_FSDP"]
    return True


_INSTEAD = "use --use_fsdp --fsdp_version 2, which spreads the target's layers"
_OTHER_WAYS = {
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", f"{_INSTEAD} as ZeRO-3 does"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", _INSTEAD),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("--use_parallelism_config", _INSTEAD),
}
_NOT_BUILT = {
    "FSDP_OFFLOAD_PARAMS": "--fsdp_offload_params",
    "FSDP_ACTIVATION_CHECKPOINTING": "--fsdp_activation_checkpointing",
}


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("true", "1", "yes", "on", "y", "t")


def _asked_for() -> int:
    """Processes that accelerate's plain launcher was told to start, 1 if it is not our parent."""
    # It sets the address of a group and leaves out its size.
    group = {"MASTER_ADDR", "WORLD_SIZE"} & os.environ.keys()
    cpu = os.environ.get("ACCELERATE_USE_CPU") == "True" or not torch.cuda.is_available()
    if "ACCELERATE_USE_CPU" not in os.environ or not cpu or group != {"MASTER_ADDR"}:
        return 1
    command = psutil.Process(os.getppid()).cmdline()
    if "launch" in command:
        arguments = command[command.index("launch") + 1 :]
        given = launch_command_parser().parse_known_args(arguments)[0]
        count, machines = _with_file(given)
        if machines == 1:
            return count
    raise SpectrainError(
        "accelerate was asked for several processes on CPUs and started one",
        fix="use torchrun --nproc-per-node N -m spectrain …",
    )


def _with_file(given: argparse.Namespace) -> tuple[int, int]:
    """Processes and machines: flags, then accelerate's file where it reads one, then defaults."""
    count, machines = given.num_processes, given.num_machines
    default = os.path.isfile(config_args.default_config_file) and not given.cpu
    if given.config_file is not None or default:
        file = config_args.load_config_from_file(given.config_file)
        count = file.num_processes if count is None else count
        machines = file.num_machines if machines is None else machines
    if count is None:
        count = torch.cuda.device_count() or 1  # what accelerate takes, with --cpu, too
    return count, machines or 1

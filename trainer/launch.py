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
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from accelerate.commands.config import config_args
from accelerate.commands.launch import launch_command_parser

from spectrain.core.errors import SpectrainError


@dataclass(frozen=True)
class Group:
    """Processes altogether, the machines they run on, the number of this machine, and where the
    first one is reached."""

    processes: int = 1
    machines: int = 1
    rank: int = 0
    address: str | None = None
    port: int | None = None


def start_all() -> None:
    """Replace this process by N of them if N were asked for and this is the only one."""
    group = _asked_for()
    if group.processes < 2:
        return
    count, over = divmod(group.processes, group.machines)
    if over or (group.machines > 1 and not (group.address and group.port)):
        raise SpectrainError(
            f"{group.processes} processes on {group.machines} machines cannot be started",
            where="accelerate launch",
            fix="give --num_processes of all machines together, as many on each, --machine_rank, "
            "--main_process_ip and --main_process_port",
        )
    environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
    meet = ["--standalone"]
    if group.machines > 1:
        meet = [f"--nnodes={group.machines}", f"--node-rank={group.rank}"]
        meet += [f"--master-addr={group.address}", f"--master-port={group.port}"]
    torchrun = ["-m", "torch.distributed.run", *meet, f"--nproc-per-node={count}"]
    command = [sys.executable, *torchrun, "-m", "spectrain", *sys.argv[1:]]
    sys.stderr.write(f"starting {count} process{'es' if count > 1 else ''}\n")
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


def _asked_for() -> Group:
    """What accelerate's plain launcher was told to start, one process if it is not our parent."""
    # It sets the address of a group and leaves out its size.
    group = {"MASTER_ADDR", "WORLD_SIZE"} & os.environ.keys()
    cpu = os.environ.get("ACCELERATE_USE_CPU") == "True" or not torch.cuda.is_available()
    if "ACCELERATE_USE_CPU" not in os.environ or not cpu or group != {"MASTER_ADDR"}:
        return Group()
    command = psutil.Process(os.getppid()).cmdline()
    if "launch" not in command:
        raise SpectrainError(
            "accelerate was asked for several processes on CPUs and started one",
            fix="use torchrun --nproc-per-node N -m spectrain …",
        )
    arguments = command[command.index("launch") + 1 :]
    return _with_file(launch_command_parser().parse_known_args(arguments)[0])


def _with_file(given: argparse.Namespace) -> Group:
    """Flags, then accelerate's file where it reads one, then defaults."""
    files = [given]
    default = os.path.isfile(config_args.default_config_file) and not given.cpu
    if given.config_file is not None or default:
        files.append(config_args.load_config_from_file(given.config_file))

    def found(name: str, otherwise: Any) -> Any:
        values = (getattr(file, name, None) for file in files)
        return next((value for value in values if value is not None), otherwise)

    return Group(
        # What accelerate takes, with --cpu, too.
        processes=found("num_processes", torch.cuda.device_count() or 1),
        machines=found("num_machines", 1),
        rank=found("machine_rank", 0),
        address=found("main_process_ip", None),
        port=found("main_process_port", None),
    )

"""Several processes on CPUs, when `accelerate launch` was asked for them by flag or by file.

accelerate starts a single process there unless it finds MPI, and says nothing: the run would take
N times as long, or look like a test of N processes that never was. We start the N ourselves.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from accelerate.commands.config import config_args
from accelerate.commands.launch import launch_command_parser

from spectrain.core.errors import SpectrainError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
    _end_with_launcher()
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


def _end_with_launcher() -> None:
    """Have SIGTERM sent to this process when its launcher ends. accelerate's plain one passes no
    signal on, and torchrun cannot when it is killed: what they started would go on alone."""
    launched = {"ACCELERATE_USE_CPU", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    if launched and sys.platform == "linux":  # it outlives the replacement of the process
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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

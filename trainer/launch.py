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

import psutil
import torch
from accelerate.commands.config import config_args
from accelerate.commands.launch import launch_command_parser

from spectrain.core.errors import SpectrainError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start_all() -> None:
    """Replace this process by N of them if N were asked for and this is the only one."""
    _end_with_launcher()
    count = _asked_for()
    if count < 2:
        return
    environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [sys.executable, *torchrun, "-m", "spectrain", *sys.argv[1:]]
    sys.stderr.write(f"starting {count} processes\n")
    sys.stderr.flush()
    os.execve(sys.executable, command, environment)


def _end_with_launcher() -> None:
    """Have SIGTERM sent to this process when accelerate's plain launcher ends: it passes no signal
    on, and what it started would go on alone."""
    plain = "ACCELERATE_USE_CPU" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    if plain and sys.platform == "linux":  # it outlives the replacement of the process
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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

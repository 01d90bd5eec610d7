"""Several processes on CPUs, when `accelerate launch --cpu --num_processes N` asked for them.

accelerate starts a single process there unless it finds MPI, and says nothing: the run would take
N times as long, or look like a test of N processes that never was. We start the N ourselves.
"""

from __future__ import annotations

import os
import sys

import psutil
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


def _asked_for() -> int:
    """Processes that accelerate's plain launcher was told to start, 1 if it is not our parent."""
    # It sets the address of a group and leaves out its size.
    group = {"MASTER_ADDR", "WORLD_SIZE"} & os.environ.keys()
    if os.environ.get("ACCELERATE_USE_CPU") != "True" or group != {"MASTER_ADDR"}:
        return 1
    command = psutil.Process(os.getppid()).cmdline()
    if "launch" not in command:
        raise SpectrainError(
            "accelerate was asked for several processes on CPUs and started one",
            fix="use torchrun --nproc-per-node N -m spectrain …",
        )
    arguments = command[command.index("launch") + 1 :]
    return launch_command_parser().parse_known_args(arguments)[0].num_processes or 1

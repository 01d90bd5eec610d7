"""Ctrl-C and SIGTERM ask a run to stop: it finishes its step, writes a checkpoint and leaves.

SIGTERM is what SLURM and Kubernetes send before they kill; torchrun passes it on to every process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from spectrain.core.errors import Terminated
from spectrain.core.progress import main_process

_RAISES = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
# One request may reach a process twice, from a batch system and from the launcher that passes it
# on: what follows the first so soon is no second request.
ECHO_SECONDS = 1.0


@dataclass
class Stop:
    """number: the signal that asked for the end; None: nobody did."""

    number: int | None = None

    def flags(self) -> list[bool]:
        """Which of the signals it was, for the processes to agree on."""
        return [self.number == number for number in _RAISES]


def wanted(counts: Sequence[float]) -> type[KeyboardInterrupt] | None:
    """What ends the run, None when nothing does; counts: sums of `flags` over the processes."""
    asked = (error for error, count in zip(_RAISES.values(), counts, strict=True) if count)
    return next(asked, None)


@contextmanager
def interrupts() -> Iterator[Stop]:
    """What the first Ctrl-C or SIGTERM fills in; the second one stops at once.

    A signal that this process ignores (Ctrl-C after nohup or in a script's background) stays
    ignored. Raises KeyboardInterrupt or Terminated, for the second one.
    """
    stop, first = Stop(), 0.0

    def handler(number: int, frame: Any) -> None:
        nonlocal first
        if stop.number is None:
            stop.number, first = number, time.monotonic()
            if main_process():
                again = "Ctrl-C again" if number == signal.SIGINT else "a second SIGTERM"
                with suppress(OSError):  # not print: its buffer may be in use right now
                    os.write(2, f"finishing this step; {again} stops at once\n".encode())
        elif time.monotonic() - first > ECHO_SECONDS:
            raise _RAISES[signal.Signals(number)]

    before = {}
    if threading.current_thread() is threading.main_thread():  # signals belong to it
        for number in _RAISES:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)

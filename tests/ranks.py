"""Work in several processes over gloo, forked."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable

import pytest
from accelerate.state import AcceleratorState, GradientState

PATIENCE = 180  # seconds; processes that wait for each other would do so for ever


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_on_ranks(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch, count: int = 2) -> None:
    """Call `work` in `count` processes that find each other; fails when one of them does."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("WORLD_SIZE", str(count))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(PATIENCE)
                os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
                AcceleratorState._reset_state(True)
                GradientState._reset_state()
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert codes == [0] * count

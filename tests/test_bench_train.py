"""scripts/bench_train.py: its FLOP floor against the products that a step really does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from spectrain.core import fast_linear

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_train.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_train", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Products(TorchDispatchMode):
    """FLOPs of all matrix products. (torch's own counter cannot watch a gradient in a forward.)"""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


def test_a_step_does_hardly_more_than_the_floor(script, monkeypatch):
    """More it must not be by much: anchors that no longer count at a step, the teacher at the ends
    of chunks and scores made anew. Less it cannot be, or the floor counts what nobody needs."""
    monkeypatch.setattr(fast_linear, "preferred", lambda: False)  # those products are not counted
    options = script._options(["--tiny", "--length", "128", "--steps", "3"])
    work = script.Work(options)
    with Products() as counter:
        work.step()
    floor = sum(script.floor(work).values())
    assert floor <= counter.flops <= 1.1 * floor


def test_the_graph_keeps_less_where_the_gradient_is_taken_in_parts(script):
    options = script._options(["--tiny", "--length", "128", "--steps", "4"])
    work = script.Work(options)
    parts = script.kept(work)
    work.whole = True
    assert 0 < 4 * parts < script.kept(work)

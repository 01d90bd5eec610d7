"""The script for a GPU, tried out on the CPU: the same code at tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "gpu_validate.py"


def run(*arguments):
    # No GPU, wherever this runs, and from another folder than the checkout.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command, cwd="/", env=environment, capture_output=True, text=True, timeout=600
    )


def rehearsed(out, *parts):
    done = run("--rehearse", "--out", out, *(["--parts", *parts] if parts else []))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "gpu.json").read_text())
    table = (out / "gpu.md").read_text()
    assert report["rehearsal"] is True
    assert "a rehearsal" in table
    assert all(f"| {name} | {part['verdict']} |" in table for name, part in report["parts"].items())
    return report["parts"]


def require_times(times):
    """Everything has a time, and a floor that it is compared with."""
    assert {(t["rows"], t["context"]) for t in times["tables"]} == {(1, 24), (8, 24)}
    for table in times["tables"]:
        assert set(table["step_ms"]) == {"plain", "chain", "static tree", "grown tree"}
        for kind in ("forward_ms", "draft_ms", "step_ms"):
            for ms in table[kind].values():
                assert min(ms.values()) > 0
    assert times["kernels_of_a_forward_of_8"]


def test_times_on_a_cpu(tmp_path):
    parts = rehearsed(tmp_path / "out", "times")
    assert parts["times"]["verdict"] in ("pass", "slow")
    require_times(parts["times"])


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")
def test_kernels_of_the_loss_on_a_cpu(tmp_path):
    """By Triton's interpreter: the arithmetic is right, the times mean nothing."""
    part = rehearsed(tmp_path / "out", "losses")["losses"]
    assert part["verdict"] == "pass", part["says"]
    assert len(part["checks"]) == 2 * 3 * 3
    assert len(part["times"]) == 2 * 3
    assert all(case["kernel_ms"] > 0 and case["torch_ms"] > 0 for case in part["times"])


def test_without_a_gpu_it_says_so(tmp_path):
    done = run("--out", tmp_path)
    assert done.returncode == 3
    assert "no CUDA device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_every_part_passes_on_a_cpu(tmp_path):
    parts = rehearsed(tmp_path)
    require_times(parts.pop("times"))
    parts.pop("losses")  # has a test of its own
    assert {name: part["verdict"] for name, part in parts.items()} == dict.fromkeys(
        ("greedy", "graphs", "bfloat16", "waits"), "pass"
    )
    ways = parts["greedy"]["ways"]
    assert max(way["accepted_per_step"] for way in ways if way["way"].startswith("good")) > 2
    assert {way["rows"] for way in ways} == {1, 4}

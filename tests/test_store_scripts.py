"""The two scripts about stores run, and say what the code they ask says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPTS / name, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bytes_of_shapes():
    """By hand for H = 64, a quarter of the tokens supervised: EAGLE-3 keeps 3 states and a quarter
    of one, 128 bytes each in bfloat16, 68 in int8; the usual are 8 · 64."""
    lines = run("store_bytes.py", "--hidden", "64", "--supervised", "0.25").splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    eagle3 = ["832", "162%", "416", "81%", "221", "43%"]
    assert rows["eagle3"] == ["yes", "replies", *eagle3]
    assert rows["eagle1"] == ["no", "everywhere", "256", "50%", "128", "25%", "68", "13%"]
    assert rows["medusa"] == ["no", "replies", "64", "12%", "32", "6%", "17", "3%"]
    assert lines[-2].split()[-2:] == ["512", "100%"]


def test_bytes_of_a_store_and_of_a_target(tiny_path):
    """A target's configuration is enough; what is no store is one line."""
    assert "H 48" in run("store_bytes.py", "--target", str(tiny_path))
    done = subprocess.run(
        [sys.executable, SCRIPTS / "store_bytes.py", "--store", str(tiny_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "no feature store here" in done.stderr


def test_reading_speed_is_told_for_each_type():
    """Sizes are right, rates are there; how large they are depends on the machine."""
    arguments = ("--tokens", "4000", "--hidden", "64", "--rounds", "1", "--batch", "4")
    report = json.loads(run("bench_store.py", *arguments))
    for dtype, state in (("bfloat16", 128), ("int8", 68)):
        whole, last = report[dtype]["eagle3"], report[dtype]["last state alone"]
        layers = whole["megabytes"] - last["megabytes"]  # each rounded to 0.1
        assert abs(layers - 3 * state * 4000 / 1e6) < 0.25
        for found in (whole, last):
            assert min(found[way] for way in ("with checksums", "without", "plain copy")) > 0

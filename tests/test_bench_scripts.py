"""The benchmarks of replies, capture and number types run, and what they compare is comparable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def run(name: str, *arguments: object) -> dict:
    done = subprocess.run(
        [sys.executable, SCRIPTS / name, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "SPECTRAIN_QUIET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_replies_are_those_of_the_library(tiny_path):
    """Every way answers every prompt with the ids that the library gives one prompt at a time."""
    sizes = ("--limit", 6, "--max-new-tokens", 5, "--units", "2,4,128", "--rows", "2,4,9")
    report = run("bench_regenerate.py", "--target", tiny_path, *sizes)
    ways = ["units of 2", "units of 4", "units of 6", "2 rows of 6", "4 rows of 6"]
    assert [name for name in report if "units of" in name or "rows of" in name] == ways
    for name in ways:
        assert report[name]["same ids as transformers"] == 6
        assert report[name]["tokens"] == report["transformers, one at a time"]["tokens"]
        assert 0 < report[name]["rows_in_work"] <= 1


def test_capture_is_compared_with_what_it_needs(tiny_path):
    report = run("bench_capture.py", "--target", tiny_path, "--rows", 6, "--rounds", 2)
    ways = {"forward", "trunk", "needed", "capture", "written"}
    assert set(report["tokens_per_second"]) == ways <= set(report["definitions"])
    assert 0 < report["predicting_rows"] < report["tokens"] <= report["padded_tokens"]
    assert all(len(ratio["rounds"]) == 2 for ratio in report["over"].values())


@pytest.mark.slow
def test_number_types_are_compared_on_the_same_rows(tiny_path, tmp_path):
    """Heads that differ by the rounding of their features are near one another, and a second call
    finds everything done."""
    config = tmp_path / "tiny.yaml"
    config.write_text("train: {head: {steps: 2, draft_vocab_size: 300}, batch_size: 8}\n")
    arguments = ["--target", tiny_path, "--work", tmp_path / "work", "--config", config]
    arguments += ["--limit", 40, "--max-new-tokens", 8, "--epochs", 1, "--max-draft", 2]
    report = run("bench_int8.py", *arguments)
    assert report["int8"]["store_bytes"] < 0.7 * report["bfloat16"]["store_bytes"]
    for temperature in ("temperature 0", "temperature 1"):
        ours = [report[d][temperature]["tau"][0]["value"] for d in ("int8", "bfloat16")]
        less = report["int8 less bfloat16"][temperature]["tau"][0]
        assert less["value"] == pytest.approx(ours[0] - ours[1])
        assert abs(less["value"]) < 0.05
    work = sorted((tmp_path / "work").rglob("*.safetensors"))
    times = [file.stat().st_mtime_ns for file in work]
    assert run("bench_int8.py", *arguments) == report
    assert [file.stat().st_mtime_ns for file in work] == times


def test_what_is_told_of_a_step_is_compared_with_it():
    """Sizes so small say nothing about the errors: that every part runs is what is tested."""
    kinds = ("eagle3", "medusa2")
    report = run("bench_estimate.py", "--tiny", "--json", "--kinds", ",".join(kinds))
    assert set(report["kinds"]) == set(kinds)
    for row in report["kinds"].values():
        assert row["seconds_told"] == pytest.approx(sum(row["parts"].values()))
        assert all(row[name] > 0 for name in ("seconds", "memory_mb", "memory_told_mb"))

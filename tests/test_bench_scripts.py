"""The benchmarks of replies, capture, types and peers run, and what they compare is comparable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def start(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "SPECTRAIN_QUIET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def run(name: str, *arguments: object) -> dict:
    done = start(SCRIPTS / name, *arguments)
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


PEER = """#!{python}
import json, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
with open({calls!r}, "a") as file:
    print(given["--trainer"], given["--part"], given["--length"], file=file)
answers = {answers!r}
print("words of a library")
print(json.dumps(answers[given["--trainer"]] | {{"versions": {{"stand-in": "1"}}}}))
"""
H, I, Q, KV, D = 576, 1536, 576, 192, 512  # of bench_train.py, with --tiny
LEARNT = 3 * H * H + 2 * H * (Q + 2 * KV) + Q * H + 3 * H * I + 4 * H + D * H


def peer(folder: Path, answers: dict[str, dict]) -> tuple[Path, Path]:
    """A virtual environment whose Python speaks as peer_step.py does, and what it was asked."""
    file, calls = folder / "bin" / "python", folder / "calls"
    file.parent.mkdir(parents=True)
    file.write_text(PEER.format(python=sys.executable, calls=str(calls), answers=answers))
    file.chmod(0o755)
    return folder, calls


def answer(wall: float, process: float, memory: float, left: float | None, learnt: int = LEARNT):
    times = {"walls": [wall, wall + 1, wall - 1], "seconds": [process], "learnt": learnt}
    return times | {"memory_mb": memory, "left_mb": left}


def test_a_step_is_compared_with_the_best_peer_of_each_measure(tmp_path):
    """Ours runs, the peers answer what no machine will be near to, so that the ratios are known. No
    peer is the best by all measures."""
    answers = {
        "specforge-full": answer(3000, 5000, 0.01, 1e9),
        "specforge-compact": answer(4000, 4000, 1e6, None),
    }
    venv, calls = peer(tmp_path / "peer", answers)
    file = tmp_path / "report.json"
    done = start(SCRIPTS / "bench_peers.py", "--tiny", "--json", file, "--specforge", venv)
    assert done.returncode == 0, done.stderr
    parts = [f"{name} {part} 48" for part in ("time", "memory") for name in answers]
    assert calls.read_text().splitlines() == parts
    report = json.loads(file.read_text())
    ours, ratios = report["trainers"]["spectrain"], report["ratios"]
    assert {name: one["peer"] for name, one in ratios.items()} == {
        "speed, wall": "specforge-full",
        "speed, process": "specforge-compact",
        "memory": "specforge-full",
        "memory and left": "specforge-compact",
    }
    walls, seconds = ours["rounds"]["wall_seconds"], ours["rounds"]["process_seconds"]
    assert len(walls) == len(seconds) == 2  # one before each peer
    assert ratios["speed, wall"]["value"] == pytest.approx(3000 / walls[0])
    assert ratios["speed, process"]["value"] == pytest.approx(4000 / seconds[1])
    assert ratios["memory"]["value"] == pytest.approx(ours["memory_mb"] / 0.01)
    whole = ours["memory_mb"] + ours["left_mb"]
    assert ratios["memory and left"]["value"] == pytest.approx(whole / 1e6)
    assert [one["met"] for one in ratios.values()] == [True, True, False, True]
    for words in (
        "at least 1.6: met",
        "at most 0.5: missed",
        "stand-in 1",
        f"peers: {', '.join(answers)}",
    ):
        assert words in done.stdout


def test_other_work_is_no_comparison(tmp_path):
    other, _ = peer(tmp_path / "peer", {"speculators": answer(1, 1, 1, 1, LEARNT + 1)})
    done = start(SCRIPTS / "bench_peers.py", "--tiny", "--speculators", other)
    assert done.returncode == 1
    assert f"spectrain {LEARNT:,}, speculators {LEARNT + 1:,}" in done.stderr


def test_without_a_peer_there_is_nothing_to_compare(tmp_path):
    for arguments in ([], ["--specforge", tmp_path]):
        done = start(SCRIPTS / "bench_peers.py", *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def test_a_peer_that_fails_is_told_with_its_last_line(tmp_path):
    broken, _ = peer(tmp_path / "peer", {})
    done = start(SCRIPTS / "bench_peers.py", "--tiny", "--speculators", broken)
    assert done.returncode == 1
    assert done.stderr == "error: speculators, time: KeyError: 'speculators'\n"


def test_what_is_told_of_a_step_is_compared_with_it():
    """Sizes so small say nothing about the errors: that every part runs is what is tested."""
    kinds = ("eagle3", "medusa2")
    report = run("bench_estimate.py", "--tiny", "--json", "--kinds", ",".join(kinds))
    assert set(report["kinds"]) == set(kinds)
    for row in report["kinds"].values():
        assert row["seconds_told"] == pytest.approx(sum(row["parts"].values()))
        assert all(row[name] > 0 for name in ("seconds", "memory_mb", "memory_told_mb"))

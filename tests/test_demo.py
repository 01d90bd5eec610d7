"""The demo at tiny scale: every stage by the real commands, killed and finished, one report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tiny_models import SENTENCES

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path, tiny_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {
            "domain": ("chat", "code")[number % 2],
            "messages": [{"role": "user", "content": f"{number} {SENTENCES[number % 6]}"}],
        }
        for number in range(60)
    ]
    prompts.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    target = {"target": str(tiny_path)}
    sections = {
        "prepare": target
        | {
            "prompts": str(prompts),
            "temperature": 0.0,
            "heldout": 0.25,
            "max_new_tokens": 16,
            "reply_batch": 16,
            "shard_tokens": 512,
        },
        "train": target
        | {
            "head": {"steps": 3, "draft_vocab_size": 200},
            "steps": 60,
            "batch_size": 4,
            "save_every": 10,
        },
        "eval": target | {"max_draft": 4},
        "generate": target | {"max_new_tokens": 16, "limit": 6, "compare": True},
        "plan": target | {"batch": 1, "nodes": 4, "context": 20, "repeats": 1},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def demo(config: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, ROOT / "scripts/demo.py", "--config", config, "--out", out]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def wait_for(path: Path, process: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def head_bytes(out: Path) -> bytes:
    return (out / "train/head/model.safetensors").read_bytes()


def test_demo_killed_and_finished_equals_a_clean_run(config, tmp_path, ctrl_c_interrupts):
    clean = demo(config, tmp_path / "clean")
    output = clean.communicate()[0]
    assert clean.returncode == 0, output
    report = json.loads((tmp_path / "clean/report.json").read_text())

    killed = tmp_path / "killed"
    first = demo(config, killed)
    wait_for(killed / "train/checkpoints/step-00000020", first)
    os.killpg(first.pid, signal.SIGKILL)  # no word of warning, as when a machine goes down
    first.wait()
    second = demo(config, killed)
    wait_for(killed / "train/checkpoints/step-00000040", second)
    os.killpg(second.pid, signal.SIGINT)  # Ctrl-C
    assert "goes on where it was" in second.communicate()[0]
    assert second.returncode == 130
    third = demo(config, killed)
    output = third.communicate()[0]
    assert third.returncode == 0, output
    assert head_bytes(killed) == head_bytes(tmp_path / "clean")
    again = json.loads((killed / "report.json").read_text())
    assert again["alpha"] == report["alpha"]
    assert again["tau"] == report["tau"]

    assert report["greedy_identical"] == {"prompts": 6, "identical": 6}
    assert report["supervised_tokens"] > 200
    assert set(report["stages"]) == {"prepare", "train-eagle", "eval-alpha", "plan", "generate"}
    assert [row["position"] for row in report["alpha"]] == [1, 2, 3, 4]
    joints = [row["joint"] for row in report["alpha"]]
    assert joints[0] == report["alpha"][0]["marginal"] == report["alpha"][0]["conditional"]
    assert 1 >= joints[0] > 0
    assert joints == sorted(joints, reverse=True)
    assert 1 <= report["tau"]["low"] <= report["tau"]["value"] <= report["tau"]["high"] <= 4
    assert report["speedup"].keys() >= {"value", "baseline", "method"}
    assert report["peak_rss_mb"] > 100
    assert report["environment"]


def test_nothing_stale_is_served(config, tmp_path):
    """Other measurements of the same head are made anew, other prompts are refused; one prompt and
    one held-out conversation have no intervals, and the table says so."""
    out = tmp_path / "out"
    sections = yaml.safe_load(config.read_text())
    sections["generate"]["limit"] = 1
    config.write_text(yaml.safe_dump(sections))
    first = demo(config, out)
    output = first.communicate()[0]
    assert first.returncode == 0, output
    assert json.loads((out / "report.json").read_text())["greedy_identical"]["prompts"] == 1

    sections["generate"]["limit"] = 2
    config.write_text(yaml.safe_dump(sections))
    second = demo(config, out)
    output = second.communicate()[0]
    assert second.returncode == 0, output
    assert json.loads((out / "report.json").read_text())["greedy_identical"]["prompts"] == 2

    prompts = Path(sections["prepare"]["prompts"])
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:50]))
    third = demo(config, out)
    output = third.communicate()[0]
    assert third.returncode == 2, output
    assert "source = " in output  # the key that differs, named by `prepare`
    assert "Traceback" not in output

"""Every command block of the README is run, in order, in one folder, as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import SENTENCES

from spectrain.export.formats import WRITERS, writer
from spectrain.export.measured import ALPHA

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_make_targets_exist():
    """`make demo` and `make test` are run by hand and by CI; here: that the Makefile has them."""
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", README, flags=re.MULTILINE)
    named = ["".join(pair) for pair in named]
    assert {"demo", "test", "test-slow", "lint"} <= set(named)
    for name in named:
        assert re.search(rf"^{name}:", makefile, flags=re.MULTILINE), name


def test_links_lead_somewhere():
    """Files of the clone exist; nothing else is linked but papers, by number (not looked up)."""
    for link in re.findall(r"\]\(([^)]+)\)", README):
        paper = re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", link)
        assert paper or (ROOT / link).exists(), link


def test_what_is_measured_is_found_by_export():
    (line,) = (one for one in commands() if "eval-alpha" in one and "--head runs/train/" in one)
    assert f"--json runs/train/{ALPHA}" in line
    (exported,) = (one for one in commands() if "spectrain export" in one)
    assert "spectrain export runs/train " in exported


def test_it_says_which_formats_are_held_against_an_engine():
    rows = re.findall(
        r"^\| (`.*?) \|.*\| (.*?) \|$", README.split("| held against |")[1], flags=re.M
    )
    told = {name: cell for names, cell in rows for name in re.findall(r"`([\w-]+)`", names)}
    assert WRITERS.keys() <= told.keys()
    for name, families in WRITERS.items():
        if name == "mtp-transformers":  # held against the installed library, not a recorded list
            assert "MtpModel" in told[name]
            continue
        known = all(writer(name, family).facts for family in families)
        assert (told[name] == "read back only") is not known, name


@pytest.mark.slow
def test_every_command_works(tmp_path, tiny_path):
    (tmp_path / "my-model").symlink_to(tiny_path)
    rows = [
        {"messages": [{"role": "user", "content": f"{number} {SENTENCES[number % 6]}"}]}
        for number in range(40)
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "my_prompts.jsonl").write_text(text)
    scripts = {
        "spectrain": [sys.executable, "-m", "spectrain"],
        "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"],
    }
    run = [line for line in commands() if not line.startswith("make ")]
    assert len(run) >= 8
    for line in run:
        program, *arguments = shlex.split(line, comments=True)
        done = subprocess.run(
            [*scripts[program], *arguments],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "SPECTRAIN_QUIET": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, (line, done.stderr)
    assert json.loads((tmp_path / "report.json").read_text())["steps"] > 0

"""What an export says of itself, held against what lies there when it is imported or examined."""

from __future__ import annotations

import json

import pytest
import torch
from head_kinds import create
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from spectrain import cli
from spectrain.export import record
from spectrain.export.found import Found
from spectrain.heads.io import load_head, save_head


@pytest.fixture
def exported(tiny, tmp_path):
    """An EAGLE-3 head of 4 draft steps as vLLM wants it: its config has no place for the 4."""
    save_head(create(tiny, "eagle3", steps=4, draft_vocab_size=120), tmp_path / "run" / "head")
    out = tmp_path / "exported"
    done = spectrain("export", tmp_path / "run", "--format", "vllm", "--out", out)
    assert done.exit_code == 0, done.output
    return out


def spectrain(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def test_the_draft_steps_come_along(exported, tiny_path, tmp_path):
    done = spectrain("import", exported, "--target", tiny_path, "--out", tmp_path / "again")
    assert done.exit_code == 0, done.output
    assert load_head(tmp_path / "again").config.steps == 4
    assert "family's default" not in done.stdout
    (exported / record.RECORD).unlink()
    done = spectrain("import", exported, "--target", tiny_path, "--out", tmp_path / "bare")
    assert load_head(tmp_path / "bare").config.steps == 7
    assert "7 draft steps is the family's default, its files say none" in done.stdout


@pytest.mark.parametrize("verb", ["import", "doctor"])
def test_changed_weights_are_told(exported, tiny_path, tmp_path, verb):
    """A number that is another one has no other mark: names, shapes and types are the same."""
    tensors = load_file(exported / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"] * 0.5
    save_file(tensors, exported / "model.safetensors", metadata={"format": "pt"})
    more = ["--out", tmp_path / "again"] if verb == "import" else []
    done = spectrain(verb, exported, "--target", tiny_path, *more)
    assert done.exit_code == (2 if verb == "import" else 1)
    assert "changed since they were exported: model.safetensors" in done.output
    assert not (tmp_path / "again").exists()


def test_another_target_is_told(exported, whole, tiny):
    seen = {one.check: one for one in record.findings(Found.open(exported), whole)}
    assert seen["checksums"].verdict == "ok"
    assert seen["made for"].verdict == "warn"
    assert tiny.fingerprint in seen["made for"].text
    assert "made for" not in {one.check for one in record.findings(Found.open(exported), tiny)}


@pytest.mark.parametrize("text", ["[]", "{", '{"files": 3, "steps": "x"}', "{}"])
def test_a_record_that_says_nothing(exported, tiny, text):
    (exported / record.RECORD).write_text(text)
    found = Found.open(exported)
    assert record.steps(found) is None
    assert all(one.verdict != "fail" for one in record.findings(found, tiny))


def test_weights_that_are_no_numbers(tiny, tmp_path):
    """Whoever loads a head says so at once: `generate`, `eval-alpha`, `export`, `train-…`."""
    head = create(tiny, "medusa", steps=2)
    with torch.no_grad():
        head.heads[1][0].linear.weight[0, 0] = float("nan")
    save_head(head, tmp_path / "head")
    done = spectrain("export", tmp_path / "head", "--format", "medusa", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "NaN or infinite numbers in heads.1.0.linear.weight" in done.stderr
    assert json.loads((tmp_path / "head" / "config.json").read_text())["family"] == "medusa"
    assert not (tmp_path / "out").exists()

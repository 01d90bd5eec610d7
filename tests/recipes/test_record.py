"""What an export says of itself, held against what lies there when it is imported or examined."""

from __future__ import annotations

import json

import pytest
import torch
from head_kinds import create
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from spectrain import cli
from spectrain.core.files import sha256_file
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


@pytest.mark.parametrize("text", ["[]", "{", '{"files": 3, "steps": "x"}', '{"files": {}}', "{}"])
def test_a_record_that_says_nothing(exported, tiny, text):
    (exported / record.RECORD).write_text(text)
    found = Found.open(exported)
    assert record.steps(found) is None
    (one,) = record.findings(found, tiny)
    assert (one.check, one.verdict) == ("checksums", "warn")
    assert "names no files" in one.text


@pytest.fixture
def told(exported, tiny):
    """told() → verdict and text of what is said of the files of `exported`."""
    (exported / "tokenizer.json").write_text("{}")  # as some formats have it beside the weights

    def entries(change):
        content = json.loads((exported / record.RECORD).read_text())
        change(content["files"])
        (exported / record.RECORD).write_text(json.dumps(content))

    def read(change=lambda files: None):
        entries(change)
        seen = record.findings(Found.open(exported), tiny)
        return [(one.verdict, one.text) for one in seen if one.check == "checksums"]

    digest = sha256_file(exported / "tokenizer.json")
    entries(lambda files: files.update({"tokenizer.json": {"bytes": 2, "sha256": digest}}))
    return read


def test_what_is_nobodys_fault(exported, told):
    """Pages are edited, the hub leaves hidden files, `plan` writes beside the weights."""
    assert told() == [("ok", "the files are those that were exported")]
    (exported / "README.md").write_text("better words")
    (exported / ".gitattributes").write_text("")
    assert [verdict for verdict, _ in told()] == ["ok"]
    (exported / "plan.json").write_text("{}")
    note, ok = told()
    assert note == ("note", "not of the export: plan.json")
    assert ok[0] == "ok"


@pytest.mark.parametrize(("name", "verdict"), [
    ("model.safetensors", "fail"), ("config.json", "fail"), ("tokenizer.json", "warn"),
])  # fmt: skip
def test_a_changed_file_is_told_by_name(exported, told, name, verdict):
    if name == "model.safetensors":
        tensors = load_file(exported / name)
        tensors["fc.weight"] *= 2
        save_file(tensors, exported / name, metadata={"format": "pt"})
    else:
        (exported / name).write_text((exported / name).read_text() + " ")
    assert told() == [(verdict, f"changed since they were exported: {name}")]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_without_an_entry_is_told_by_name(told, name):
    """What cannot be compared is not called unchanged."""
    assert told(lambda files: files.pop(name))[0] == ("fail", f"not of the export: {name}")


@pytest.mark.parametrize("entry", [None, "x", {}, {"sha256": None}])
def test_an_entry_that_says_nothing_matches_nothing(told, entry):
    assert told(lambda files: files.update({"config.json": entry}))[0][0] == "fail"


@pytest.mark.parametrize(("name", "verdict"), [("config.json", "fail"), ("tokenizer.json", "warn")])
def test_a_file_that_is_gone_is_told_by_name(exported, told, name, verdict):
    (exported / name).unlink()
    assert told() == [(verdict, f"exported, and no longer here: {name}")]


def test_a_record_is_told_of_in_one_line(told):
    ((verdict, text),) = told(lambda files: files.update({"a\nb" * 100: {}}))
    assert verdict == "warn"
    assert "\n" not in text
    assert len(text) < 200


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

"""Damaged and hostile checkpoints: one line, exit 2, nothing written, no code run, no memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hostile
import pytest
from head_kinds import create
from typer.testing import CliRunner

from spectrain import cli
from spectrain.core import models
from spectrain.core.errors import SpectrainError
from spectrain.export.formats import writer
from spectrain.export.found import Found
from spectrain.export.layout import Reference
from spectrain.export.write import write
from spectrain.heads.io import load_head, save_head
from spectrain.recipes.prepare import SHIPPED_PROMPTS

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(tiny, tmp_path):
    """A sound head."""
    save_head(create(tiny, "medusa", steps=2, draft_vocab_size=120), tmp_path / "theirs")
    return tmp_path / "theirs"


def refused(path, target, out):
    """The line that `import` fails with."""
    done = CliRunner().invoke(
        cli.app, ["import", str(path), "--target", str(target), "--out", str(out)]
    )
    assert done.exit_code == 2, (done.output, done.exception)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    return done.stderr


@pytest.mark.parametrize("name", hostile.FAULTS)
def test_one_line_and_nothing_is_left_behind(folder, tiny_path, tmp_path, name):
    change, words = hostile.FAULTS[name]
    change(folder)
    line = refused(folder, tiny_path, tmp_path / "out")
    assert re.search(words, line), line
    assert len(line) < 700
    assert not (folder / hostile.TOUCHED).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.fixture
def draft(tiny, tmp_path):
    """A sound draft in transformers' own layout."""
    path = tmp_path / "draft"
    path.mkdir()
    write(writer("hf", "draft").encode(create(tiny, "draft"), Reference(tiny, "t")), path)
    return path


def answered_yes(verb, *arguments, code=2):
    """What the command says to somebody at the terminal who says yes to all that is asked."""
    done = CliRunner().invoke(cli.app, [verb, *map(str, arguments)], input="y\n" * 9)
    assert done.exit_code == code, (done.output, done.exception)
    if code == 2:
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
    assert "[y/N]" not in done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("kind", ["tokenizer", "model"])
@pytest.mark.parametrize("verb", ["import", "doctor", "generate"])
def test_code_beside_a_draft_is_not_run(draft, tiny_path, tmp_path, verb, kind):
    hostile.code_for(kind)(draft)
    more = {
        "import": [draft, "--out", tmp_path / "out"],
        "doctor": [draft, "--limit", 1],
        "generate": ["--head", draft, "--prompt", "x"],
    }
    code = 1 if verb == "doctor" else 2  # which prints what it found, and then fails
    line = answered_yes(verb, "--target", tiny_path, *more[verb], code=code)
    assert not (draft / hostile.TOUCHED).exists()
    # Of a kind of model that the library does not have none is made, with or without the code.
    assert kind == "model" or "asks for code of its own to be run, which is not done" in line


@pytest.mark.parametrize("kind", ["tokenizer", "model"])
@pytest.mark.parametrize("verb", ["import", "doctor", "generate", "inspect"])
def test_code_beside_a_target_is_not_run(folder, tiny_path, tmp_path, verb, kind):
    target = shutil.copytree(tiny_path, tmp_path / "target")
    hostile.code_for(kind)(target)
    more = {
        "import": [folder, "--out", tmp_path / "out"],
        "doctor": [folder],
        "generate": ["--head", folder, "--prompt", "x"],
        "inspect": ["--prompts", SHIPPED_PROMPTS],
    }
    line = answered_yes(verb, "--target", target, *more[verb])
    assert not (target / hostile.TOUCHED).exists()
    assert "asks for code of its own to be run, which is not done" in line
    assert "transformers has itself" in line


OWN = [
    name
    for name, (change, _) in hostile.FAULTS.items()
    if name not in ("a model, no draft", "adapter", "two files, no index", "a file beside them")
]


@pytest.mark.parametrize("name", OWN)
def test_our_own_heads_are_read_as_carefully(folder, name):
    """`generate` and the others: their folder has one file of weights, whatever else lies in it."""
    hostile.FAULTS[name][0](folder)
    with pytest.raises(SpectrainError) as caught:
        load_head(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / hostile.TOUCHED).exists()


def test_memory_is_taken_for_nothing_that_is_only_claimed(folder):
    """What the claims ask for is gigabytes; what reading takes is a few megabytes."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "hostile_memory.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    grown = {line.rpartition(" ")[0]: int(line.split()[-1]) for line in done.stdout.splitlines()}
    assert len(grown) > 5
    assert max(grown.values()) < 100_000_000, grown


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere", "no such folder or file"),
        ("/nowhere/at/all", "no such folder or file"),
        ("OWNER/NAME", r"cannot load 'OWNER/NAME' \(no such folder here, not in the hub's cache"),
        ("", "no known layout|no weights here|no such"),
        ("theirs/config.json", "not a file of weights"),
        ("theirs/model.safetensors/x", "no such folder or file"),
    ],
)
def test_paths_that_lead_to_no_head(folder, tiny_path, tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    assert re.search(words, refused(path, tiny_path, tmp_path / "out"))


def test_a_folder_that_may_not_be_read(folder, tiny_path, tmp_path, monkeypatch):
    """The system refuses; root, whom it refuses nothing, needs a stand-in for it."""

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    (folder / hostile.WEIGHTS).rename(folder / "other.safetensors")
    assert "not allowed to use this path" in refused(folder, tiny_path, tmp_path / "out")


def test_a_place_that_cannot_be_written_is_seen_first(folder, tiny_path, tmp_path, monkeypatch):
    monkeypatch.setattr(Found, "open", lambda path: pytest.fail("must not be read"))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(folder, tiny_path, tmp_path / "file")


def test_a_head_of_another_target(folder, whole, tmp_path):
    assert "trained for" in refused(folder, whole.name, tmp_path / "out")


def test_what_the_hub_gives_is_read_like_a_folder(folder, monkeypatch):
    """Weights and settings are asked for, and nothing else."""
    asked = {}

    def download(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(models, "_hub_answers", lambda: True)
    assert Found.open("OWNER/NAME").config["family"] == "medusa"
    assert asked["name"] == "OWNER/NAME"
    assert {pattern.rpartition(".")[2] for pattern in asked["patterns"]} == {
        "safetensors", "json", "bin", "pt", "pth",
    }  # fmt: skip

"""Flags reach the recipes, reports reach people and files, every failure is one line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from pydantic import Field
from typer.testing import CliRunner

from spectrain import cli
from spectrain.core.config import Config
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.core.failures import one_line_errors


class Fake(Config):
    target: str = Field("smollm2-135m", description="Target.")
    store: str | None = Field(None, description="Store.")
    head: str | None = Field(None, description="Head.")
    temperature: list[float] = Field([0.0], description="Temperatures.")
    seed: int = Field(0, description="Seed.")


@pytest.fixture
def recipe(monkeypatch):
    """A stand-in for recipes.evaluate: set `.run` to what the command should meet."""
    fake = SimpleNamespace(EvalConfig=Fake, run=lambda config: config.model_dump(mode="json"))
    monkeypatch.setitem(sys.modules, "spectrain.recipes.evaluate", fake)
    return fake


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_flags_reach_the_recipe(recipe, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("eval: {target: from-file, seed: 1, store: from-file}\n")
    out = tmp_path / "new" / "report.json"
    arguments = ["--config", str(file), "--set", "seed=2", "--set", "target=from-set"]
    arguments += ["--target", "from-flag", "--temperature", "0, 0.5", "--temperature", "1"]
    result = run("eval-alpha", *arguments, "--json", str(out))
    assert json.loads(out.read_text()) == {
        "target": "from-flag",
        "store": "from-file",
        "head": None,
        "temperature": [0, 0.5, 1],
        "seed": 2,
    }
    assert "from-flag" in result.stdout


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SpectrainError("bad row", where="a:3", fix="mend it"), 2, "error: a:3: bad row; mend it"),
        (RunFailed("disk full", where="s"), 1, "error: s: disk full"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (OSError(errno.ENOSPC, "x", "shard"), 1, "error: disk full at shard; free some space"),
        (ZeroDivisionError("a\nb"), 1, "error: ZeroDivisionError: a b (SPECTRAIN_DEBUG=1 shows"),
    ],
)
def test_failures_are_one_line(recipe, monkeypatch, error, code, line):
    def fail(config):
        raise error

    monkeypatch.delenv("SPECTRAIN_DEBUG", raising=False)
    recipe.run = fail
    result = run("eval-alpha", code=code)
    assert result.stdout == ""
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1


def test_traceback_on_request(recipe, monkeypatch):
    monkeypatch.setenv("SPECTRAIN_DEBUG", "1")
    recipe.run = lambda config: 1 / 0
    assert "Traceback" in run("eval-alpha", code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval-alpha", "--sed", "1"], "No such option: --sed"),
        (["eval-alpha", "--seed", "x"], "Invalid value for '--seed'"),
        (["eval-alpha", "--head"], "requires an argument"),
        (["trian"], "No such command 'trian'"),
        (["eval-alpha", "--set", "seed"], "expected key=value"),
        (["eval-alpha", "--temperature", "0,warm"], "'warm' refused"),
        (["eval-alpha", "--config", "nowhere.yaml"], "no such configuration 'nowhere.yaml'"),
        (["targets", "--fetch", "gpt"], "no embedded target 'gpt'"),
    ],
)
def test_bad_usage_exits_with_2(recipe, arguments, words):
    result = run(*arguments, code=2)
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_unwritable_report_is_seen_before_the_work(recipe, tmp_path):
    recipe.run = lambda config: pytest.fail("must not run")
    assert "this is a folder" in run("eval-alpha", "--json", str(tmp_path), code=2).stderr


def test_only_the_first_process_prints(recipe, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    out = tmp_path / "report.json"
    assert run("eval-alpha", "--json", str(out)).output == ""
    assert not out.exists()


def test_targets(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path))
    out = tmp_path / "targets.json"
    text = run("targets", "--json", str(out)).stdout
    assert "smollm2-135m" in text
    assert json.loads(out.read_text())["targets"][0]["cached"] is False


def test_module_and_version():
    """`python -m spectrain` is what `accelerate launch -m spectrain` starts."""
    command = [sys.executable, "-m", "spectrain", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=os.path.sep)
    assert (done.returncode, done.stdout.strip()) == (0, "0.1.0")


def test_unknown_target_for_real(tmp_path):
    """No stand-in here: the real recipe, an unknown name, no network."""
    arguments = ["--target", "no/such-model", "--store", str(tmp_path / "store")]
    result = run("prepare", *arguments, code=2)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "no/such-model" in last
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("goes_on", [True, False])
def test_only_what_goes_on_says_so(capsys, goes_on):
    with pytest.raises(SystemExit) as left, one_line_errors(goes_on):
        raise KeyboardInterrupt
    assert left.value.code == 130
    assert ("goes on where it was" in capsys.readouterr().err) is goes_on


def test_steps_replace_the_epochs_of_a_configuration(monkeypatch):
    from spectrain.recipes import train

    asked = []
    monkeypatch.setattr(train, "run", lambda config: asked.append(config) or {})
    monkeypatch.setattr(train, "render", lambda report: "")
    run("train-eagle", "--config", "demo-smollm2", "--steps", "7")
    assert (asked[0].steps, asked[0].epochs) == (7, None)
    result = run("train-eagle", "--config", "medusa1-8b", "--steps", "7", code=2)
    assert "for the family 'medusa'" in result.output
    run("train-eagle", "--steps", "7", "--set", "epochs=2", code=2)

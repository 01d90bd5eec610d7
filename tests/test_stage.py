"""`train-medusa --stage` and what a configuration says of the target."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from spectrain import cli
from spectrain.recipes import train
from spectrain.trainer.settings import TrunkSettings


@pytest.fixture
def asked(monkeypatch):
    """asked(*arguments) → the settings that `train-medusa` would train with."""

    def ask(*arguments):
        seen = []
        monkeypatch.setattr(train, "run", lambda config: seen.append(config) or {"done": True})
        monkeypatch.setattr(train, "render", lambda report: "done")
        result = CliRunner().invoke(cli.app, ["train-medusa", *arguments])
        return seen[0] if result.exit_code == 0 else result.output

    return ask


def test_the_stage_chooses_how_the_trunk_is_trained(asked, tmp_path):
    assert asked().trunk.mode == "frozen"
    assert asked("--stage", "2").trunk.mode == "lora"
    assert asked("--stage", "2").family == "medusa"
    assert asked("--stage", "2", "--set", "trunk.rank=8").trunk == TrunkSettings(
        mode="lora", rank=8
    )
    # What the user has said about the trunk wins.
    full = "--set", "trunk.mode=full"
    assert asked("--stage", "2", *full).trunk.mode == "full"
    assert asked(*full).trunk.mode == "full"
    file = tmp_path / "full.yaml"
    file.write_text("train: {family: medusa, trunk: {mode: full}}")
    assert asked("--stage", "2", "--config", str(file)).trunk.mode == "full"
    assert "--stage 1 does not go with trunk.mode = 'full'" in asked("--stage", "1", *full)
    frozen = asked("--stage", "2", "--set", "trunk.mode=frozen")
    assert "--stage 2 does not go with trunk.mode = 'frozen'" in frozen

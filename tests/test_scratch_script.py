"""The script that trains a tiny model from scratch with and without MTP heads, at its smallest."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "mtp_from_scratch.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("mtp_from_scratch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.slow
def test_two_steps_of_each_kind_report_four_losses(script, tmp_path, capsys):
    report = script.run(tmp_path, steps=2, seeds=1)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (report["steps"], report["seeds"]) == (2, 1)
    assert report["heldout_tokens"] > 1000
    names = {
        f"{kind}, {heads}"
        for kind in ("mtp-parallel", "mtp-sequential")
        for heads in ("with heads", "without")
    }
    assert set(report["losses"]) == names
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(names)
    for name, losses in report["losses"].items():
        (loss,) = losses
        # Two steps from random weights: near the uniform guess over 2048 tokens.
        assert abs(loss - math.log(2048)) < 0.5
        own = json.loads((tmp_path / f"{name.replace(', ', '-').split()[0]}-0" / "report.json")
                         .read_text())["report"]  # fmt: skip
        assert own["steps"] == 2
        assert own["trunk"] == "scratch"
        assert own["quality"]["loss_after"] == pytest.approx(loss)
        # A new random model, not the one the store was prepared with: training begins anew.
        assert own["family"] == name.split(",")[0]

"""The lines on a terminal: what they say at each stage of a run, at 80 columns, and in place."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from spectrain.core import progress
from spectrain.trainer import view
from spectrain.trainer.loop import train
from spectrain.trainer.settings import TrainerSettings
from spectrain.trainer.view import Panel, level, positions, sparkline

CPU = torch.device("cpu")
ROW = {"step": 10, "loss": 3.25, "tokens_per_second": 1234.5}


def lines(panel, width=80):
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(panel.render())
    text = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, text)) <= width
    return text


def evaluation(step, tau):
    found = {"rows": 64, "draft": 7, "tau": tau, "marginal": [0.6, 0.5, 0.4, 0.3, 0.2, 0.1, None]}
    return {"step": step, "heldout": found}


def full_panel():
    """As long as lines get: millions of steps, seven positions, another best."""
    panel = Panel(1_000_000, 0, [], [], CPU)
    for step in range(1, 400):
        panel.step(step, 9 - step / 50)
        panel.row(ROW | {"loss": 9 - step / 50}, [0.62, 0.51, 0.43, 0.38, 0.31, 0.2, 0.1], 2)
    panel._pace._start -= 100
    panel._pace._marks[0] = (panel._pace._last[0] - 398, 1)
    panel.heldout(evaluation(300, 1.55))
    panel.heldout(evaluation(200_000, 1.523))
    panel.saved(390)
    return panel


def test_before_the_first_step_it_shows_that_it_runs():
    assert lines(Panel(40, 0, [], [], CPU)) == ["train      " + "━" * 28 + " 0/40 steps 0%"]


def test_everything_at_80_columns():
    head, loss, train_, heldout, tau, speed = lines(full_panel())
    assert head.endswith(" 399/1,000,000 steps 0% 277:40:01 left")  # a second a step
    assert loss == "loss       1.020  ████▇▇▇▇▆▆▆▆▅▅▅▅▄▄▄▄▃▃▃▃▂▂▂▂▁▁▁▁  first 8.980"
    assert train_ == "α train    ▅ 0.62  ▅ 0.51  ▄ 0.43  ▄ 0.38  ▃ 0.31  ▂ 0.20  ▁ 0.10  marginal"
    assert heldout == "α held-out ▅ 0.60  ▅ 0.50  ▄ 0.40  ▃ 0.30  ▂ 0.20  ▁ 0.10  – –     marginal"
    assert tau.strip() == "τ 1.523, γ = 7, after step 200,000; best 1.550 after step 300"
    assert speed.startswith("speed      1,234 tokens/s  ")
    assert speed.endswith(" GB of memory  2 steps skipped  checkpoint 390")


def test_a_run_that_goes_on_shows_what_was_before():
    """The curve, the evaluations and the checkpoint; of the time left only its own steps tell."""
    rows = [ROW | {"step": 10, "loss": 9.0}, ROW | {"step": 20, "loss": None}]
    panel = Panel(40, 20, rows, [evaluation(20, 1.4)], CPU)
    assert "20/40 steps 50%" in lines(panel)[0]
    assert "left" not in lines(panel)[0]
    panel.step(21, None)
    panel.step(22, 5.0)
    text = lines(panel)
    assert text[1] == "loss       5.000    first 9.000"
    assert text[3].strip() == "τ 1.400, γ = 7, after step 20"
    assert text[4] == "speed      checkpoint 20"
    panel.measuring()
    assert lines(panel)[0].endswith("measuring")
    panel.heldout(evaluation(30, None))
    assert lines(panel)[3].strip() == "τ –, γ = 7, after step 30; best 1.400 after step 20"
    assert not lines(panel)[0].endswith("measuring")


def test_bars_and_curves():
    assert [level(share) for share in (-1, 0, 0.49, 0.5, 0.99, 1, 2)] == list("▁▁▄▅███")
    assert positions([0.5] * 9).plain.endswith("… marginal")
    assert positions([]).plain == "marginal"
    assert sparkline([0.5], 3) == sparkline([], 9) == sparkline([1.0], 9) == ""
    assert sparkline([3, 3, 3], 9) == "▁▁▁"
    assert sparkline([1, 2, 3], 9) == "▁▅█"
    assert sparkline([0, 0, 1, 1, 0, 0, 7, 7], 4) == "▁▂▁█"  # means of two
    assert len(sparkline(range(1001), 32)) == 32


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def settings():
    return TrainerSettings(steps=4, batch_size=4, log_every=1, eval_every=2)


def test_the_loop_draws_on_a_terminal(
    settings, accelerator, make_head, make_data, tmp_path, monkeypatch
):
    """Every frame takes the place of the one before; what is printed meanwhile stays above."""
    screen = Terminal()
    console = Console(file=screen, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    monkeypatch.setattr(view, "terminal", lambda: console)

    def evaluate(step):
        console.print("a word")
        return evaluation(step, 1.5)["heldout"]

    train(make_head(), make_data(), settings, accelerator, tmp_path, {}, evaluate=evaluate)
    written = screen.getvalue()
    assert written.count("a word") == 2
    # Drawn when there is news, up a line and over the one before: the first frame, two
    # evaluations that begin and end, the checkpoint, the last frame, and anew under each word.
    assert "\x1b[1A\x1b[2K" in written
    assert 7 <= written.count("/4 steps") <= 9 + settings.steps
    final = written.rpartition("train")[2]
    assert "τ 1.500" in final
    assert "checkpoint 4" in final
    assert "in 0:0" in written.rpartition("steps")[2]


@pytest.mark.parametrize("quiet", ["", "1"])
def test_elsewhere_there_are_plain_lines_or_none(
    settings, accelerator, make_head, make_data, tmp_path, monkeypatch, capsys, quiet
):
    monkeypatch.setenv("SPECTRAIN_QUIET", quiet)
    monkeypatch.setattr(progress, "PLAIN_EVERY_SECONDS", 0.0)
    told = {"evaluate": lambda step: evaluation(step, 1.5)["heldout"]}
    train(make_head(), make_data(), settings, accelerator, tmp_path, {}, **told)
    out, err = capsys.readouterr()
    assert out == ""
    if quiet:
        assert err == ""
        return
    assert "\x1b" not in err
    assert "train: 1/4 steps" in err
    assert "held-out: τ 1.500, γ = 7, after step 2\n" in err
    assert "acc 0." in err

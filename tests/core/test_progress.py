"""Progress speaks on stderr only, on rank 0 only, and not at all when told to be quiet."""

from __future__ import annotations

import pytest

from spectrain.core import progress as module
from spectrain.core.progress import progress


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("SPECTRAIN_QUIET", "RANK", "LOCAL_RANK", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def test_a_short_stage_is_one_line(capsys):
    with progress(3, "rows", "rows") as bar:
        for _ in range(3):
            bar.update()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("rows: 3/3 rows")


def test_plain_lines_tell_time_left_and_values(capsys, monkeypatch):
    monkeypatch.setattr(module, "PLAIN_EVERY_SECONDS", 0.0)
    with progress(4, "train", "steps", done=1) as bar:
        bar.update(1, loss=1.23456)
        early = capsys.readouterr().err
        bar._pace._start -= 10  # a while has passed
        bar._pace._marks[0] = (bar._pace._marks[0][0] - 10, 1)
        bar._pace._ends = 2
        bar.update(1)
    assert early.startswith("train: 2/4 steps")
    assert "loss 1.235" in early
    assert "left" not in early  # of one step nothing follows
    first, last = capsys.readouterr().err.splitlines()
    assert "train: 3/4 steps  0:10 left" in first
    assert last.startswith("train: 3/4 steps  in 0:0")


def test_unknown_total(capsys):
    with progress(label="read", unit="lines") as bar:
        bar.update(2)
    assert capsys.readouterr().err.startswith("read: 2 lines")


@pytest.mark.parametrize(
    ("name", "value"), [("SPECTRAIN_QUIET", "1"), ("RANK", "1"), ("LOCAL_RANK", "1")]
)
def test_silence(capsys, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with progress(3, "rows") as bar:
        bar.update(3)
    assert bar.done == 3
    assert capsys.readouterr() == ("", "")


def test_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with progress(2, "train", "steps") as bar:
        bar.update(1, loss=0.5)
        bar.update(1, loss=0.25)
    err = capsys.readouterr().err
    assert "100%" in err
    assert "loss 0.25" in err
    assert "in 0:00" in err


def test_rate_counts_only_this_run():
    bar = module.Bar("x", 100, "rows", done=90)
    bar._start -= 2.0
    bar.update(4)
    assert bar.rate() == pytest.approx(2.0, rel=0.05)

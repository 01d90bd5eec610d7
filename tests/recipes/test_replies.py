"""Replies to many prompts: kept as they are finished, gone on with, equal however they were cut."""

from __future__ import annotations

import json

import pytest
from preparing import prompt, write
from tiny_models import make_head

from spectrain.core.config import load_config
from spectrain.core.errors import SpectrainError
from spectrain.heads.io import save_head
from spectrain.recipes.generate import GenerateConfig, run
from spectrain.recipes.generate_report import accepted_by_depth, render
from spectrain.recipes.reply_file import PART, REPLIES, ReplyFile

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")


@pytest.fixture
def flags(tiny, tiny_path, tmp_path):
    save_head(make_head(tiny, wild=False), tmp_path / "head")
    rows = [prompt(" ".join(WORDS[: i + 1])) for i in range(10)]
    return {
        "target": str(tiny_path),
        "head": str(tmp_path / "head"),
        "prompts": str(write(tmp_path / "prompts.jsonl", rows)),
        "max_new_tokens": 10,
    }


def generate(flags, **changes):
    return run(load_config(GenerateConfig, "generate", flags=flags | changes))


def stop_after(monkeypatch, count):
    """Ctrl-C once so many replies are kept."""
    add = ReplyFile.add

    def adding(self, index, done):
        add(self, index, done)
        if len(self.done) == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(ReplyFile, "add", adding)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 4}])
@pytest.mark.parametrize("rows", [1, 4])
def test_interrupted_and_gone_on_equals_uninterrupted(
    flags, tmp_path, monkeypatch, capsys, settings, rows
):
    generate(flags, out=str(tmp_path / "whole"), **settings)
    with monkeypatch.context() as patched:
        stop_after(patched, 4)
        with pytest.raises(KeyboardInterrupt):
            generate(flags, out=str(tmp_path / "cut"), rows=rows, **settings)
    part = tmp_path / "cut" / PART
    assert not (tmp_path / "cut" / REPLIES).exists()
    part.write_text(part.read_text() + '{"index": 9, "tok')  # killed while it wrote
    report = generate(flags, out=str(tmp_path / "cut"), rows=2, **settings)
    assert "going on: 4 of 10 replies are there" in capsys.readouterr().err
    assert (tmp_path / "cut" / REPLIES).read_bytes() == (tmp_path / "whole" / REPLIES).read_bytes()
    assert not part.exists()
    assert report["replies"] in render(report)


def test_overwriting_can_be_interrupted_and_rates_are_of_what_was_made_now(
    flags, tmp_path, monkeypatch
):
    out = str(tmp_path / "out")
    whole = generate(flags, out=out)["methods"]["eagle3"]["tokens"]
    with monkeypatch.context() as patched:
        stop_after(patched, 6)
        with pytest.raises(KeyboardInterrupt):
            generate(flags, out=out, overwrite=True)
    rest = generate(flags, out=out, overwrite=True, on_bad_row="skip")["methods"]["eagle3"]
    assert 0 < rest["tokens"] < whole / 2
    assert len((tmp_path / "out" / REPLIES).read_text().splitlines()) == 10


def test_other_settings_do_not_go_on(flags, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        with pytest.raises(KeyboardInterrupt):
            generate(flags, out=str(tmp_path / "out"))
    with pytest.raises(SpectrainError, match=r"other settings or prompts.*remove the file"):
        generate(flags, out=str(tmp_path / "out"), max_new_tokens=9)
    (tmp_path / "out" / PART).write_text("something else\n")
    with pytest.raises(SpectrainError, match="not what an interrupted run leaves"):
        generate(flags, out=str(tmp_path / "out"))
    (tmp_path / "out" / PART).unlink()
    generate(flags, out=str(tmp_path / "out"), max_new_tokens=9)
    with pytest.raises(SpectrainError, match="there are replies already"):
        generate(flags, out=str(tmp_path / "out"), max_new_tokens=9)
    generate(flags, out=str(tmp_path / "out"), max_new_tokens=9, overwrite=True)
    rows = (tmp_path / "out" / REPLIES).read_text().splitlines()
    assert len(rows) == 10


def test_rows_change_no_reply_and_are_told(flags, tmp_path):
    for rows in (1, 3):
        report = generate(flags, out=str(tmp_path / str(rows)), rows=rows, stats=True)
        assert f"{rows} at a time" in render(report)
        assert "accepted at depth 1, 2 …" in render(report)
    one, three = ((tmp_path / str(n) / REPLIES).read_bytes() for n in (1, 3))
    assert one == three


def test_a_stop_text_ends_the_reply_before_it(flags, tmp_path):
    """The same with a head and without: the first place in the text, wherever a block ends."""
    generate(flags, out=str(tmp_path / "whole"))
    whole = [json.loads(line) for line in (tmp_path / "whole" / REPLIES).read_text().splitlines()]
    texts = [row["messages"][-1]["content"] for row in whole]
    stop = texts[0][4:6]
    for name, changes in {"head": {}, "plain": {"head": None}, "rows": {"rows": 5}}.items():
        out = tmp_path / name
        generate(flags, out=str(out), stop=[stop], **changes)
        rows = [json.loads(line) for line in (out / REPLIES).read_text().splitlines()]
        for row, text in zip(rows, texts, strict=True):
            found = text.find(stop)
            expected = (text[:found], "stop") if found >= 0 else (text, None)
            assert row["messages"][-1]["content"] == expected[0]
            if expected[1]:
                assert row["finish_reason"] == "stop"


def test_accepted_by_depth():
    """Ten forwards: 4 accepted nothing, 3 one draft, 3 two."""
    assert accepted_by_depth({"0": 4, "1": 3, "2": 3}) == [(0.6, 10), (0.5, 6)]
    assert accepted_by_depth({"0": 4}) == []

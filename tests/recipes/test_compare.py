"""`compare`: one budget for all, every number from a measurement, an interrupted run goes on."""

from __future__ import annotations

import json

import pytest
from preparing import PROMPTS, write

from spectrain.core.errors import SpectrainError
from spectrain.evaluation.comparison import markdown, rows
from spectrain.heads.io import load_head
from spectrain.recipes import compare, evaluate, prepare, train


@pytest.fixture(scope="module")
def store(tiny_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    prepare.run(
        prepare.PrepareConfig(
            target=str(tiny_path),
            prompts=write(folder / "prompts.jsonl", PROMPTS),
            store=folder / "store",
            heldout=0.4,
            max_new_tokens=12,
            dtype="float32",
        )
    )
    return folder / "store"


@pytest.fixture
def config(store, tiny_path, tmp_path):
    def make(**changes):
        settings = {
            "target": str(tiny_path),
            "store": store,
            "out": tmp_path / "out",
            "common": {"steps": 3, "batch_size": 2, "head": {"draft_vocab_size": 60}},
            "entries": {
                "two": {"family": "eagle3", "head": {"steps": 2}},
                "three": {"family": "eagle3", "head": {"steps": 3}},
            },
            "draft_tokens": 3,
            "prompts": 3,
            "max_new_tokens": 8,
        }
        return compare.CompareConfig(**settings | changes)

    return make


def test_table_numbers_are_those_of_the_single_commands(config, store, tiny_path, tmp_path):
    report = compare.run(config())
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == report
    assert (tmp_path / "out" / "compare.png").read_bytes()[:4] == b"\x89PNG"
    for name, entry in report["entries"].items():
        head = load_head(tmp_path / "out" / name)
        assert head.config.steps == {"two": 2, "three": 3}[name]  # the entry's own
        assert head.config.draft_vocab_size == 60  # common to all
        alone = evaluate.run(
            evaluate.EvalConfig(
                target=str(tiny_path),
                store=store,
                head=tmp_path / "out" / name / "head",
                temperature=[0.0],
                max_draft=3,
                out=tmp_path / "eval",
            )
        )["temperatures"][0]
        assert entry["tau"] == alone["tau"]
        assert entry["positions"] == alone["positions"]
        race = report["race"]["methods"][name]
        assert race["identical"] == report["race"]["prompts"] == 3
    header, cells = rows(report)
    assert {len(row) for row in cells} == {len(header)}
    assert [row[0] for row in cells][-2:] == ["spectrain-plain", "transformers"]
    assert all(name in markdown(report) for name in report["entries"])


def test_a_second_call_trains_nothing_again(config, monkeypatch):
    first = compare.run(config())
    monkeypatch.setattr(train, "train", None)  # would be called by any training
    again = compare.run(config())
    assert again["entries"] == first["entries"]


def test_a_head_that_exists_is_compared_without_training(config, tmp_path):
    compare.run(config(families=["two"]))
    entries = {"old": {"load": str(tmp_path / "out" / "two" / "head")}}
    report = compare.run(config(entries=entries, out=tmp_path / "other"))
    assert report["entries"]["old"]["trained_tokens"] is None
    assert report["entries"]["old"]["tau"][0]["value"] >= 1


def test_unequal_budgets_are_refused_before_any_training(config, tmp_path):
    entries = {"a": {"family": "eagle3"}, "b": {"family": "eagle3", "steps": 4}}
    with pytest.raises(SpectrainError, match="different numbers of tokens"):
        compare.run(config(entries=entries))
    assert not (tmp_path / "out" / "a").exists()


def test_bad_entries_are_told_before_any_training(config, tmp_path):
    entries = {"a": {"family": "eagle3"}, "b": {"family": "eagle3", "head": {"stepz": 1}}}
    with pytest.raises(SpectrainError, match=r"unknown key head\.stepz"):
        compare.run(config(entries=entries))
    with pytest.raises(SpectrainError, match="no entry c"):
        compare.run(config(families=["c"]))
    assert not (tmp_path / "out" / "a").exists()

"""`eval-alpha` on a small store of the tiny target: the report, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console

from spectrain.core.config import load_config
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.data.capture import capture
from spectrain.data.shard import Row
from spectrain.data.writer import StoreWriter
from spectrain.heads.eagle3 import Eagle3Head, Eagle3Options
from spectrain.heads.io import save_head
from spectrain.recipes import evaluate as evaluate_recipe
from spectrain.recipes.evaluate import EvalConfig, render, run

SHAPES = [(3, 9, 0.0, "code"), (2, 5, 0.0, "chat"), (4, 12, 1.0, "code"), (1, 7, None, None)]


def make_store(path, target, shapes=SHAPES, layers=(0, 2, 3), **drawn):
    """Held-out rows of random tokens: (prompt length, reply length, temperature, domain)."""
    random = torch.Generator().manual_seed(0)
    rows = [
        Row(
            id=f"{place:016x}",
            split="heldout",
            tokens=torch.randint(3, 380, (before + size,), dtype=torch.int32, generator=random),
            reply=torch.tensor([0] * before + [1] * size, dtype=torch.int16),
            domain=domain,
            temperature=temperature,
        )
        for place, (before, size, temperature, domain) in enumerate(shapes)
    ]
    settings = {
        "dtype": "float32",
        "aux_layers": list(layers),
        "target": {"fingerprint": target.fingerprint},
        **drawn,
    }
    with StoreWriter.claim(path, settings, {"target": target.name}) as writer:
        found = dict(capture(target, rows, layers, torch.float32, 64))
        writer.write_shard(0, "all", [(found[n].row, found[n].states) for n in range(len(rows))])
        writer.finish(1)
    return path


@pytest.fixture
def settings(tiny, tiny_path, tmp_path, monkeypatch):
    """Flags of a run over a store and an untrained head; paths are of this test alone."""
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")
    torch.manual_seed(0)
    options = Eagle3Options(steps=3, draft_vocab_size=200, aux_layers=(0, 2, 3))
    head = Eagle3Head.create(options, tiny, torch.ones(tiny.vocab_size, dtype=torch.int64))
    save_head(head, tmp_path / "head")
    return {
        "target": str(tiny_path),
        "store": str(make_store(tmp_path / "store", tiny)),
        "head": str(tmp_path / "head"),
        "out": str(tmp_path / "out"),
    }


def evaluate(settings, **changes):
    return run(load_config(EvalConfig, "eval", flags=settings | changes))


def printed(report) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(render(report))
    return captured.get()


def test_report(settings, tmp_path):
    report = evaluate(settings, max_draft=3)
    json.dumps(report, allow_nan=False)
    assert (tmp_path / "out" / "alpha.png").read_bytes().startswith(b"\x89PNG")
    greedy, sampled = report["temperatures"]
    assert [greedy["temperature"], sampled["temperature"]] == [0, 1]
    # Rows count at the temperature their reply was sampled at, and at no other.
    assert (greedy["conversations"], sampled["conversations"]) == (2, 1)
    assert greedy["note"] is sampled["note"] is None
    assert [p["anchors"] for p in greedy["positions"]] == [8 + 4, 7 + 3, 6 + 2]
    assert greedy["tokens"] == 8 + 4
    assert [row["draft"] for row in greedy["tau"]] == [1, 2, 3]
    assert list(greedy["domains"]) == ["chat", "code"]
    assert sampled["ranks"] is None
    assert greedy["ranks"]["reached"][0] == 8 + 4
    assert greedy["ranks"]["accepted"][0][0] == greedy["positions"][0]["conditional"]["value"]
    for row in sampled["positions"]:
        assert 0 < row["marginal"]["value"] < 1
    shown = printed(report)
    assert max(map(len, shown.splitlines())) <= 80
    for word in ("temperature 0", "conditional", "τ", "chat", "bootstrap over conversations"):
        assert word in shown


def test_a_part_is_measured_and_said_to_be_one(settings, tiny, tmp_path):
    """The first rows in the store's order at each temperature, with the numbers of a store that
    holds no others."""
    settings = settings | {"store": str(make_store(tmp_path / "more", tiny, SHAPES * 2))}
    whole = evaluate(settings, temperature=[0, 1])
    part = evaluate(settings, temperature=[0, 1], limit=2)
    assert (whole["limit"], part["limit"]) == (None, 2)
    assert [found["conversations"] for found in whole["temperatures"]] == [4, 2]
    greedy, sampled = part["temperatures"]
    assert (greedy["conversations"], greedy["usable"], greedy["rows"]) == (2, 4, 8)
    assert greedy["note"] == "a part of the rows: the first 2 of 4"
    alone = {"store": str(make_store(tmp_path / "alone", tiny, SHAPES)), "temperature": 0}
    assert greedy["positions"] == evaluate(settings | alone)["temperatures"][0]["positions"]
    assert sampled == whole["temperatures"][1]  # there are no more
    shown = printed(part)
    assert "2 conversations of 8 rows (the first of 4)" in shown
    assert "note: a part of the rows: the first 2 of 4" in shown
    assert "a part of the rows" not in printed(whole)
    (other,) = evaluate(settings, temperature=0.5, limit=3)["temperatures"]
    assert other["note"].startswith("a part of the rows: the first 3 of 8; replies sampled at 0 (2")


def test_the_report_says_where_the_plot_is(settings, tmp_path):
    assert f"plot {tmp_path}" in "".join(printed(evaluate(settings)).split("\n"))


def test_no_row_at_this_temperature(settings):
    """All rows are used, and the report says what they are."""
    (measured,) = evaluate(settings, temperature=0.5)["temperatures"]
    assert measured["conversations"] == 4
    for part in ("0 (2 rows)", "1 (1 rows)", "unknown (1 rows)", "not at 0.5"):
        assert part in measured["note"]
    assert list(measured["domains"]) == ["chat", "code", "other"]


def test_replies_of_a_nucleus_are_said_to_be_such(settings, tiny, tmp_path):
    """Text drawn with top_p below 1 is at no temperature above 0 the target's own."""
    store = str(make_store(tmp_path / "nucleus", tiny, top_p=0.9))
    greedy, sampled, other = evaluate(settings, store=store, temperature=[0, 1, 0.5])[
        "temperatures"
    ]
    assert greedy["note"] is None
    assert "drawn with top_p 0.9" in sampled["note"]
    assert "sampled at" not in sampled["note"]
    for part in ("1 (1 rows)", "not at 0.5", "top_p 0.9"):
        assert part in other["note"]
    store = str(make_store(tmp_path / "whole", tiny, top_p=1.0))
    (sampled,) = evaluate(settings, store=store, temperature=1)["temperatures"]
    assert sampled["note"] is None


def test_few_conversations_have_no_interval_and_the_count_is_shown(settings, tiny, tmp_path):
    shown = {}
    for times in (3, 4):  # six and eight rows at temperature 0
        store = str(make_store(tmp_path / f"store {times}", tiny, SHAPES * times))
        report = evaluate(settings, store=store, temperature=0)
        (measured,) = report["temperatures"]
        first = [measured["tau"][0], measured["positions"][0]["marginal"]]
        assert all((found["low"] is None) == (times == 3) for found in first)
        # Half of the replies are too short for a fifth position.
        last = measured["positions"][4]["marginal"]
        assert last["value"] is not None
        assert last["low"] is last["high"] is None
        # Each domain has three or four of them.
        assert all(part["tau"][0]["low"] is None for part in measured["domains"].values())
        shown[times] = printed(report)
        assert "none from fewer than 8" in shown[times]
        assert max(map(len, shown[times].splitlines())) <= 80
    assert "note: 6 conversations, too few for an interval (8 are needed)" in shown[3]
    assert "too few" not in shown[4]


def test_batches_and_rerun_change_nothing(settings, tiny, tmp_path, monkeypatch):
    """One row at a time gives the same numbers, and a rerun the same report to the last digit."""
    settings = settings | {"store": str(make_store(tmp_path / "more", tiny, SHAPES * 3))}
    first = evaluate(settings, temperature=[0.5, 1.0])
    assert evaluate(settings, temperature=[0.5, 1.0]) == first
    monkeypatch.setattr("spectrain.evaluation.measure._BATCH_TOKENS", 1)
    single = evaluate(settings, temperature=[0.5, 1.0])
    for left, right in zip(first["temperatures"], single["temperatures"], strict=True):
        for one, other in zip(left["positions"], right["positions"], strict=True):
            assert one["marginal"] == pytest.approx(other["marginal"], abs=1e-5)
        for one, other in zip(left["tau"], right["tau"], strict=True):
            assert one["value"] == pytest.approx(other["value"], abs=1e-5)
            assert one["low"] == pytest.approx(other["low"], abs=1e-5)


def test_chains_of_five_unless_told_otherwise(settings):
    (measured,) = evaluate(settings, temperature=1)["temperatures"]
    assert len(measured["positions"]) == 5


def test_max_draft(settings):
    (measured,) = evaluate(settings, temperature=1, max_draft=2)["temperatures"]
    assert len(measured["positions"]) == len(measured["tau"]) == 2


@pytest.mark.parametrize("temperature", [[], [-1], [1, 1.0], "warm", float("nan")])
def test_bad_temperature(settings, temperature):
    with pytest.raises(SpectrainError, match="temperature"):
        load_config(EvalConfig, "eval", flags=settings | {"temperature": temperature})


def test_nothing_to_measure(settings, tiny, tmp_path):
    """One-token replies hold no anchor; a split may be empty: a clear line, no table of dashes."""
    with pytest.raises(SpectrainError, match="no train row has a reply of two tokens"):
        evaluate(settings, split="train")
    short = make_store(tmp_path / "short", tiny, [(3, 1, 0.0, None)])
    with pytest.raises(SpectrainError, match="no heldout row"):
        evaluate(settings, store=str(short))


def test_other_layers(settings, tiny, tmp_path):
    """Auxiliary states of other layers have the same shape; only the store's settings tell."""
    other = make_store(tmp_path / "other", tiny, layers=(0, 1, 2))
    with pytest.raises(SpectrainError, match=r"layers \[0, 1, 2\].*\[0, 2, 3\]"):
        evaluate(settings, store=str(other))


def test_another_target(settings, tiny, tmp_path):
    """Store and head of one target are refused with another, before anything is measured and before
    what follows from it, as other layers do."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(settings["target"])
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(tmp_path / "changed")
    AutoTokenizer.from_pretrained(settings["target"]).save_pretrained(tmp_path / "changed")
    other = make_store(tmp_path / "other layers", tiny, layers=(0, 1, 2))
    for store in (settings["store"], str(other)):
        with pytest.raises(SpectrainError, match="not of this target"):
            evaluate(settings, target=str(tmp_path / "changed"), store=store)


def test_a_plot_that_cannot_be_written_costs_nothing_else(settings, monkeypatch, capsys):
    def full(path, data):
        raise RunFailed("disk full", where=str(path))

    monkeypatch.setattr(evaluate_recipe, "atomic_write", full)
    report = evaluate(settings)
    assert report["plot"] is None
    assert report["temperatures"][0]["positions"][0]["anchors"] > 0
    assert "no plot: " in capsys.readouterr().err
    assert "plot None" not in printed(report)

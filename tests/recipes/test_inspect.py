"""`spectrain inspect` shows what training sees, and nobody's text moves the terminal."""

from __future__ import annotations

import io
import json

import pytest
from fake_rows import SETTINGS, random_row
from preparing import prompt, talk, write
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from spectrain import cli
from spectrain.core.config import load_config
from spectrain.core.errors import SpectrainError
from spectrain.data.reading import read_conversations
from spectrain.data.store import FeatureStore
from spectrain.data.tokenise import given_rows
from spectrain.data.writer import StoreWriter
from spectrain.recipes.inspect import InspectConfig, _parts, run
from spectrain.recipes.inspect_report import render, visible
from spectrain.recipes.prepare import PrepareConfig

TALK = talk("How many?", "Seven [bold red]apples[/].", "Sure?", "Yes.\n", temperature=0.7)


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Only the tokenizer of a target may be loaded."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)


@pytest.fixture
def report(tiny_path, tmp_path):
    """The report of rows, written to a file."""

    def inspected(*rows, **flags):
        path = write(tmp_path / "rows.jsonl", list(rows))
        flags = {"target": str(tiny_path), "prompts": str(path)} | flags
        return run(load_config(InspectConfig, "inspect", flags=flags))

    return inspected


@pytest.fixture
def store(tmp_path, tiny_path):
    """A store of three rows that names the tiny target."""
    path = tmp_path / "store"
    rows = [random_row(seed, 8 + seed, "heldout" if seed == 2 else "train") for seed in range(3)]
    with StoreWriter.claim(path, SETTINGS, {"target": str(tiny_path)}) as writer:
        writer.write_shard(0, "first", rows)
        counts = {
            "rows": {"train": 2, "heldout": 1},
            "tokens": {"train": 17, "heldout": 10},
            "supervised_tokens": {"train": 9, "heldout": 5},
            "truncated": 0,
            "length_stopped": 2,
            "loops": 1,
            "dropped": {"empty-reply": 4},
        }
        writer.finish(1, counts)
    return path


def printed(report, **more) -> str:
    out = io.StringIO()
    Console(file=out, width=80, highlight=False, **more).print(render(report))
    return out.getvalue()


def test_the_parts_are_the_row(report, tokenizer, tmp_path):
    """Joined they are the decoded row, and the supervised ones its replies with their ends."""
    (row,) = report(TALK)["rows"]
    conversations = read_conversations(tmp_path / "rows.jsonl")
    stops = (tokenizer.eos_token_id,)
    ((made,), _) = given_rows(tokenizer, stops, conversations[0], split="train", max_length=512)
    assert "".join(part["text"] for part in row["parts"]) == tokenizer.decode(made.tokens)
    said = ["", ""]
    for part in row["parts"]:
        if part["reply"]:
            said[part["reply"] - 1] += part["text"]
        assert part["special"] == (part["text"] in ("<|im_start|>", "<|im_end|>"))
    assert said == ["Seven [bold red]apples[/].<|im_end|>", "Yes.\n<|im_end|>"]
    assert (row["tokens"], row["supervised"]) == (len(made.tokens), made.supervised)
    assert (row["id"], row["temperature"], row["number"]) == (made.id, 0.7, 1)
    assert row["places"] == [f"{tmp_path / 'rows.jsonl'}:1"]


def test_parts_of_a_character_do_not_repeat_what_comes_before(tokenizer):
    ids = tokenizer("end 🙂", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids[:-1]).endswith("\ufffd")
    first, last = _parts(ids, [0] * (len(ids) - 1) + [1], tokenizer)
    assert first["text"].startswith("end ")
    assert last["text"] == tokenizer.decode(ids[-1:])


def test_without_colours_the_marks_tell(report):
    text = printed(report(TALK))
    assert "\x1b" not in text
    assert "⟦Seven [bold red]apples[/].<|im_end|>⟧↵\n<|im_start|>user↵" in text
    assert "⟦Yes.↵\n<|im_end|>⟧\n" in text
    assert text.count("⟦") == text.count("⟧") == 2


def test_colours_where_there_is_a_terminal(report, monkeypatch):
    found = report(TALK)
    assert "\x1b[1;32m⟦" in printed(found, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in printed(found, force_terminal=True, color_system="standard")


def test_a_text_cannot_move_the_terminal_or_forge_marks(report):
    evil = "\x1b[31mred\x1b]0;title\x07 \r\x08 ⟦x⟧ \u202eback\u2028 👩\u200d👧"
    assert visible(evil) == (
        "\\x1b[31mred\\x1b]0;title\\x07 \\r\\x08 \\u27e6x\\u27e7 \\u202eback\\u2028 👩\u200d👧"
    )
    text = printed(report(talk("q", evil, domain="d" + evil)))
    assert [char for char in evil if char in text and not char.isprintable()] == ["\u200d"]
    assert text.count("⟦") == text.count("⟧") == 1
    assert "\\x1b]0;title" in text


def test_every_row_has_a_fate_and_a_place(report, tmp_path):
    rows = (
        TALK,
        prompt("Why?"),
        {"messages": [{"role": "system", "content": "s"}]},
        talk("empty", " "),
        TALK,
        {"text": "a plain text that is long enough"},
        talk("long", "word " * 50),
        talk("cut", "off", finish_reason="length"),
        {"messages": "half a row"},
    )
    found = report(*rows, max_length=60, show=1)
    fates = {entry["fate"]: entry for entry in found["fates"]}
    assert {fate: entry["rows"] for fate, entry in fates.items()} == {
        "kept": 4,
        "to be answered by the target": 1,
        "of these cut at max_length": 1,
        "of these with a reply cut off": 1,
        "dropped: bad-row": 1,
        "dropped: duplicate": 1,
        "dropped: empty-reply": 1,
        "dropped: no-user-turn": 1,
    }
    assert len(found["rows"]) == 1
    path = tmp_path / "rows.jsonl"
    assert fates["dropped: duplicate"]["places"] == [f"{path}:5"]
    assert fates["dropped: empty-reply"]["places"] == [f"{path}:4"]
    assert fates["dropped: bad-row"]["places"][0].startswith(f"{path}:9 (messages is a string")
    text = printed(found)
    assert f"dropped: empty-reply:  {path}:4" in text.replace("\n", "")  # long paths are folded
    assert list(fates)[:2] == ["kept", "to be answered by the target"]


def test_a_part_is_told_from_the_whole(report):
    """With --limit, what reading drops is counted of the whole source and the rest of that part:
    the table says which is which. Where all of it was looked at there is nothing to tell."""
    rows = [talk(f"q{n}", "a" if n % 2 else " ") for n in range(8)] + [talk("q1", "a"), {"x": 1}]
    found = report(*rows, limit=5)
    of = {entry["fate"]: entry["of"] for entry in found["fates"]}
    assert of == {
        "kept": "5 read",
        "dropped: empty-reply": "5 read",
        "dropped: bad-row": "whole source",
        "dropped: duplicate": "whole source",
    }
    assert sum(entry["rows"] for entry in found["fates"] if entry["of"] == "5 read") == 5
    lines = printed(found).split("tokenizer of")[1].splitlines()
    head = next(line for line in lines if line.startswith("fate"))
    assert head.split() == ["fate", "rows", "tokens", "supervised", "counted", "of"]
    assert next(line for line in lines if line.startswith("kept")).endswith("5 read")
    whole = report(*rows)
    assert {entry["of"] for entry in whole["fates"]} == {None}
    assert "counted of" not in printed(whole)


def test_what_differs_from_prepare_is_said():
    for name in ("limit", "on_bad_row"):
        own, theirs = InspectConfig.model_fields[name], PrepareConfig.model_fields[name]
        assert own.default != theirs.default
        assert f"`{name}`" in InspectConfig.__doc__


def test_no_more_than_three_places(report, tmp_path):
    found = report(*[talk(f"q{n}", " ") for n in range(5)])
    (entry,) = found["fates"]
    assert entry["rows"] == 5
    assert len(set(entry["places"])) == 5  # in the report; printed are three
    assert printed(found).count("\n  ") == 3


def test_one_row_by_number_or_id(report):
    rows = [talk(f"question {n}", f"answer {n}") for n in range(9)]
    whole = report(*rows, show=9)["rows"]
    assert [row["number"] for row in whole] == list(range(1, 10))
    assert report(*rows, row="7")["rows"] == [whole[6]]
    assert report(*rows, row=whole[2]["id"][:12])["rows"] == [whole[2]]
    with pytest.raises(SpectrainError, match=r"no row 'zz'.*from 1 to 9"):
        report(*rows, row="zz")


def test_a_store_shows_what_it_holds(store, tiny_path, tokenizer):
    config = load_config(InspectConfig, "inspect", flags={"store": str(store), "show": 9})
    found = run(config)
    held = FeatureStore.open(store)
    assert found["target"] == str(tiny_path)
    assert [row["split"] for row in found["rows"]] == ["train", "train", "heldout"]
    for row, info in zip(found["rows"], held.rows("train") + held.rows("heldout"), strict=True):
        tokens, reply = held.text(info)
        assert row["id"] == info.id
        assert "".join(part["text"] for part in row["parts"]) == tokenizer.decode(tokens)
        said = "".join(part["text"] for part in row["parts"] if part["reply"])
        assert tokenizer.decode(tokens).endswith(said)
        assert row["supervised"] == int((reply > 0).sum())
    fates = {entry["fate"]: entry["rows"] for entry in found["fates"]}
    assert fates == {
        "kept, train": 2,
        "kept, heldout": 1,
        "of these cut at max_length": 0,
        "of these with a reply cut off": 2,
        "of these going round in circles": 1,
        "dropped: empty-reply": 4,
    }
    assert "not the tokenizer" in found["note"]  # the settings of this store name none
    assert printed(found).startswith("note: ")


def test_settings_that_prepare_has_too_mean_the_same():
    shared = set(InspectConfig.model_fields) & set(PrepareConfig.model_fields)
    shared -= {"target", "prompts", "store", "limit", "on_bad_row"}
    assert {"regenerate", "max_length", "heldout", "max_new_tokens"} <= shared
    for name in shared:
        own, theirs = InspectConfig.model_fields[name], PrepareConfig.model_fields[name]
        assert (own.default, own.annotation) == (theirs.default, theirs.annotation), name


@pytest.mark.parametrize("flags", [[], ["--prompts", "a", "--store", "b"]])
def test_either_prompts_or_a_store(flags):
    result = CliRunner().invoke(cli.app, ["inspect", *flags])
    assert result.exit_code == 2
    assert "either --prompts FILE or --store FOLDER" in result.output


def test_the_command(tiny_path, tmp_path):
    path = write(tmp_path / "rows.jsonl", [TALK])
    out = tmp_path / "report.json"
    flags = ["--prompts", str(path), "--target", str(tiny_path), "--json", str(out)]
    result = CliRunner().invoke(cli.app, ["inspect", *flags])
    assert result.exit_code == 0, result.output
    assert "⟦Yes.↵\n<|im_end|>⟧" in result.output
    assert json.loads(out.read_text())["rows"][0]["supervised"] > 3

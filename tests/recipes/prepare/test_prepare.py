"""prepare as a whole: what comes out, and what is refused."""

import shutil
from pathlib import Path

import pytest
from preparing import PROMPTS, prompt, talk, write

from spectrain.core.errors import SpectrainError
from spectrain.data.store import FeatureStore
from spectrain.generator import answering
from spectrain.recipes import prepare


def test_prompts_become_rows_with_the_targets_own_replies(config, tiny):
    """Train prompts once at their temperature, held-out ones once at each of theirs; report,
    manifest and store agree; at temperature 0 every supervised token is the target's argmax."""
    report = prepare.run(config())
    store = FeatureStore.open(config().store, verify=True)
    store.require_target(tiny.fingerprint)
    train, heldout = store.rows("train"), store.rows("heldout")
    assert {row.temperature for row in train} == {1.0}
    assert {row.temperature for row in heldout} == {0.0, 1.0}
    held = {row.id for row in heldout}
    drawn_empty = sum(report["counts"]["dropped"].values())
    assert len(train) + len(heldout) + drawn_empty == 16 + len(held)
    assert not held & {row.id for row in train}
    assert report["counts"]["rows"] == {"train": len(train), "heldout": len(heldout)}
    assert report["supervised_tokens"]["train"] == sum(row.supervised for row in train)
    assert report["supervised_tokens"]["train"] == store.token_counts("train", 392).sum()
    assert report["fingerprint"] == store.manifest["fingerprint"]
    assert report["bytes"] == sum(f.stat().st_size for f in config().store.glob("*.safetensors"))
    assert set(report["seconds"]) == {"read", "load", "answer", "tokenise", "capture"}
    assert all(rate > 0 for rate in report["tokens_per_second"].values())
    assert store.manifest["settings"]["aux_layers"] == list(tiny.default_aux_layers())
    for row in (row for row in heldout if row.temperature == 0.0):
        batch = store.batch([row])
        where = batch.argmax[0] >= 0
        assert int(where.sum()) == row.supervised
        assert batch.tokens[0][1:][where[:-1]].tolist() == batch.argmax[0][where].tolist()
        assert tiny.tokenizer.decode(batch.tokens[0]).startswith("<|im_start|>user\nHow many")


def test_given_replies_are_not_asked_for(config, tmp_path, monkeypatch):
    """`auto` keeps them with their own facts; the target is asked for nothing."""
    monkeypatch.setattr(answering, "complete", None)
    rows = [talk(f"q{n}", "a reply", temperature=0.7, finish_reason="stop") for n in range(4)]
    prompts = write(tmp_path / "given.jsonl", [*rows, talk("q", "cut", finish_reason="length")])
    report = prepare.run(config(prompts=prompts, heldout=0.0))
    rows = FeatureStore.open(config().store).rows("train")
    assert sorted(row.temperature or 0 for row in rows) == [0, 0.7, 0.7, 0.7, 0.7]
    assert report["counts"]["length_stopped"] == 1
    assert report["tokens_per_second"]["answer"] is None


def test_regenerate_replaces_given_replies(config, tmp_path):
    prompts = write(tmp_path / "given.jsonl", [talk("q", "not the target's words")])
    prepare.run(config(prompts=prompts, heldout=0.0, regenerate=True))
    store = FeatureStore.open(config().store)
    (row,) = store.rows("train")
    assert row.temperature == 1.0
    assert row.supervised <= 8


def test_every_dropped_row_is_counted(config, tmp_path):
    """Cases 1, 2, 7, 8 and 12 in one file: the sum of fates is the number of lines."""
    prompts = write(
        tmp_path / "mixed.jsonl",
        [
            talk("q", "good"),
            talk("q", "good"),
            {"messages": [{"role": "system", "content": "only"}]},
            prompt("unanswered"),
            talk("long " * 100, "behind the limit"),
            talk("q", ""),
            talk("q", "cut", finish_reason="length"),
            {"words": "no messages"},
        ],
    )
    report = prepare.run(
        config(
            prompts=prompts,
            regenerate=False,
            on_bad_row="skip",
            max_length=60,
            length_stopped="drop",
        )
    )
    assert report["counts"]["dropped"] == {
        "bad-row": 1,
        "duplicate": 1,
        "empty-reply": 1,
        "length-stopped": 1,
        "no-assistant-turn": 1,
        "no-user-turn": 1,
        "truncated-away": 1,
    }
    assert sum(report["counts"]["rows"].values()) == 1
    text = prepare.render(report)
    assert "dropped: 1 bad-row, 1 duplicate, 1 empty-reply" in text


BASE = '{"messages": [{"role": "user", "content": "q%s"}, {"role": "assistant", %s}]%s}'
DEEP, LONG = "[" * 600 + "]" * 600, "1" + "0" * 400
NASTY = [
    ('"content": "a"', f', "temperature": {LONG}'),
    ('"content": "a"', f', "tools": [{{"name": "f", "x": {DEEP}}}]'),
    (f'"tool_calls": [{{"name": "f", "arguments": {{"x": {DEEP}}}}}]', ""),
    ('"tool_calls": [{"name": "f", "arguments": "' + "[" * 9000 + "]" * 9000 + '"}]', ""),
    (f'"tool_calls": [{{"name": "f", "arguments": {{"x": {LONG}}}}}]', ""),
    ('"content": "a"', ', "tools": [{"name": "f", "x": NaN}]'),
    ('"content": "a"', ', "tools": [{"\\ud83d": 1}]'),
    ('"content": "a", "\\ud83d": 1', ', "tools": {"\\ud83d": 1}'),
    (f'"content": {DEEP}', ""),
    (f'"content": [{{"type": "text", "text": {DEEP}}}]', ""),
    ('"content": "a"', f', "domain": {LONG}'),
    ('"content": "a"', f', "finish_reason": "{"x" * 10**6}"'),
    ('"content": "a\\u0000b"', ', "domain": "\\u0000"'),
    (f'"content": "{"a" * 10**6}"', ""),
]


@pytest.mark.parametrize("answered", [True, False])
def test_whatever_a_row_is_it_is_the_fate_of_that_row(config, tmp_path, answered):
    """Case 12: no line kills the run or takes others with it."""
    prompts = tmp_path / "nasty.jsonl"
    lines = [BASE % (n, *row) for n, row in enumerate(NASTY)]
    prompts.write_text("\n".join([*lines, BASE % ("good", '"content": "a reply"', "")]))
    settings = {"prompts": prompts, "heldout": 0.0, "regenerate": "auto" if answered else True}
    report = prepare.run(config(**settings, on_bad_row="skip"))
    counts = report["counts"]
    assert sum(counts["rows"].values()) + sum(counts["dropped"].values()) == len(NASTY) + 1
    assert counts["dropped"]["bad-row"] >= 8
    prepare.render(report).encode()


@pytest.mark.parametrize("number", [0, 1, 2, 5, 6, 8])
def test_a_bad_row_is_told_with_its_line(config, tmp_path, number):
    prompts = tmp_path / "nasty.jsonl"
    prompts.write_text(
        BASE
        % (
            0,
            *NASTY[number],
        )
        + "\n"
    )
    with pytest.raises(SpectrainError, match=r"nasty.jsonl:1: ") as caught:
        prepare.run(config(prompts=prompts))
    assert len(str(caught.value)) < 700


def test_plain_texts_and_conversations_in_one_file(config, tmp_path, tiny):
    """Texts are captured whole and never asked about, whatever `regenerate` says."""
    rows = [{"text": f"{n} apples and a lazy dog " * (3 + n), "domain": "web"} for n in range(8)]
    prompts = write(tmp_path / "mixed.jsonl", [*rows, prompt("q1"), prompt("q2"), rows[0]])
    report = prepare.run(config(prompts=prompts, regenerate=True, max_length=70))
    store = FeatureStore.open(config().store, verify=True)
    found = [row for split in ("train", "heldout") for row in store.rows(split)]
    texts = [row for row in found if row.domain == "web"]
    assert len(texts) == 8
    assert {row.domain for row in found} == {"web", "chat"}
    assert report["counts"]["dropped"] == {"duplicate": 1}
    for row in texts:
        batch = store.batch([row])
        assert row.temperature is None
        assert batch.reply[0].tolist() == [0] + [1] * (row.length - 1)
        assert "apples and a lazy dog" in tiny.tokenizer.decode(batch.tokens[0])
        assert (batch.argmax[0, :-1] >= 0).all()
    assert report["counts"]["truncated"] == sum(row.length == 70 for row in texts) > 0
    assert prepare.run(config(prompts=prompts, regenerate=True, max_length=70))


def test_plain_texts_need_no_template(config, tmp_path, tiny_path, monkeypatch):
    """A base model's tokenizer has none: texts do, one conversation among them is refused."""
    base = shutil.copytree(tiny_path, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    monkeypatch.setattr(answering, "complete", None)
    rows = [{"text": f"document {n} of words"} for n in range(10)]
    prompts = write(tmp_path / "texts.jsonl", rows)
    report = prepare.run(config(target=str(base), prompts=prompts, heldout=0.5))
    counts = report["counts"]["rows"]
    assert counts["train"] + counts["heldout"] == 10
    assert 0 < counts["heldout"] < 10
    write(prompts, [*rows, talk("q", "a reply")])
    with pytest.raises(SpectrainError, match="no chat template"):
        prepare.run(config(target=str(base), prompts=prompts, store=tmp_path / "other"))


def test_all_rows_dropped_is_an_error_with_the_reasons(config, tmp_path):
    prompts = write(tmp_path / "none.jsonl", [talk("q", ""), talk("word " * 200, "x")])
    with pytest.raises(SpectrainError, match=r"no row is left: 1 empty-reply, 1 truncated-away"):
        prepare.run(config(prompts=prompts, max_length=50))
    with pytest.raises(SpectrainError, match="incomplete"):
        FeatureStore.open(config().store)


def test_replies_of_one_token_teach_nothing(config):
    """The reply's first token is given to the head, the second is its first guess."""
    with pytest.raises(SpectrainError, match=r"no row is left: \d+ reply-too-short"):
        prepare.run(config(max_new_tokens=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 512}, "leaves no room for a prompt"),
        ({"aux_layers": (0, 1, 4)}, "not ascending layers of 0 … 3"),
        ({"aux_layers": (2, 1, 0)}, "not ascending layers"),
        ({"prompts": Path("absent.jsonl")}, "no such file"),
    ],
)
def test_impossible_settings_are_one_line(config, changes, message):
    with pytest.raises(SpectrainError, match=message) as caught:
        prepare.run(config(**changes))
    assert "\n" not in str(caught.value)


def test_the_summary_warns_of_what_will_hurt_later(config):
    report = prepare.run(config(heldout=0.0, max_new_tokens=2))
    text = prepare.render(report)
    assert "most replies were cut off" in text
    assert "no held-out rows" in text


@pytest.mark.parametrize("heldout", [0.0, 1.0])
def test_one_prompt_is_said_to_be_too_few(config, tmp_path, heldout):
    """No share held out makes a store of it that can be trained on and measured."""
    rows = write(tmp_path / "one.jsonl", PROMPTS[:1])
    said = prepare.render(prepare.run(config(prompts=rows, heldout=heldout)))
    lacks = "no training rows" if heldout else "no held-out rows, eval-alpha has nothing to measure"
    assert f"note: {lacks}; give more prompts: one alone is trained on or held out" in said
    assert "--heldout" not in said

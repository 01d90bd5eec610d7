"""Reading conversations: nothing is lost without being counted, nothing depends on file order."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrain.core.errors import SpectrainError
from spectrain.data.conversations import split_of
from spectrain.data.fates import Fates
from spectrain.data.reading import read_conversations


def row(*turns, **more):
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return {"messages": [{"role": roles[t[0]], "content": t[2:]} for t in turns], **more}


def test_turns_without_use_are_counted_by_reason(jsonl):
    """Cases 1 and 2: system only and (when replies are not made) user only teach nothing."""
    path = jsonl(row("s:be kind"), row("u:hi"), row("u:hi", "a:hello"), row("a:welcome", "u:hi"))
    fates = Fates()
    kept = read_conversations(path, regenerate=False, fates=fates)
    assert [c.messages[-1]["content"] for c in kept] == ["hello"]
    assert fates == {"no-user-turn": 1, "no-assistant-turn": 2}


def test_a_user_who_says_nothing_is_not_answered(jsonl):
    fates = Fates()
    kept = read_conversations(jsonl(row("u: "), row("u:", "a:what?"), row("u:hi")), fates=fates)
    assert [c.messages[0]["content"] for c in kept] == ["hi"]
    assert fates == {"empty-user-turn": 2}


@pytest.mark.parametrize(
    ("regenerate", "turns", "answered"),
    [
        (False, ["u:1", "a:2"], True),
        (True, ["u:1", None, "u:3"], False),
        ("last", ["u:1", "a:2", "u:3"], False),
        ("auto", ["u:1", "a:2", "u:3"], False),
    ],
)
def test_where_a_conversation_is_cut(jsonl, regenerate, turns, answered):
    """The row ends with a given reply, or with the user turn that the target will answer; None is
    a turn that it will answer before."""
    path = jsonl(row("u:1", "a:2", "u:3"))
    (conversation,) = read_conversations(path, regenerate)
    expected = [turn and turn[2:] for turn in turns]
    assert [m["content"] for m in conversation.messages] == expected
    assert conversation.answered is answered


def test_order_and_duplicates_of_the_source_do_not_matter(jsonl):
    """Case 13: rows are known by their content, also when equal rows carry unequal facts."""
    rows = [row(f"u:question {n}", domain=d) for n in range(9) for d in ("chat", "code")]
    fates = Fates()
    forward = read_conversations(jsonl(*rows), fates=fates)
    backward = read_conversations(jsonl(*rows[::-1], *rows[:4], name="other.jsonl"))
    assert forward == backward
    assert len(forward) == 9
    assert fates == {"duplicate": 9}


def test_equal_prompts_share_a_split(jsonl):
    """Two replies to one prompt are two rows, never one on each side."""
    path = jsonl(row("u:hi", "a:one"), row("u:hi", "a:two"))
    first, second = read_conversations(path)
    assert first.id != second.id
    assert first.prompt_id == second.prompt_id


def test_split_is_a_fraction_and_independent_of_the_order():
    """The first rows in order of content hash (what --limit keeps) hold both splits."""
    ids = sorted(f"{n * 2654435761 % 2**64:016x}" for n in range(2000))
    heldout = [split_of(i, 0.1) == "heldout" for i in ids]
    assert 150 < sum(heldout) < 250
    assert 50 < sum(heldout[:1000]) < 150
    assert {split_of(i, 0.0) for i in ids} == {"train"}


BAD = {
    "half a line": b'{"messages": [{"role": "us',
    "not an object": b"[1, 2]",
    "no messages": b'{"text": "hi"}',
    "empty messages": b'{"messages": []}',
    "message without role": b'{"messages": [{"content": "hi"}]}',
    "content of parts": b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
    "content null": b'{"messages": [{"role": "user", "content": null}]}',
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "half a surrogate pair": b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    "temperature text": b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    "temperature nan": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "tools": b'{"messages": [{"role": "user", "content": "x"}], "tools": "{"}',
    "nested": b"[" * 100_000,
    "huge number": b'{"messages": ' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("line", BAD.values(), ids=BAD)
def test_bad_row_names_its_line_or_is_counted(jsonl, line):
    """Case 12: `stop` tells file and line (blank lines counted), `skip` keeps the others."""
    path = jsonl(row("u:good"), b"", line)
    with pytest.raises(SpectrainError, match=rf"{path.name}:3: .*--on-bad-row skip"):
        read_conversations(path)
    fates = Fates()
    assert len(read_conversations(path, on_bad_row="skip", fates=fates)) == 1
    assert fates == {"bad-row": 1}


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(SpectrainError, match=r"empty\.jsonl: the file is empty"):
        read_conversations(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(SpectrainError, match="no such file"):
        read_conversations(tmp_path / "absent.jsonl")
    with pytest.raises(SpectrainError, match="a folder, not a JSONL file"):
        read_conversations(tmp_path)


def test_tools_as_list_or_as_text_are_the_same(jsonl):
    """Case 11."""
    tools = [{"type": "function", "function": {"name": "clock"}}]
    path = jsonl(row("u:time?", tools=tools), row("u:time?", tools=json.dumps(tools)))
    (conversation,) = read_conversations(path)
    assert list(conversation.tools) == tools


def test_first_line_may_carry_a_byte_order_mark(jsonl):
    path = jsonl(b"\xef\xbb\xbf" + json.dumps(row("u:hi")).encode())
    assert len(read_conversations(path)) == 1


def test_plain_texts_where_they_are_welcome(jsonl):
    """Each once, known by its content, never to be answered; messages go before text."""
    rows = [{"text": f"document {n}", "domain": "web"} for n in range(3)]
    path = jsonl(*rows, rows[0], row("u:hi", "a:hello", text="ignored"), row("u:hello"))
    for regenerate in (True, False, "auto"):
        fates = Fates()
        found = read_conversations(path, regenerate, fates=fates, texts=True)
        assert fates["duplicate"] == 1
        texts = [c for c in found if c.text is not None]
        assert {c.text for c in texts} == {f"document {n}" for n in range(3)}
        assert all(c.answered and c.domain == "web" and c.messages == () for c in texts)
        assert all(c.id == c.prompt_id for c in texts)
        others = [c for c in found if c.text is None]
        assert len(others) == (1 if regenerate is False else 2)
    assert [c.id for c in found] == sorted(c.id for c in found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": 7}, "text is not a text \\(7\\)"),
        ({"text": None}, "not a conversation: expected"),
        ({"text": "x", "domain": 1}, "domain has the wrong type"),
        ({"texts": "x"}, 'expected {"messages": .* or {"text": …}'),
        ({"messages": [], "text": "x"}, "has no messages"),
    ],
)
def test_bad_text_names_its_line(jsonl, line, message):
    path = jsonl({"text": "good"}, line)
    with pytest.raises(SpectrainError, match=f"{path.name}:2: .*{message}"):
        read_conversations(path, texts=True)
    fates = Fates()
    assert len(read_conversations(path, on_bad_row="skip", fates=fates, texts=True)) == 1
    assert fates == {"bad-row": 1}


def test_plain_text_is_no_prompt(jsonl):
    with pytest.raises(SpectrainError, match=r":1: a plain text has nothing to answer"):
        read_conversations(jsonl({"text": "x"}))


@given(st.lists(st.text(max_size=20).filter(str.strip), min_size=1, max_size=6))
def test_any_text_survives(tmp_path_factory, texts):
    """What comes out is what went in: no text is normalised, stripped or re-encoded."""
    texts = [t.encode("utf-8", "ignore").decode() + "." for t in texts]
    path = tmp_path_factory.mktemp("any") / "rows.jsonl"
    path.write_text("".join(json.dumps(row(f"u:{text}")) + "\n" for text in texts))
    found = {c.messages[0]["content"] for c in read_conversations(path)}
    assert found == set(texts)

"""Rows: the same conversation in any shape is the same row; what has no meaning is refused."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrain.data.fates import Fates
from spectrain.data.reading import read_conversations
from spectrain.data.shapes import parse

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be kind"}
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
NOTHING = {"tools": None, "domain": None, "temperature": None, "finish_reason": None}
TOOLS = [{"type": "function", "function": {"name": "clock"}}]

ANSWERED = {
    "messages": {"messages": [USER, REPLY]},
    "messages before all else": {"messages": [USER, REPLY], "prompt": "x", "text": "y"},
    "messages as JSON": {"messages": json.dumps([USER, REPLY])},
    "conversations": {"conversations": SHARED},
    "conversations as JSON": {"conversations": json.dumps(SHARED)},
    "conversation": {"conversation": [USER, REPLY], "text": "y"},
    "prompt and response": {"prompt": "hi", "response": "hello"},
    "prompt and completion": {"prompt": [USER], "completion": [REPLY]},
    "one message each": {"prompt": USER, "completion": REPLY},
    "messages and a text": {"prompt": [USER], "answer": "hello"},
    "question and answer": {"question": "hi", "answer": "hello"},
    "instruction": {"instruction": "hi", "input": "", "output": "hello", "text": "y"},
    "input and output": {"input": [USER], "output": "hello"},
    "absent as None": {"messages": None, "prompt": "hi", "response": "hello", "completion": None},
}


@pytest.mark.parametrize("row", ANSWERED.values(), ids=ANSWERED)
def test_one_conversation_in_many_shapes(row):
    """As a line and as a decoded row."""
    for given_row in (json.dumps(row).encode(), row):
        assert parse(given_row, texts=True) == {"messages": [USER, REPLY], **NOTHING}


def test_all_shapes_are_one_row(jsonl):
    """Case 13: what is known by its content is found again in another file of another shape."""
    fates = Fates()
    assert len(read_conversations(jsonl(*ANSWERED.values()), fates=fates)) == 1
    assert fates == {"duplicate": len(ANSWERED) - 1}


@pytest.mark.parametrize(
    ("row", "fate"),
    [
        ({"conversations": [{"from": "system", "value": "be kind"}]}, "no-user-turn"),
        ({"prompt": [SYSTEM], "response": "hello"}, "no-user-turn"),
        ({"conversations": SHARED[:1]}, "no-assistant-turn"),
        ({"prompt": "hi", "system": "be kind"}, "no-assistant-turn"),
        ({"prompt": "hi", "response": None}, "no-assistant-turn"),
    ],
)
def test_turns_without_use_are_counted_in_every_shape(jsonl, row, fate):
    """Cases 1 and 2."""
    fates = Fates()
    found = read_conversations(jsonl(row, ANSWERED["messages"]), False, fates=fates)
    assert [conversation.messages for conversation in found] == [(USER, REPLY)]
    assert fates == {fate: 1}


def test_turns_stay_in_the_order_they_are_given():
    """Case 5: two turns of one role are not made one; whether they may be is for the template."""
    assert parse({"messages": [USER, USER, REPLY]}, False)["messages"] == [USER, USER, REPLY]


@pytest.mark.parametrize("key", ["prompt", "question", "instruction", "input"])
def test_prompt_without_a_reply_is_to_be_answered(jsonl, key):
    (conversation,) = read_conversations(jsonl({key: "hi", "response": None}))
    assert conversation.messages == (USER,)
    assert not conversation.answered


def test_input_follows_the_instruction():
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert parse(row, False)["messages"][0]["content"] == "Add.\n\n1 2"


@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_system_text_goes_before_the_messages(key):
    for row in ({"prompt": "hi"}, {"messages": [USER]}, {"messages": [SYSTEM, USER]}):
        assert parse({**row, key: "be kind"}, False)["messages"] == [SYSTEM, USER]
        if "prompt" in row:
            assert parse({**row, key: ""}, False)["messages"] == [USER]
    with pytest.raises(ValueError, match=f"{key} and the system message differ"):
        parse({"messages": [SYSTEM, USER], key: "be brief"}, False)


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])]])
def test_tools_in_all_their_forms(tools):
    """Case 11."""
    assert parse({"prompt": "hi", "tools": tools}, False)["tools"] == TOOLS


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_no_tools_in_all_their_forms(tools):
    assert parse({"prompt": "hi", "tools": tools}, False)["tools"] is None


def test_none_is_dropped_where_a_table_has_put_it():
    """In a table every record has the keys of all: tools and arguments are full of None. In a line
    of JSON null was written by someone, so that only keys of ours lose it."""
    call = {"name": "f", "arguments": {"a": 1, "b": None}}
    row = {
        "messages": [USER | {"tool_calls": None}, REPLY | {"tool_calls": [call]}],
        "tools": [{"name": "f", "parameters": {"a": {"default": None}}}],
        "domain": None,
    }
    table, line = parse(row, False), parse(json.dumps(row).encode(), False)
    assert table["messages"][0] == line["messages"][0] == USER
    assert table["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert line["messages"][1]["tool_calls"][0]["function"] == call
    assert table["tools"] == [{"name": "f", "parameters": {"a": {}}}]
    assert line["tools"] == row["tools"]


def test_facts_are_kept_and_others_are_not():
    facts = {"domain": "chat", "temperature": 0.5, "finish_reason": "length"}
    parsed = parse({"prompt": "hi", "id": 3, "messages_count": 1, **facts}, False)
    assert parsed == {"messages": [USER], "tools": None, **facts}
    assert parse({"text": "x", "domain": "web", "id": 3}, True) == {"text": "x", "domain": "web"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"7", "not a conversation: expected "),
        (b'"hi"', "not a conversation: expected "),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON (a number of too many digits)"),
        ({"id": 3, "url": "x"}, '"response": …} (its keys: id, url)'),
        ({"response": "x"}, "(its keys: response)"),
        ({"messages": 3}, "messages is not a list"),
        ({"conversations": "User: hi"}, "conversations is a string that is not JSON"),
        ({"conversations": []}, "the conversation has no messages"),
        ({"prompt": []}, "the conversation has no messages"),
        ({"prompt": 3}, "prompt is neither a text nor a list of messages"),
        ({"prompt": "x", "output": 3}, "output is neither a text nor a list of messages"),
        ({"prompt": "x", "output": ["a", "b"]}, "message 1 is not an object with a role"),
        ({"prompt": "x", "question": "x"}, "has both prompt and question, which mean the same"),
        ({"prompt": "x", "answer": "1", "output": "2"}, "has both answer and output, which mean"),
        ({"instruction": [USER], "input": "x"}, "instruction and input are not both texts"),
        ({"instruction": "x", "input": [1]}, "instruction and input are not both texts"),
        ({"prompt": "x", "images": ["a.png"]}, "the row comes with images, and only text is read"),
        ({"prompt": "x", "system": 3}, "system has the wrong type (3)"),
        ({"prompt": "x", "domain": 3}, "domain has the wrong type (3)"),
        ({"prompt": "x", "finish_reason": True}, "finish_reason has the wrong type (True)"),
        ({"prompt": "x", "temperature": "1"}, "temperature has the wrong type ('1')"),
        ({"prompt": "x", "temperature": -1}, "temperature -1 is not a number from 0 upwards"),
        ({"prompt": "x", "tools": {"a": 1}}, "tools is not a list"),
        ({"prompt": "x", "tools": "{"}, "tools is a string that is not JSON"),
        ({"prompt": "x", "tools": ["{"]}, "tools holds a string that is not JSON"),
        ({"prompt": "x", "tools": [3]}, "tools holds something that is not an object"),
        ({"prompt": "x", "tools": [{"a": {1, 2}}]}, "holds a value that is not JSON"),
        ({"prompt": "\ud83d"}, "not UTF-8 text"),
    ],
)
def test_what_is_refused_is_told_in_one_clause(row, reason):
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        parse(row, texts=False)
    assert "\n" not in str(error.value)
    assert ";" not in str(error.value)


TURNS = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), st.text(max_size=9)),
    min_size=1,
    max_size=6,
)


@given(TURNS, st.data())
def test_any_conversation_has_one_form(turns, data):
    """No shape loses, adds or changes a turn."""
    messages = [{"role": role, "content": text} for role, text in turns]
    names = {"user": "human", "assistant": "gpt", "system": "developer", "tool": "observation"}
    cut = data.draw(st.integers(1, len(turns)))
    reply = {"completion": messages[cut:]} if cut < len(turns) else {}
    shapes = [
        {"messages": messages},
        {"messages": messages[:cut] + [m | {"name": None} for m in messages[cut:]]},
        {"conversations": [{"from": names[role], "value": text} for role, text in turns]},
        {"prompt": messages[:cut], **reply},
        {"messages": [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in turns]},
    ]
    for row in shapes:
        assert parse(row, False) == {"messages": messages, **NOTHING}
        assert parse(json.dumps(row).encode(), False)["messages"] == messages

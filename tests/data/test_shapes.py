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
        ({"prompt": "x", "temperature": 10**400}, "temperature 100000"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature nan is not a number from 0"),
        ({"prompt": "x", "tools": {"a": 1}}, "tools is not a list"),
        ({"prompt": "x", "tools": "{"}, "tools is a string that is not JSON"),
        ({"prompt": "x", "tools": ["{"]}, "tools holds a string that is not JSON"),
        ({"prompt": "x", "tools": [3]}, "tools holds something that is not an object"),
        ({"prompt": "x", "tools": [{"a": {1, 2}}]}, "holds a value that is not JSON"),
        ({"prompt": "x", "tools": [{"a": float("nan")}]}, "holds a value that is not JSON"),
        (b'{"prompt": "x", "tools": [{"a": 1e400}]}', "holds a value that is not JSON"),
        (b'{"prompt": "x", "tools": [{"a": NaN}]}', "holds a value that is not JSON"),
        ({"prompt": "\ud83d"}, "not UTF-8 text"),
        ({"prompt": "x", "tools": [{"\ud83d": 1}]}, "not UTF-8 text"),
        ({"\ud83d\n": 1}, "(its keys: \\ud83d )"),
        ({"prompt": [{"role": "x" * 10**6}]}, f"the unknown role '{'x' * 39} (known: "),
    ],
)
def test_what_is_refused_is_told_in_one_clause(row, reason):
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        parse(row, texts=False)
    assert "\n" not in str(error.value)
    assert len(str(error.value).encode()) < 500
    assert ";" not in str(error.value)


@pytest.mark.parametrize("depth", [600, 5000])
@pytest.mark.parametrize("decoded", [True, False])
def test_nested_too_deeply_is_refused_wherever_it_is(depth, decoded):
    """Templates, hashes and databases go down by recursion: what they do at the bottom would
    depend on who calls them. No tool or argument is that deep."""
    deep: object = []
    for _ in range(depth):
        deep = [deep]
    text = "[" * depth + "]" * depth
    call = {"name": "f", "arguments": {"a": "DEEP"}}
    for row in (
        {"prompt": "x", "tools": [{"a": "DEEP"}]},
        {"messages": [USER, REPLY | {"tool_calls": [call]}]},
    ):
        line = json.dumps(row).replace('"DEEP"', text).encode()
        told = _replaced(row, deep) if decoded else line
        with pytest.raises(ValueError, match=r"^not valid JSON .nested too deeply.$"):
            parse(told, False)


def _replaced(value, deep):
    if isinstance(value, dict):
        return {key: _replaced(item, deep) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, deep) for item in value]
    return deep if value == "DEEP" else value


def test_as_deep_as_tools_are_is_read():
    tools = [{"a": {"b": [{"c": {"d": [[[1]]]}}] * 2}}]
    for _ in range(30):
        tools = [{"a": tools}]
    assert parse({"prompt": "x", "tools": tools}, False)["tools"] == tools


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("response", "hello"),
        ("answer", [REPLY]),
        ("chosen", [REPLY]),
        ("responses", ["hello", "hi"]),
        ("generations", ["hello"]),
        ("target", "hello"),
    ],
)
def test_a_reply_that_is_not_read_is_told(key, value):
    """Else the conversation counts as unanswered, and the target's reply takes its place."""
    with pytest.raises(ValueError, match=f"^{key} seems to be a reply .* the last of messages,"):
        parse({"messages": [USER], key: value}, False)
    # where one is read, the others replace nothing
    assert parse({"messages": [USER, REPLY], key: value}, False)["messages"][1] == REPLY
    for empty in (None, "", []):
        assert parse({"messages": [USER], key: empty}, False)["messages"] == [USER]
    if key not in ("response", "answer"):
        with pytest.raises(ValueError, match=f"^{key} seems to be .* as a text under response"):
            parse({"prompt": "hi", key: value}, False)
        whole = {"prompt": "hi", "response": "hello", key: value}
        assert parse(whole, False)["messages"] == [USER, REPLY]


@pytest.mark.parametrize(
    ("names", "finish"),
    [
        (("length", "LENGTH", "max_tokens", "MAX_TOKENS", "max_length"), "length"),
        (("max_new_tokens", "token_limit", "Token-Limit", "model_length"), "length"),
        (("stop", "STOP", "eos", "eos_token", "end_turn", "stop_sequence", "end"), "stop"),
        (("content_filter", "content-filter", "Content Filter"), "content_filter"),
        (("tool_calls", "tool-calls"), "tool_calls"),
        (("error",), "error"),
        (("", " "), None),
        (("x" * 10**6,), "x" * 40),
    ],
)
def test_every_name_of_a_finish(names, finish):
    """Case 8: who calls it otherwise would have half a reply taught as a whole one."""
    for name in names:
        row = {"prompt": "hi", "response": "hello", "finish_reason": name}
        assert parse(row, False)["finish_reason"] == finish


@pytest.mark.parametrize("name", ["tool_calls", "function_call", "tool_use"])
def test_a_reply_that_calls_tools_is_whole(name):
    call = REPLY | {"tool_calls": [{"name": "f", "arguments": {}}]}
    assert (
        parse({"messages": [USER, call], "finish_reason": name}, False)["finish_reason"] == "stop"
    )
    assert parse({"messages": [USER, REPLY], "finish_reason": name}, False)["finish_reason"] == name


@pytest.mark.parametrize("regenerate", ["auto", False, "last", True])
def test_a_given_reply_that_was_broken_off_is_dropped(jsonl, regenerate):
    """By an error or a filter: neither whole nor cut off by its length. Where the target answers
    anew nothing of it is taught, so that the conversation stays."""
    fates = Fates()
    row = {"messages": [USER, REPLY], "finish_reason": "content_filter"}
    found = read_conversations(jsonl(row), regenerate, fates=fates)
    assert (len(found), fates) == (
        (0, {"finish-content_filter": 1}) if regenerate in ("auto", False) else (1, {})
    )


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

"""Messages: known roles and texts come out in one form, all else is refused in one clause."""

import json
import re

import pytest

from spectrain.data.messages import ROLES, parse_message

CALL = {"name": "clock", "arguments": {"zone": "UTC"}}
CALLS = [{"type": "function", "function": CALL}]

# Writes what templates write: the reasoning before the reply, calls as JSON.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(("role", "names"), ROLES.items())
def test_names_of_a_role_are_one_role(role, names):
    for name in (*names, names[-1].title()):
        for message in ({"role": name, "content": "x"}, {"from": name, "value": "x"}):
            assert parse_message(0, message) == {"role": role, "content": "x"}


def test_an_unknown_role_is_named_and_so_are_the_known():
    """It would be cut away unseen: nothing knows whose turn it is."""
    with pytest.raises(ValueError, match=r"message 3 has the unknown role 'narrator' \(known: us"):
        parse_message(3, {"role": "narrator", "content": "x"})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_rendered_whatever_its_name(tokenizer, name):
    """Case 6: it stands where the template puts it, before the reply, and is not lost."""
    message = parse_message(0, {"role": "assistant", "content": "4", name: "2 + 2"})
    text = tokenizer.apply_chat_template([message], chat_template=TEMPLATE, tokenize=False)
    assert text == "<assistant>(2 + 2)4"


def test_reasoning_under_two_names():
    """Servers give it twice; two different ones cannot both be what was thought."""
    twice = {"role": "assistant", "content": "4", "reasoning": "a", "reasoning_content": "a"}
    expected = {"role": "assistant", "content": "4", "reasoning_content": "a"}
    assert parse_message(0, twice) == expected
    with pytest.raises(ValueError, match=r"more than one reasoning \(reasoning_content, thinking"):
        parse_message(0, {**expected, "thinking": "b"})
    cut = {"role": "assistant", "content": None, "reasoning": "a", "thinking": ""}
    assert parse_message(0, cut) == {"role": "assistant", "content": "", "reasoning_content": "a"}


@pytest.mark.parametrize(
    "given",
    [
        {"tool_calls": CALLS},
        {"tool_calls": json.dumps(CALLS)},
        {"tool_calls": [CALL]},
        {"tool_calls": [{"function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}]},
        {"function_call": {**CALL, "arguments": json.dumps(CALL["arguments"])}},
        {"tool_calls": CALLS, "content": None},
    ],
)
def test_calls_are_rendered_alike_in_all_their_forms(tokenizer, given):
    """Case 11: arguments as text would be quoted a second time by `tojson`."""
    message = parse_message(0, {"role": "assistant", **given})
    assert message == {"role": "assistant", "content": None, "tool_calls": CALLS}
    text = tokenizer.apply_chat_template([message], chat_template=TEMPLATE, tokenize=False)
    assert text == "<assistant>" + json.dumps(CALL)


@pytest.mark.parametrize("text", ["", "{half", "[1]", "null"])
def test_arguments_that_are_no_object_stay_as_they_were_written(text):
    call = {"id": "7", "function": {"name": "f", "arguments": text}}
    message = parse_message(0, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert message["tool_calls"] == [{**call, "type": "function"}]
    assert message["content"] == ""


def test_result_of_a_tool_keeps_whose_it_is():
    given = {"role": "function", "content": "12:00", "name": "clock", "tool_call_id": "7"}
    assert parse_message(0, given) == {**given, "role": "tool"}


def test_parts_of_text_are_joined_as_templates_join_them():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image": None}]
    assert parse_message(0, {"role": "user", "content": parts})["content"] == "a b"


def test_notes_beside_a_message_do_not_make_it_another():
    plain = {"role": "user", "content": "x"}
    noted = {**plain, "id": 3, "rating": 0.5, "name": None, "tool_calls": [], "thinking": ""}
    assert parse_message(0, noted) == plain


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("hi", "message 1 is not an object with a role"),
        ({"content": "x"}, "message 1 has no role"),
        ({"role": None, "content": "x"}, "message 1 has no role"),
        ({"role": 7, "content": "x"}, "message 1 has no role"),
        ({"role": "user"}, "message 1 (user) has no text as content"),
        ({"role": "user", "content": 7}, "message 1 (user) has no text as content"),
        ({"role": "user", "content": {}}, "message 1 (user) has no text as content"),
        ({"role": "user", "content": []}, "message 1 (user) has no text as content"),
        ({"role": "user", "content": ["x"]}, "message 1 (user) has a part without a type"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
            "message 1 (user) has a part of type image_url, and only text is read",
        ),
        (
            {"role": "gpt", "content": "x", "thinking": ["a"]},
            "message 1 (gpt) has a thinking that is not a text",
        ),
        (
            {"role": "gpt", "tool_calls": "[{"},
            "message 1 (gpt): tool_calls is a string that is not JSON",
        ),
        ({"role": "gpt", "tool_calls": 3}, "message 1 (gpt): tool_calls is not a list"),
        ({"role": "gpt", "tool_calls": ["f"]}, "message 1 (gpt) has a tool call without a name"),
        (
            {"role": "gpt", "tool_calls": [{"function": {}}]},
            "message 1 (gpt) has a tool call without a name",
        ),
        (
            {"role": "gpt", "tool_calls": [{"name": "f", "arguments": [1]}]},
            "message 1 (gpt) calls f with arguments that are not an object",
        ),
        (
            {"role": "tool", "content": "x", "tool_call_id": 7},
            "message 1 (tool) has a tool_call_id that is not a text",
        ),
    ],
)
def test_what_is_refused_is_told_in_one_clause(message, reason):
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        parse_message(1, message)

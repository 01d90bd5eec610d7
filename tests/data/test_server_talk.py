"""What a server is asked, word for word, and what its answers become."""

from dataclasses import replace

import pytest
from chat_server import ChatServer, ask_of, backend, echo, question, said, unit

from spectrain.data.questions import Question, Unit
from spectrain.data.server import Server

pytestmark = pytest.mark.usefixtures("bare_environment")


# ── what is sent ─────────────────────────────────────────────────────────────


def test_everything_that_draws_a_reply_is_sent():
    """Also what is neutral: a server fills gaps with defaults of its own."""
    with ChatServer(echo) as server:
        list(backend(server).answer([unit(1, 1)]))
    body = server.asked[0]
    assert body.pop("seed") in range(2**31)
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "question 100"}],
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 20,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_token_ids": True,
    }


def test_extra_fields_win_and_none_leaves_one_out():
    extra = {"top_k": 5, "min_p": None, "chat_template_kwargs": {"enable_thinking": False}}
    with ChatServer(echo) as server:
        list(backend(server, extra=extra).answer([unit(1, 1)]))
    body = server.asked[0]
    assert body["top_k"] == 5
    assert "min_p" not in body
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_rerun_asks_the_same_and_no_two_questions_share_a_seed():
    bodies = []
    for _ in range(2):
        with ChatServer(echo) as server:
            list(backend(server).answer([unit(number) for number in range(4)]))
        bodies.append(sorted(server.asked, key=ask_of))
    assert bodies[0] == bodies[1]
    assert len({body["seed"] for body in bodies[0]}) == 12


def test_seed_follows_from_the_question_alone():
    """Whatever unit it is in; with another key it is drawn anew."""
    one, other = question(1), replace(question(1), key="f" * 16)
    with ChatServer(echo) as server:
        list(backend(server).answer([Unit((one, other)), Unit((one,))]))
    seeds = sorted(body["seed"] for body in server.asked)
    assert seeds == sorted([one.seed, one.seed, other.seed])
    assert one.seed != other.seed


def test_identity_is_all_that_shapes_the_replies_and_nothing_else():
    def identity(url="http://one/v1", model="tiny", **changes):
        settings = {"target": "f", "max_new_tokens": 20, "top_p": 0.9, "seed": 1}
        return Server(url, model, **settings | changes).identity

    shaping = [{}, {"model": "other"}, {"max_new_tokens": 21}, {"top_p": 1.0}, {"seed": 2}]
    shaping += [{"target": "e"}, {"extra": {"top_k": 5}}, {"extra": {"top_k": None}}]
    assert len({identity(**changes) for changes in shaping}) == len(shaping)
    for changes in ({"url": "https://two/v1"}, {"concurrency": 2}, {"retries": 0}, {"timeout": 9}):
        assert identity(**changes) == identity()
    for changes in ({"api_key": "secret"}, {"check_prompts": False}, {"extra": {"top_k": -1}}):
        assert identity(**changes) == identity()


def test_text_of_all_kinds_arrives_whole():
    text = 'Grüße 你好 🙂 \u2028 \\ " \x7f\ttab\r\nrow'
    asked = Unit((question(0, text),))
    with ChatServer(echo) as server:
        [(_, [reply])] = backend(server).answer([asked])
    assert ask_of(server.asked[0]) == text
    assert reply.text == f"re: {text}"


def test_tools_and_tool_calls_are_sent_in_the_form_of_the_api():
    function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    call = {"function": {"name": "add", "arguments": {"a": "ä", "b": 2}}}
    messages = (
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "call_0"},
        {"role": "user", "content": "so?"},
    )
    tools = (function, {"type": "function", "function": function})
    asked = Unit((Question([1, 2, 3], 0.0, messages, tools, 7, "7" * 16),))
    with ChatServer(echo) as server:
        list(backend(server).answer([asked]))
    body = server.asked[0]
    assert body["tools"] == [{"type": "function", "function": function}] * 2
    sent = body["messages"][1]["tool_calls"]
    wanted = {"name": "add", "arguments": '{"a": "ä", "b": 2}'}
    assert sent == [{"id": "call_0", "type": "function", "function": wanted}]
    assert [message["role"] for message in body["messages"]] == [m["role"] for m in messages]
    assert call["function"]["arguments"] == {"a": "ä", "b": 2}, "the question stays as it was"


# ── what comes back ──────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said_finish", "finish"),
    [
        *((name, name) for name in ("stop", "length", "content_filter", "abort")),
        *(("eos_token", "stop"), ("MAX_TOKENS", "length")),
    ],
)
def test_why_it_ended_is_passed_on(said_finish, finish):
    [reply] = reply_to(lambda text: said("yes", len(text), said_finish))
    assert (reply.text, reply.finish) == ("yes", finish)


def test_a_missing_reason_is_unknown():
    [reply] = reply_to(lambda text: said("yes", len(text), None))
    assert reply.finish == "unknown"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_apart(name):
    [reply] = reply_to(lambda text: said("4", len(text), **{name: "2 and 2"}))
    assert (reply.text, reply.reasoning) == ("4", "2 and 2")


@pytest.mark.parametrize("finish", ["tool_calls", "stop"])
def test_a_tool_call_is_told_by_its_finish(finish):
    """Some servers say "stop" all the same."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    [reply] = reply_to(lambda text: said(None, len(text), finish, tool_calls=[call]))
    assert (reply.text, reply.finish) == ("", "tool_calls")


def test_no_content_is_an_empty_reply():
    [reply] = reply_to(lambda text: said(None, len(text), "length"))
    assert (reply.text, reply.finish) == ("", "length")


def test_ids_are_taken_where_the_server_tells_them():
    def told(text):
        answer = said("yes", len(text))
        answer["choices"][0]["token_ids"] = [5, 6, 2]
        return answer | {"prompt_token_ids": list(range(len(text)))}

    [reply] = reply_to(told)
    assert reply.tokens == [5, 6, 2]


def test_ids_after_another_prompt_are_not_believed():
    """They would be those of another tokenizer."""

    def told(text):
        answer = said("yes", len(text))
        answer["choices"][0]["token_ids"] = [5, 6, 2]
        return answer | {"prompt_token_ids": [9] * len(text)}

    [reply] = reply_to(told, check_prompts=False)
    assert reply.tokens is None


def reply_to(answer, **changes) -> list:
    with ChatServer(lambda body: answer(ask_of(body))) as server:
        [(_, replies)] = backend(server, **changes).answer([unit(1, 1)])
    return replies

"""A server that is the target itself gives what the target gives here: the whole way over HTTP."""

import pytest
import torch
from chat_server import ChatServer, backend
from target_server import serve, text_of

from spectrain.core.errors import SpectrainError
from spectrain.data.conversations import Conversation
from spectrain.data.questions import Question, Unit
from spectrain.data.tokenise import Turn, prompt_ids, turn_rows
from spectrain.generator.decode import complete

pytestmark = pytest.mark.usefixtures("bare_environment")

TEXTS = ["How many apples?", "def add(a, b):", "Grüße aus Köln! 🙂", "user assistant system", "ok"]
NEW = 12


@pytest.fixture
def stopping(tiny, monkeypatch):
    """The tiny target, which never ends a reply by itself, with an end-of-turn token that it does
    produce in some replies, and in none of them first."""
    prompts = [torch.tensor(question.ids) for unit in units_of(tiny) for question in unit.questions]
    replies = [done.tokens for done in complete(tiny, prompts, NEW)]
    first = {tokens[0] for tokens in replies}
    some = next(token for tokens in replies for token in tokens if token not in first)
    assert not all(some in tokens for tokens in replies)
    monkeypatch.setattr(tiny, "stop_ids", (*tiny.stop_ids, some))
    return tiny


def conversations() -> list[Conversation]:
    messages = [({"role": "user", "content": text},) for text in TEXTS]
    messages.append(
        (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        )
    )
    return [Conversation(f"{n:016x}", f"{n:016x}", each) for n, each in enumerate(messages)]


def units_of(target, temperature=0.0) -> list[Unit]:
    questions = [
        Question(
            prompt_ids(target.tokenizer, each, 400),
            temperature,
            each.messages,
            each.tools,
            place,
            f"{place:016x}",
        )
        for place, each in enumerate(conversations())
    ]
    return [Unit(tuple(questions[:4])), Unit(tuple(questions[4:]))]


def replies_of(server: ChatServer, units: list[Unit]) -> dict[int, object]:
    """By the questions' places."""
    return {
        question.place: reply
        for unit, replies in backend(server, max_new_tokens=NEW, top_p=1.0).answer(units)
        for question, reply in zip(unit.questions, replies, strict=True)
    }


@pytest.mark.parametrize("tell_ids", [True, False])
def test_greedy_replies_are_those_of_the_target_here(stopping, tell_ids):
    units = units_of(stopping)
    with serve(stopping, tell_ids) as server:
        answered = replies_of(server, units)
    questions = [question for unit in units for question in unit.questions]
    here = complete(stopping, [torch.tensor(question.ids) for question in questions], NEW)
    finishes = {done.finish for done in here}
    assert finishes == {"stop", "length"}, "the rows must show both ends"
    for question, done in zip(questions, here, strict=True):
        reply = answered[question.place]
        assert reply.finish == done.finish
        assert reply.text == text_of(stopping, done)
        assert reply.tokens == (list(done.tokens) if tell_ids else None)


def test_rows_are_those_of_the_target_here(stopping):
    """Where the ids are told nothing is tokenised a second time."""
    units = units_of(stopping)
    with serve(stopping, True) as server:
        answered = replies_of(server, units)
    for unit in units:
        prompts = [torch.tensor(question.ids) for question in unit.questions]
        for question, done in zip(unit.questions, complete(stopping, prompts, NEW), strict=True):
            reply = answered[question.place]
            rows = [
                turn_rows(
                    conversations()[question.place],
                    [Turn(question.ids, list(tokens), finish)],
                    split="train",
                    temperature=0.0,
                    max_length=400,
                )[0][0]
                for tokens, finish in ((reply.tokens, reply.finish), (done.tokens, done.finish))
            ]
            assert torch.equal(rows[0].tokens, rows[1].tokens)
            assert torch.equal(rows[0].reply, rows[1].reply)


def test_sampled_replies_come_again(tiny):
    """Because every question brings its seed, in whatever order they are answered."""
    units = units_of(tiny, temperature=1.0)
    with serve(tiny, True) as server:
        first = replies_of(server, units)
        assert replies_of(server, units[::-1]) == first


def test_a_system_prompt_of_the_server_is_found(tiny):
    with serve(tiny, False, system="You are a helpful assistant.") as server:
        with pytest.raises(SpectrainError, match="where the target reads"):
            replies_of(server, units_of(tiny))
        assert not server.asked

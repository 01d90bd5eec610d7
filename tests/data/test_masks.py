"""Every kind of tokenizer with every style of template: supervised is what the target wrote.

The reference encodes each prompt and each text as a whole and finds the reply in it by decoding
longer and longer beginnings, so it knows nothing of marks, pieces or offsets.
"""

from __future__ import annotations

import pytest
from chat_styles import STYLES
from chat_tokenizers import KINDS, LOSSLESS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spectrain.data.conversations import Conversation
from spectrain.data.tokenise import Turn, given_rows, prompt_ids, turn_rows

ROLES = ("user", "assistant")
TALKS = {
    "one turn": ("How many apples are left?", "Seven apples, and nobody minds."),
    "line breaks": ("def add(a, b):\n    return a + b\n", "two\n\nlines, please\n", "ok", "end"),
    "spaces": ("  add  ", " of  two ", "left", " seven"),
    "many turns": ("one", "two", "how many", "apples", "answer", "question", "left", "minds"),
    "foreign": ("Grüße aus Köln! Ça va?", "你好 🙂"),
}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make() for name, make in KINDS.items()}


@pytest.fixture(params=[(kind, style) for kind in KINDS for style in STYLES], ids="-".join)
def dressed(request, tokenizers):
    """(tokenizer with the template, style, whether any text decodes to itself)."""
    kind, name = request.param
    tokenizer, style = tokenizers[kind], STYLES[name]
    tokenizer.chat_template = style.template
    return tokenizer, style, kind in LOSSLESS


def talk(texts, system=None):
    messages = [{"role": ROLES[n % 2], "content": text} for n, text in enumerate(texts)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation("i" * 16, "p" * 16, tuple(messages), temperature=0.7, finish="stop")


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prompts_of(tokenizer, conversation):
    """(prompt text, reply) of every assistant turn, by the template alone."""
    messages = list(conversation.messages)
    return [
        (
            tokenizer.apply_chat_template(
                messages[:place], tokenize=False, add_generation_prompt=True
            ),
            message["content"],
        )
        for place, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def reference(tokenizer, style, conversation):
    """[(ids, reply numbers)] of the rows."""
    rows = []
    for prompt, content in prompts_of(tokenizer, conversation):
        read = encode(tokenizer, prompt)
        whole = encode(tokenizer, prompt + style.reply(content))
        if whole[: len(read)] != read:  # merged across the boundary: the reply is read alone
            whole = read + alone(tokenizer, style.reply(content))
        start = next(
            n
            for n in range(len(whole) + 1)
            if tokenizer.decode(whole[:n]) == tokenizer.decode(read)
        )
        before, numbers = rows.pop() if rows else ([], [])
        if before != whole[: len(before)]:
            rows.append((before, numbers))
            numbers = []
        numbers = numbers + [0] * (start - len(numbers))
        rows.append((whole, numbers + [max(numbers) + 1] * (len(whole) - start)))
    return rows


def alone(tokenizer, reply):
    """Ids of a reply that begins with a line break, without a mark of the beginning of a text."""
    assert reply.startswith("\n")
    ids = encode(tokenizer, "." + reply)
    dot = encode(tokenizer, ".")
    assert ids[: len(dot)] == dot
    return ids[len(dot) :]


def check(dressed, conversation):
    tokenizer, style, lossless = dressed
    stop = tokenizer.convert_tokens_to_ids(style.end)
    options = {"split": "train", "max_length": 10_000}
    rows, reasons = given_rows(tokenizer, (stop,), conversation, **options)
    assert not reasons
    assert [(row.tokens.tolist(), row.reply.tolist()) for row in rows] == reference(
        tokenizer, style, conversation
    )
    # What is generated: prompts as they are asked, the reply's ids behind them.
    turns, replies = [], []
    messages = conversation.messages
    for row in rows:
        ids, reply = row.tokens.tolist(), row.reply.tolist()
        for number in range(1, max(reply) + 1):
            start = reply.index(number)
            end = start + reply.count(number)
            turns.append(Turn(ids[:start], ids[start:end], "stop"))
            before = tokenizer.decode(ids[:start])
            replies.append(tokenizer.decode(ids[:end]).removeprefix(before))
            assert ids[end - 1] == stop
    places = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    for place, turn, text in zip(places, turns, replies, strict=True):
        asked = Conversation("", "", messages[:place])
        assert prompt_ids(tokenizer, asked, 10_000) == turn.prompt
        if lossless:
            assert text == style.reply(messages[place]["content"])
    again, reasons = turn_rows(conversation, turns, temperature=0.7, **options)
    assert not reasons
    assert len(again) == len(rows)
    for one, other in zip(again, rows, strict=True):
        assert (one.id, one.finish, one.temperature) == (other.id, "stop", 0.7)
        assert one.tokens.equal(other.tokens)
        assert one.reply.equal(other.reply)
    return rows


@pytest.mark.parametrize("name", TALKS)
@pytest.mark.parametrize("system", [None, "Summarise the following text"])
def test_rows_are_what_the_target_read_and_wrote(dressed, name, system):
    tokenizer, style, _ = dressed
    conversation = talk(TALKS[name], system)
    if system is not None and not style.system:
        assert given_rows(tokenizer, (1,), conversation, split="train", max_length=99) == (
            [],
            ["template-rejects"],
        )
        return
    check(dressed, conversation)


# Without the separators that only Python holds for white space.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\x1c\x1d\x1e\x1f")
said = st.text(characters, max_size=20).filter(lambda text: text.strip())


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("style", STYLES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(st.tuples(said, said), min_size=1, max_size=4))
@example(texts=[("a\n", "\nb"), ("a\n", "\n\nb\n"), ("c", "d")])
@example(texts=[("a", "<|im_en"), ("d|>", "</s")])
def test_any_text(tokenizers, kind, style, texts):
    tokenizer, style = tokenizers[kind], STYLES[style]
    tokenizer.chat_template = style.template
    check((tokenizer, style, True), talk([text for pair in texts for text in pair]))


def test_a_merge_across_the_boundary_begins_a_new_row(tokenizers):
    """The reply begins with a line break, which in a text goes together with that of the prompt.
    The target, asked with the prompt, cannot write it so; asked the next time it does read it so.
    """
    tokenizer = tokenizers["byte_level"]
    tokenizer.chat_template = STYLES["chatml"].template
    double = tokenizer.convert_tokens_to_ids("ĊĊ")
    assert double != tokenizer.unk_token_id
    rows = check((tokenizer, STYLES["chatml"], True), talk(("one", "\nquestion", "two", "answer")))
    assert [double in row.tokens for row in rows] == [False, True]
    assert [row.id for row in rows] == ["i" * 16, "i" * 16 + "-2"]

"""Replies begin and end where the target's did: masks as they are made hold in every style of
template with every kind of tokenizer; a mask moved by a token is found, in the row and place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from chat_styles import QWEN_3, R1, STYLES, THINKING, TOOLS
from chat_tokenizers import KINDS

from spectrain.data.conversations import Conversation
from spectrain.data.shard import Row, RowInfo, lay_out
from spectrain.data.tokenise import given_rows, prompt_ids, text_row
from spectrain.data.verify import Shard
from spectrain.data.verify_text import Speech, check_text, generation_prompts

ENDS = {name: style.end for name, style in STYLES.items()}
TEMPLATES = {name: style.template for name, style in STYLES.items()}
for name, template, end in (
    ("qwen-3", QWEN_3, "<|im_end|>"),
    ("thinking", THINKING, "<|im_end|>"),
    ("r1", R1, "</s>"),
    ("tools", TOOLS, "<|im_end|>"),
):
    TEMPLATES[name], ENDS[name] = template, end
WITHOUT_PROMPT = ("llama-2", "mistral")  # a reply follows the user's turn directly
TALKS = [
    ("How many apples are left?", "Seven apples, and nobody minds."),
    ("one\n", "\ntwo", " three ", "four  ", "five", "six"),
    ("Grüße aus Köln! [", "你好 🙂"),
    ("7", "8", "/no_think", "9"),
]


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make() for name, make in KINDS.items()}


@pytest.fixture(params=[(kind, style) for kind in KINDS for style in TEMPLATES], ids="-".join)
def spoken(request, tokenizers):
    """(style, tokenizer with its template, the target's turns)."""
    kind, style = request.param
    tokenizer = tokenizers[kind]
    tokenizer.chat_template = TEMPLATES[style]
    stop = tokenizer.convert_tokens_to_ids(ENDS[style])
    return style, tokenizer, Speech.of(tokenizer, (stop,))


def talk(texts, thought=False, **facts) -> Conversation:
    roles = ("user", "assistant")
    block = "<think>\nhm\n</think>\n\n" if thought else ""
    messages = tuple(
        {"role": roles[n % 2], "content": block * (n % 2) + text} for n, text in enumerate(texts)
    )
    return Conversation("i" * 16, "p" * 16, messages, **facts)


def given(tokenizer, speech, conversation) -> list[Row]:
    options = {"split": "train", "max_length": 1000}
    rows, reasons = given_rows(tokenizer, speech.stop_ids, conversation, **options)
    assert not reasons
    return rows


def cut(row: Row, length: int, **facts) -> Row:
    return replace(row, tokens=row.tokens[:length], reply=row.reply[:length], **facts)


def shard_of(*rows: Row) -> Shard:
    named = [replace(row, id=f"{number:016x}") for number, row in enumerate(rows)]
    tensors = lay_out([(row, None) for row in named], torch.float32)
    return Shard(tensors, [RowInfo.of(row, 0).as_facts() for row in named])


def found(speech, *rows: Row) -> dict[str, str | None]:
    return dict(check_text(shard_of(*rows), speech))


def test_rows_as_they_are_made_are_sound(spoken):
    """Given ones of one and of several turns and rows, cut ones, and plain texts among them; a
    template without a generation prompt has nothing to compare."""
    style, tokenizer, speech = spoken
    thought = style in ("thinking", "r1")
    rows = []
    for texts in TALKS:
        made = given(tokenizer, speech, talk(texts, thought))
        rows += made
        for length in range(len(made[0].tokens) // 2, len(made[0].tokens)):
            if (made[0].reply[:length] > 0).any():
                rows.append(cut(made[0], length, truncated=True))
        rows += given(tokenizer, speech, talk(texts, thought, finish="length", temperature=0.5))
    stop = tokenizer.decode([speech.stop_ids[0]])
    text = Conversation("t" * 16, "t" * 16, (), text=f"apples {stop} of seven {stop}{stop} left")
    rows += text_row(tokenizer, text, split="train", max_length=1000)[0]
    assert any(row.reply.max() > 1 for row in rows) or style not in STYLES
    assert found(speech, *rows) == {"reply ends": None} | (
        {} if style in WITHOUT_PROMPT else {"reply begins": None}
    )
    assert (not speech.prompts) == (style in WITHOUT_PROMPT)


def moved(row: Row, number: int, begin: int, end: int) -> Row:
    """The row with the bounds of a reply moved by so many tokens."""
    where = (row.reply == number).nonzero().flatten()
    reply = row.reply.clone()
    reply[where] = 0
    reply[int(where[0]) + begin : int(where[-1]) + 1 + end] = number
    return replace(row, reply=reply)


def _holds_a_stop(fault: Row, row: Row, speech: Speech) -> bool:
    """Whether the mask has grown over the end of another turn."""
    grown = (fault.reply > 0) & (row.reply == 0)
    return bool(torch.isin(fault.tokens[grown], torch.tensor(speech.stop_ids)).any())


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("begin", "end", "wrong"),
    [
        (1, 0, {"reply begins"}),
        (-1, 0, {"reply begins"}),
        (-4, 0, {"reply begins"}),
        (0, -1, {"reply ends"}),
        (0, 1, {"reply ends"}),
        (1, 1, {"reply begins", "reply ends"}),
        (-1, -1, {"reply begins", "reply ends"}),
    ],
)
@pytest.mark.parametrize("style", sorted(set(STYLES) - set(WITHOUT_PROMPT)))
def test_a_moved_mask_is_found_in_its_place(tokenizers, style, number, begin, end, wrong):
    """One late, one early, four early, without its end-of-turn, with the line break behind it; in a
    row of several replies behind a sound one."""
    tokenizer = tokenizers["byte_level"]
    tokenizer.chat_template = TEMPLATES[style]
    speech = Speech.of(tokenizer, (tokenizer.convert_tokens_to_ids(ENDS[style]),))
    texts = ("How many?", "Seven apples.", "And who minds?", "Nobody minds.", "Sure?", "yes")
    (row,) = given(tokenizer, speech, talk(texts))
    fault = moved(row, number, begin, end)
    told = found(speech, row, fault)
    seen = {name for name, what in told.items() if what}
    assert seen == wrong | ({"reply ends"} if _holds_a_stop(fault, row, speech) else set())
    where = (fault.reply == number).nonzero().flatten().tolist()
    if "reply begins" in wrong:
        assert told["reply begins"].startswith(f"row {1:016x}, token {where[0]}: ")
    if wrong == {"reply ends"}:
        assert told["reply ends"].startswith(f"row {1:016x}, token {where[-1]}: ")


@pytest.mark.parametrize("style", WITHOUT_PROMPT)
def test_without_a_generation_prompt_the_ends_are_still_looked_at(tokenizers, style):
    tokenizer = tokenizers["legacy_metaspace"]
    tokenizer.chat_template = TEMPLATES[style]
    speech = Speech.of(tokenizer, (tokenizer.convert_tokens_to_ids(ENDS[style]),))
    (row,) = given(tokenizer, speech, talk(("How many?", "Seven apples.")))
    assert "without an end-of-turn" in found(speech, moved(row, 1, 0, -1))["reply ends"]


@pytest.fixture
def chatml(tokenizer):
    return tokenizer, Speech.of(tokenizer, (tokenizer.eos_token_id,))


def test_a_stop_id_inside_a_reply(chatml):
    """The target would have ended there; in a reply that was cut off as well."""
    tokenizer, speech = chatml
    for finish in (None, "stop", "length"):
        (row,) = given(tokenizer, speech, talk(TALKS[0], finish=finish))
        place = int((row.reply > 0).nonzero()[3])
        tokens = row.tokens.clone()
        tokens[place] = speech.stop_ids[0]
        told = found(speech, row, replace(row, tokens=tokens))["reply ends"]
        assert told == f"row {1:016x}, token {place}: an end-of-turn token inside a reply"


@pytest.mark.parametrize(
    ("facts", "sound"),
    [
        ({"finish": "stop"}, False),
        ({"finish": None, "temperature": None}, False),
        ({"finish": "length"}, True),
        ({"finish": "stop", "truncated": True}, True),
    ],
)
def test_a_reply_may_lack_its_end_where_the_row_was_cut_off(chatml, facts, sound):
    tokenizer, speech = chatml
    (row,) = given(tokenizer, speech, talk(TALKS[0], temperature=0.5))
    end = int((row.reply > 0).nonzero()[-1])
    assert (found(speech, cut(row, end, **facts))["reply ends"] is None) == sound


def test_a_cut_excuses_the_end_of_the_row_alone(chatml):
    """An earlier reply, or one with tokens of the next turn behind it, ended by itself."""
    tokenizer, speech = chatml
    (row,) = given(tokenizer, speech, talk(("one", "two", "three", "four"), finish="length"))
    assert found(speech, moved(row, 2, 0, -1))["reply ends"]
    assert found(speech, moved(row, 1, 0, -1))["reply ends"]
    assert found(speech, row)["reply ends"] is None


def test_a_text_is_known_by_its_mask(chatml):
    """Moved by one, it is no longer that of a text, and no turn of the target's either."""
    tokenizer, speech = chatml
    text = Conversation("t" * 16, "t" * 16, (), text="apples of seven left")
    (row,), _ = text_row(tokenizer, text, split="train", max_length=100)
    assert set(found(speech, row).values()) == {None}
    for begin, end in ((1, 0), (0, -1)):
        assert any(found(speech, moved(row, 1, begin, end)).values())


SWITCHED = TEMPLATES["chatml"].replace(
    "assistant\n' }}",
    "assistant\n' }}{% if '/no_think' in messages[0].content %}{{ '<think>\n</think>\n' }}"
    "{% endif %}",
)
# The result of a tool stands in the turn that called it, which goes on behind it.
GOES_ON = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|user|>' + m.content + '<|assistant|>' }}"
    "{% else %}{% if loop.first or loop.previtem.role != 'tool' %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% endif %}{{ m.content }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_generation_prompts_that_depend_on_the_talk(tokenizers):
    """Thinking that a word switches off; a turn that goes on behind the result of a tool."""
    tokenizer = tokenizers["byte_level"]
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def row(texts, roles) -> Row:
        messages = tuple({"role": r, "content": t} for r, t in zip(roles, texts, strict=True))
        ids = prompt_ids(tokenizer, Conversation("", "", messages), 1000)
        reply = torch.tensor([0] * len(ids) + [1] * 3, dtype=torch.int16)
        tokens = torch.tensor([*ids, 70, 71, stop], dtype=torch.int32)
        return Row("i" * 16, "train", tokens, reply, temperature=0.0, finish="stop")

    for template, texts, roles in (
        (SWITCHED, ("/no_think", "one"), ("system", "user")),
        (GOES_ON, ("one", "look", "two"), ("user", "assistant", "tool")),
    ):
        tokenizer.chat_template = template
        speech = Speech.of(tokenizer, (stop,))
        assert len(speech.prompts) == 2
        for one in (row(texts, roles), row(("one",), ("user",))):
            assert set(found(speech, one).values()) == {None}
            assert found(speech, moved(one, 1, 1, 0))["reply begins"]
            assert found(speech, moved(one, 1, -1, 0))["reply begins"]


def test_without_a_template_nothing_is_known_of_beginnings(tokenizers):
    tokenizer = tokenizers["byte_level"]
    tokenizer.chat_template = None
    assert generation_prompts(tokenizer) == ()
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert generation_prompts(tokenizer) == ()

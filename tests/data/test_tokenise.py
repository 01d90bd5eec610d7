"""The mask: supervised tokens are exactly what the target says after its generation prompt."""

import copy

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spectrain.core.batch import counted
from spectrain.core.errors import SpectrainError
from spectrain.data.conversations import Conversation
from spectrain.data.tokenise import (
    Refused,
    Turn,
    given_rows,
    prompt_ids,
    rendering,
    require_template,
    turn_rows,
)


def talk(*texts, system=None, **more):
    """user, assistant, user, … from texts."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(id="i" * 16, prompt_id="p" * 16, messages=tuple(messages), **more)


def tokenised(tokenizer, conversation, max_length=10_000):
    """The one row of a conversation."""
    (row,), reasons = rows_of(tokenizer, conversation, max_length)
    assert not reasons
    return row


def rows_of(tokenizer, conversation, max_length=10_000):
    stop_ids = (tokenizer.eos_token_id,)
    return given_rows(tokenizer, stop_ids, conversation, split="train", max_length=max_length)


def replies(tokenizer, row):
    """Decoded text of each reply of a row."""
    numbers = sorted(set(row.reply.tolist()) - {0})
    return [tokenizer.decode(row.tokens[row.reply == number]) for number in numbers]


def with_template(tokenizer, template):
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


# Any text that holds none of the template's own special tokens; surrogates are refused earlier.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
said = texts.filter(lambda text: text.strip())


@settings(max_examples=150, deadline=None)
@given(turns=st.lists(st.tuples(texts, said), min_size=1, max_size=4), system=st.none() | texts)
@example(turns=[("", "\n\nx\n\n")], system=None)
@example(turns=[("hi", "👩‍👩‍👧 ok"), ("", "  two  spaces "), ("a\n", "\nb")], system="")
@example(turns=[("x", "\x00")], system=None)
def test_supervised_text_is_the_reply_and_its_end(tokenizer, turns, system):
    """For any text, several turns, emoji, empty strings: decoded supervised tokens = replies +
    end-of-turn; the tokens before each reply are those of the prompt read alone."""
    conversation = talk(*[text for turn in turns for text in turn], system=system)
    row = tokenised(tokenizer, conversation)
    assert replies(tokenizer, row) == [reply + "<|im_end|>" for _, reply in turns]
    messages = list(conversation.messages)
    for number, (_, reply) in enumerate(turns, 1):
        start = (row.reply == number).nonzero()[0].item()
        place = 2 * number - 1 + (system is not None)
        assert messages[place]["content"] == reply
        prompt = tokenizer.apply_chat_template(
            messages[:place], add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(row.tokens[:start]) == prompt
    first = (row.reply > 0).nonzero()[0].item()
    asked = Conversation("", "", conversation.messages[: 1 + (system is not None)])
    assert row.tokens[:first].tolist() == prompt_ids(tokenizer, asked, 10_000)
    assert row.reply[-1] == len(turns)  # nothing behind the last reply is kept


def test_whole_and_pieces_agree_where_nothing_merges(tokenizer):
    """The ids are those of the stock call on the whole conversation, BOS not doubled."""
    conversation = talk("How many?", "Seven apples.", "Sure?", "Yes.")
    row = tokenised(tokenizer, conversation)
    stock = tokenizer.apply_chat_template(list(conversation.messages), return_dict=False)
    assert row.tokens.tolist() == stock[: len(row.tokens)]
    assert tokenizer.decode(stock[len(row.tokens) :]) == "\n"


def test_tokenizer_that_marks_the_beginning_of_a_text():
    """A metaspace tokenizer puts ▁ before a text: a reply encoded alone would gain a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<u>", "</u>", "▁", "hi", "▁hi", "yes", "▁yes", "no", "▁no"]
    core = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "▁"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<u>", "</u>"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<u>' + m.content + '</u>' if m.role == 'user' "
        "else m.content + '</s>' }}{% endfor %}"
    )
    row = tokenised(tokenizer, talk("hi", "yes", "hi", "no"))
    assert [words[i] for i in row.tokens[row.reply == 1]] == ["yes", "</s>"]
    assert [words[i] for i in row.tokens[row.reply == 2]] == ["no", "</s>"]


def test_generation_markers_are_not_needed(tokenizer):
    """Case 3: a stock template without {% generation %} still gives a full mask."""
    assert "generation %}" not in tokenizer.chat_template
    assert tokenised(tokenizer, talk("q", "answer")).supervised > 1


def test_template_that_rewrites_history_gives_a_row_for_each_stretch(tokenizer):
    """Case 4: an older turn is cut to three characters later on. Each row is what the target read
    when it was asked; "yes" is not changed by that, so that turns 2 and 3 share a row."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else "
        "m.content[:3] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>"
        "assistant\n{% endif %}"
    )
    cutting = with_template(tokenizer, template)
    rows, reasons = rows_of(cutting, talk("all", "first", "sec", "yes", "end", "third"))
    assert not reasons
    assert [replies(tokenizer, row) for row in rows] == [
        ["first<|im_end|>"],
        ["yes<|im_end|>", "third<|im_end|>"],
    ]
    assert tokenizer.decode(rows[1].tokens).startswith(
        "<|im_start|>user\nall<|im_end|><|im_start|>assistant\nfir<|im_end|>"
    )


@pytest.mark.parametrize(
    ("reason", "template"),
    [
        # The flag is not known: the reply would have to begin with the header of its turn.
        (
            "no-generation-prompt",
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
            "{% endfor %}",
        ),
        # Case 5.
        ("template-rejects", "{{ raise_exception('roles must alternate') }}"),
        ("template-rejects", "{{ messages[7].content + 1 }}"),
        (
            "no-end-of-turn",
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}",
        ),
    ],
)
def test_template_that_cannot_be_masked_is_refused(tokenizer, reason, template):
    """Never a silent zero mask: the row is refused with its reason."""
    conversation = talk("hello", "first", "more", "second")
    assert rows_of(with_template(tokenizer, template), conversation) == ([], [reason])


@pytest.mark.parametrize(
    ("reason", "conversation"),
    [
        ("empty-reply", talk("q", "")),
        ("empty-reply", talk("q", " \n")),
        ("stop-token-in-reply", talk("q", "a<|im_end|>b")),
    ],
)
def test_reply_that_teaches_a_wrong_end_is_refused(tokenizer, reason, conversation):
    assert rows_of(tokenizer, conversation) == ([], [reason])


def test_truncation(tokenizer):
    """Case 7: a row is cut at the limit; one whose replies are all behind it is refused."""
    whole = tokenised(tokenizer, talk("question", "a rather long answer"))
    start = (whole.reply > 0).nonzero()[0].item()
    cut = tokenised(tokenizer, talk("question", "a rather long answer"), max_length=start + 2)
    assert cut.truncated
    assert not whole.truncated
    assert cut.tokens.tolist() == whole.tokens[: start + 2].tolist()
    assert cut.supervised == 2
    for end in (start, start + 1):  # a single token of a reply has no anchor
        refused = rows_of(tokenizer, talk("question", "a rather long answer"), max_length=end)
        assert refused == ([], ["truncated-away"])


def test_length_stopped_reply_has_no_end(tokenizer):
    """Case 8: the template writes an end-of-turn token that the target never produced."""
    row = tokenised(tokenizer, talk("q", "cut off", finish="length"))
    assert replies(tokenizer, row) == ["cut off"]
    assert row.finish == "length"


def test_pad_is_end_of_turn(tokenizer):
    """Case 10: the fixture's pad token is its end-of-turn token; the end is supervised anyway."""
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    row = tokenised(tokenizer, talk("q", "a"))
    assert row.tokens[-1] == tokenizer.eos_token_id
    assert row.reply[-1] == 1


def made(*turns, max_length=100):
    """Rows of turns (prompt, reply, finish) that the target produced."""
    turns = [Turn(*turn) for turn in turns]
    return turn_rows(talk("hi"), turns, split="train", temperature=1.0, max_length=max_length)


def test_own_replies_are_used_as_they_are(tokenizer):
    """Ids that the target produced are not decoded and encoded again (that may change them)."""
    prompt = prompt_ids(tokenizer, talk("hi"), 100)
    reply = [300, 5, 5, tokenizer.eos_token_id]
    (row,), reasons = made((prompt, reply, "stop"))
    assert row.tokens.tolist() == prompt + reply
    assert row.reply.tolist() == [0] * len(prompt) + [1] * 4
    assert not reasons


def test_own_reply_that_is_only_an_end_is_refused():
    assert made(([1, 2], [9], "stop")) == ([], ["empty-reply"])


@pytest.mark.parametrize(
    ("prompt", "reply", "kept"),
    [
        ([1, 2], [7], False),
        ([1, 2], [7, 8], True),
        # Position 0 is nobody's guess: two tokens from there on hold no anchor, three do.
        ([], [7, 8], False),
        ([], [7, 8, 9], True),
    ],
)
def test_a_row_without_an_anchor_is_refused(prompt, reply, kept):
    rows, reasons = made((prompt, reply, "length"))
    assert reasons == ([] if kept else ["reply-too-short"])
    assert [counted(row.reply, 0).any() for row in rows] == [True] * kept


def test_own_turns_go_on_in_a_row_while_the_prompt_begins_with_it():
    """A third prompt in which the second reply is another one: the second row holds the first two
    replies as context, and the target is not said to have written them there."""
    rows, reasons = made(
        ([1, 2], [3, 4, 9], "stop"),
        ([1, 2, 3, 4, 9, 5], [6, 6], "length"),
        ([1, 2, 3, 4, 9, 5, 7, 9, 5], [8, 8, 9], "stop"),
        ([1, 2, 3, 4, 9, 5, 7, 9, 5, 8, 8, 9, 5], [9], "stop"),
    )
    assert [row.tokens.tolist() for row in rows] == [
        [1, 2, 3, 4, 9, 5, 6, 6],
        [1, 2, 3, 4, 9, 5, 7, 9, 5, 8, 8, 9],
    ]
    assert [row.reply.tolist() for row in rows] == [
        [0, 0, 1, 1, 1, 0, 2, 2],
        [0] * 9 + [1, 1, 1],
    ]
    assert [row.id for row in rows] == ["i" * 16, "i" * 16 + "-2"]
    assert [row.finish for row in rows] == ["length", "stop"]
    assert reasons == ["empty-reply"]


def test_a_row_with_a_reply_that_was_cut_off_says_so():
    """Else the setting that drops such rows would keep it for the last reply's sake."""
    ((row,), _) = made(([1, 2], [3, 4], "length"), ([1, 2, 3, 4, 5], [6, 9], "stop"))
    assert row.reply.tolist() == [0, 0, 1, 1, 0, 2, 2]
    assert row.finish == "length"


def test_a_greeting_before_the_first_user_turn_was_not_asked_for(tokenizer):
    welcome = {"role": "assistant", "content": "welcome"}
    asked = talk("q", "answer")
    for before in ((welcome,), ({"role": "system", "content": "s"}, welcome)):
        conversation = Conversation("i", "p", (*before, *asked.messages))
        assert replies(tokenizer, tokenised(tokenizer, conversation)) == ["answer<|im_end|>"]


def test_prompt_longer_than_the_limit_is_refused(tokenizer):
    length = len(prompt_ids(tokenizer, talk("hi"), 100))
    assert len(prompt_ids(tokenizer, talk("hi"), length)) == length
    with pytest.raises(Refused, match="too-long-prompt"):
        prompt_ids(tokenizer, talk("hi"), length - 1)


def test_no_template_is_one_error_and_not_a_reason_for_each_row(tokenizer):
    with pytest.raises(SpectrainError, match="no chat template"):
        require_template(with_template(tokenizer, None))


def test_rendering_does_not_remember_the_last_call(tokenizer):
    """Padding a batch leaves traces in the tokenizer; they do not shape any row."""
    before = rendering(tokenizer)
    tokenizer(["a", "b b b"], padding=True, truncation=True, max_length=2)
    assert rendering(tokenizer) == before
    assert rendering(with_template(tokenizer, "x")) != before

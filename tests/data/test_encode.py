"""Reading on from a mark gives the ids of reading everything again."""

from __future__ import annotations

import copy

import pytest
from chat_styles import SPECIAL
from chat_tokenizers import KINDS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from spectrain.data import encode as encoding
from spectrain.data.encode import Reader, encode


@pytest.fixture(scope="module")
def tokenizers():
    """Each kind, and beside it one whose added tokens get in each other's way."""
    made = {name: make() for name, make in KINDS.items()}
    for name in list(made):
        wild = made[f"wild {name}"] = copy.deepcopy(made[name])
        wild.add_tokens(
            [
                AddedToken("a<|u", normalized=False),
                AddedToken("<|im_end|>ab", normalized=False),
                AddedToken("b</s>b", normalized=False),
                AddedToken("bb", normalized=False),
                AddedToken("apples", normalized=True),
                AddedToken("|>?", normalized=False, lstrip=True),
                AddedToken("<|lone|>", normalized=False, single_word=True),
            ]
        )
    return made


parts = st.sampled_from(
    [*SPECIAL, "<|lone|>", "a", "b", " ", "  ", "\n", "?", "<", "How", "many", "apples", "é", "🙂"]
)


@pytest.mark.parametrize("name", [*KINDS, *(f"wild {name}" for name in KINDS)])
@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.lists(parts, max_size=8), min_size=1, max_size=4))
@example(steps=[["<|im_end|>"], ["a", "b"]])  # a longer token takes its place
@example(steps=[["b", "</s>"], ["b"]])
@example(steps=[["<|user|>", "a", "<|user|>", "b"], ["b"]])  # another one takes its beginning
@example(steps=[["b", "b", "b"], ["a"]])
@example(steps=[["a", "<s>"], [" ", "b"], ["<|user|>"], [" ", "b"]])
@example(steps=[["?", "<|lone|>"], ["b"]])  # not a token before a letter
@example(steps=[["é", "?"], ["<unk>", "b"]])
@example(steps=[["a", "</s>", " ", "b"], [], ["c"]])
def test_reading_on_is_reading_anew(tokenizers, name, steps):
    tokenizer = tokenizers[name]
    reader, text = Reader(tokenizer), ""
    for step in steps:
        text += "".join(step)
        assert reader.ids(text) == encode(tokenizer, text)
    other = "b" + text  # begins otherwise
    assert reader.ids(other) == encode(tokenizer, other)


def test_what_is_known_is_not_read_again(tokenizers, monkeypatch):
    tokenizer = tokenizers["byte_level"]
    reader = Reader(tokenizer)
    asked = []
    monkeypatch.setattr(
        encoding, "encode", lambda tokenizer, text: asked.append(text) or encode(tokenizer, text)
    )
    for text in ("How <s>many", "How <s>many apples</s>", "How <s>many apples</s>?"):
        reader.ids(text)
    assert asked == ["How <s>many", "<s>many apples</s>", "</s>?"]


def test_special_tokens_that_are_split_are_no_marks(tokenizers):
    tokenizer = copy.deepcopy(tokenizers["byte_level"])
    tokenizer.split_special_tokens = True
    reader = Reader(tokenizer)
    for text in ("a<s>", "a<s>b"):
        assert reader.ids(text) == encode(tokenizer, text)

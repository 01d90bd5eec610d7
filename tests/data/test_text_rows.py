"""Plain texts: read as they are, all of it supervised but the first token."""

import copy

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spectrain.core.batch import counted
from spectrain.data.conversations import Conversation
from spectrain.data.tokenise import text_row

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=4, max_size=30)


def adding(tokenizer, pattern):
    """The tokenizer with special tokens around every text, e.g. "<|im_start|> $A <|im_end|>"."""
    from tokenizers.processors import TemplateProcessing

    changed = copy.deepcopy(tokenizer)
    special = [(t, tokenizer.convert_tokens_to_ids(t)) for t in pattern.split() if t != "$A"]
    changed.backend_tokenizer.post_processor = TemplateProcessing(
        single=pattern, special_tokens=special
    )
    return changed


def plain(text):
    return Conversation("i" * 16, "i" * 16, (), domain="web", text=text)


def document(tokenizer, text, max_length=10_000):
    (row,), reasons = text_row(tokenizer, plain(text), split="train", max_length=max_length)
    assert not reasons
    return row


@pytest.mark.parametrize("before", ["", "<|im_start|>"])
@pytest.mark.parametrize("after", ["", "<|im_end|>"])
@settings(max_examples=40, deadline=None)
@given(text=texts)
def test_a_text_has_the_tokenizer_s_own_specials_once(tokenizer, before, after, text):
    """CASE 9: neither lost nor doubled, also where the text brings them along."""
    own = adding(tokenizer, f"{before} $A {after}".strip())
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    assume(len(bare) > 2)  # a shorter text has nothing to learn and is refused
    first, last = ([tokenizer.convert_tokens_to_ids(t)] if t else [] for t in (before, after))
    for given_text in (text, before + text, text + after, before + text + after):
        row = document(own, given_text)
        assert row.tokens.tolist() == first + bare + last
        assert row.reply.tolist() == [0] + [1] * (len(row.tokens) - 1)
    assert (row.temperature, row.finish, row.domain) == (None, None, "web")


def test_a_text_needs_no_template_and_is_cut(tokenizer):
    own = copy.copy(tokenizer)
    own.chat_template = None
    text = "the quick brown fox " * 20
    whole = document(own, text)
    assert not whole.truncated
    cut = document(own, text, max_length=7)
    assert cut.truncated
    assert cut.tokens.tolist() == whole.tokens[:7].tolist()
    assert cut.reply.tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert counted(cut.reply[None], 0)[0].tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize("text", ["", "a"])
def test_a_text_with_nothing_to_guess_is_refused(tokenizer, text):
    more = {"split": "train", "max_length": 2}
    assert text_row(tokenizer, plain(text), **more) == ([], ["reply-too-short"])
    cut = text_row(tokenizer, plain("many words of text"), **more)
    assert cut == ([], ["truncated-away"])

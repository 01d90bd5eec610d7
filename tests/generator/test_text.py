"""Text that grows: what has been told is never taken back, and all of it is told once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrain.generator.completion import Completion, Ends
from spectrain.generator.text import Growing, text_of


def decode(tokens):
    """Tokens are bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


def told_in_pieces(text, sizes, strings=()):
    ends = Ends(frozenset({0}), tuple(strings), decode)
    done, growing, parts = Completion(), Growing(decode, (0,), strings), []
    tokens = [*text.encode(), 0]
    while not done.finish:
        size = sizes[len(parts) % len(sizes)]
        done.take(tokens[len(done.tokens) : len(done.tokens) + size], ends, 10_000)
        parts.append(growing.more(done))
    return parts, done


@given(
    st.text(alphabet="ab→é🙂 \n", max_size=30),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.lists(st.text(alphabet="ab→é", min_size=1, max_size=4), max_size=2),
)
def test_the_parts_are_the_text_up_to_what_ends_it(text, sizes, strings):
    parts, done = told_in_pieces(text, sizes, strings)
    cuts = [(text.find(s) + len(s), text.find(s)) for s in strings if s in text]
    expected = text[: min(cuts)[1]] if cuts else text
    if cuts:  # of strings that end at the same token the one that begins first
        first = min(cuts)[0]
        expected = text[: min(begin for end, begin in cuts if end == first)]
    assert "".join(parts) == expected == text_of(done, decode, (0,))
    assert not any("\ufffd" in part for part in parts)
    assert done.finish == "stop"


def test_a_beginning_of_a_stop_string_is_held_back():
    parts, _ = told_in_pieces("one END", [1], ["END"])
    assert "".join(parts) == "one "
    parts, _ = told_in_pieces("one ENoch", [1], ["END"])
    assert parts[:6] == ["o", "n", "e", " ", "", ""]
    assert "".join(parts) == "one ENoch"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_cut_character_is_held_back(cut):
    growing, done = Growing(decode, ()), Completion(list("é🙂".encode())[: 2 + cut])
    assert growing.more(done) == "é"

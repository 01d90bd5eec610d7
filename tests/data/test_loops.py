"""A reply is a loop when one block of tokens goes on and on; what people write is not."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.data.loops import LONGEST_BLOCK, STUCK, loops


def slow(tokens: list[int]) -> bool:
    """The definition, token by token: some stretch that a block fills so often and so long."""
    for block in range(1, LONGEST_BLOCK + 1):
        for start in range(len(tokens)):
            end = start + block
            while end < len(tokens) and tokens[end] == tokens[end - block]:
                end += 1
            length = min(end, len(tokens)) - start
            for times, least in STUCK:
                if length >= times * block and length >= least:
                    return True
    return False


@st.composite
def replies(draw):
    """Some tokens, a block repeated so long that it is near the bound, some tokens."""
    block = draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))
    length = draw(st.integers(0, 180))
    stuck = (block * (length // len(block) + 1))[:length]
    before, after = (draw(st.lists(st.integers(0, 3), max_size=20)) for _ in range(2))
    return before + stuck + after


@settings(max_examples=200, deadline=None)
@given(replies())
def test_equals_the_definition(tokens):
    assert loops(tokens) == slow(tokens)


@settings(deadline=None)
@given(replies(), st.lists(st.integers(0, 3), max_size=50))
def test_a_loop_stays_one_whatever_is_said_around_it(tokens, more):
    """The stretch that made it one is still there."""
    if loops(tokens):
        assert loops(tokens + more)
        assert loops(more + tokens)


@settings(deadline=None)
@given(st.permutations(range(200)))
def test_nothing_said_twice_is_no_loop(tokens):
    assert not loops(tokens)


@pytest.mark.parametrize(
    ("block", "shortest"),
    [(1, 64), (10, 64), (11, 66), (16, 96), (21, 126), (22, 128), (32, 128), (33, 132), (64, 256)],
)
def test_where_a_loop_begins(block, shortest):
    """Six times and 64 tokens, or four times and 128, by hand."""
    stuck = list(range(block)) * 80
    assert loops(stuck[:shortest])
    assert not loops(stuck[: shortest - 1])


def test_longer_blocks_are_not_looked_for():
    assert not loops(list(range(LONGEST_BLOCK + 1)) * 10)


def test_one_other_token_interrupts_it():
    stuck = [1, 2, 3] * 21  # 63 tokens
    assert not loops([*stuck, 9, *stuck])
    assert loops([*stuck, 1])


@pytest.mark.parametrize("tokens", [[], [5], [5, 5], torch.tensor([7] * 70).tolist()])
def test_any_length(tokens):
    assert loops(tokens) == (len(tokens) == 70)


def test_takes_a_tensor():
    assert loops(torch.tensor([1, 2] * 40))


WRITTEN = {
    "table": "| a | b | c | d | e | f |\n"
    + "| --- " * 6
    + "|\n"
    + "| 0 | 0 | 0 | 0 | 0 | 0 |\n" * 4,
    "matrix": "[\n" + "    [0, 0, 0],\n" * 5 + "]",
    "indentation": "\n".join("    " * deep + f"if step {deep}:" for deep in range(12)),
    "list": "\n".join(f"{number}. Take a look at number {number}." for number in range(1, 30)),
    "ruler": "Title\n" + "-" * 60 + "\nText\n" + "=" * 60,
    "asserts": "\n".join(f"assert add({n}, {n}) == {2 * n}" for n in range(20)),
    "chorus": "Row, row, row your boat, gently down the stream.\n" * 3,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_people_write(name, tokenizer):
    """The shapes that repeat by intent. The tiny tokenizer makes about a token a character of what
    it was not trained on, so its blocks are longer than a real one's: also by words."""
    text = WRITTEN[name]
    if name not in ("ruler", "indentation"):  # a real tokenizer has tokens for long runs
        assert not loops(tokenizer(text)["input_ids"])
    words = text.replace("\n", " \n ").split(" ")
    number = {word: place for place, word in enumerate(dict.fromkeys(words))}
    assert not loops([number[word] for word in words])


def test_random_text_is_no_loop():
    """Of four tokens, 300 long: that a stretch of 64 repeats by chance has odds below 1e-20."""
    for seed in range(200):
        assert not loops(random.Random(seed).choices(range(4), k=300))

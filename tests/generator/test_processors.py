"""Processors at all nodes of a tree at once, against the library's token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from spectrain.core.errors import SpectrainError
from spectrain.generator.processors import Processors

VOCAB = 7  # small: the same token stands in prompt, path and beside it
STOPS = (2, 5)


def library(prompt, reply, logits, penalty, min_new, suppress):
    """What `generate` makes of logits [V] after prompt and reply, lists of tokens."""
    processors = LogitsProcessorList()
    if penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    if min_new:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), min_new, list(STOPS)))
    if suppress:
        processors.append(SuppressTokensLogitsProcessor(suppress))
    return processors(torch.tensor([[*prompt, *reply]]), logits[None])[0]


def random_tree(rows, size, seed):
    """tokens, parents, depths [B, M], ancestors [B, M, M]: any parents, any tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, size), generator=generator)
    parents = torch.zeros(rows, size, dtype=torch.long)
    depths = torch.zeros(rows, size, dtype=torch.long)
    ancestors = torch.eye(size, dtype=torch.bool).repeat(rows, 1, 1)
    for row in range(rows):
        for node in range(1, size):
            parent = int(torch.randint(node, (), generator=generator))
            parents[row, node], depths[row, node] = parent, depths[row, parent] + 1
            ancestors[row, node] |= ancestors[row, parent]
    return tokens, parents, depths, ancestors


def path_of(parents, node):
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


SETTINGS = st.tuples(
    st.sampled_from([1.0, 1.3, 0.6]), st.integers(0, 6), st.sampled_from([[], [1], [0, 2]])
)


@settings(deadline=None)
@given(SETTINGS, st.integers(0, 10_000), st.booleans())
def test_every_node_equals_the_library_along_its_path(settings, seed, as_chain):
    """Three steps of two rows with prompts of different length: at each node what `generate`
    would do after prompt, reply and the node's path; then one path is committed, of one row none
    at all in the middle step. New rows and narrowing included."""
    penalty, min_new, suppress = settings
    generator = torch.Generator().manual_seed(seed)
    processors = Processors(3, VOCAB, "cpu", STOPS, penalty, min_new, suppress)
    prompts = torch.randint(VOCAB, (3, 4), generator=generator)
    counts = torch.tensor([1, 4, 2])
    # Row 1 was somebody else's before.
    processors.admit(torch.tensor([1]), prompts[[0]], torch.tensor([1]))
    processors.commit(torch.full((3, 1), 6), torch.tensor([1, 1, 0]))
    processors.admit(torch.tensor([2, 0, 1]), prompts[[2, 0, 1]], counts[[2, 0, 1]])
    texts = [prompt[:count].tolist() for prompt, count in zip(prompts, counts, strict=True)]

    logits = torch.randn(3, VOCAB, generator=generator)
    first = processors.first(torch.tensor([2, 0]), logits[[2, 0]])
    for got, row in zip(first, [2, 0], strict=True):
        torch.testing.assert_close(got, library(texts[row], [], logits[row], *settings))

    rows, replies = [0, 1, 2], {row: [] for row in range(3)}
    for step in range(3):
        if step == 1:  # row 1 has ended, and the others change places
            rows = [2, 0]
            processors.take(torch.tensor(rows))
        size = 4
        tokens, parents, depths, ancestors = random_tree(len(rows), size, seed + step)
        if as_chain:
            parents = (torch.arange(size) - 1).clamp(min=0).expand(len(rows), -1)
            depths = ancestors = None
        logits = torch.randn(len(rows), size, VOCAB, generator=generator)
        got = processors.apply(logits, tokens, depths, ancestors)
        kept, committed = [], torch.zeros_like(tokens)
        for place, row in enumerate(rows):
            for node in range(size):
                path = path_of(parents[place].tolist(), node)
                reply = replies[row] + tokens[place, path].tolist()
                expected = library(texts[row], reply, logits[place, node], *settings)
                torch.testing.assert_close(got[place, node], expected)
            # The path to the last node is accepted; only these tokens count, what follows is junk.
            count = 0 if step == 1 and place == 0 else len(path)
            committed[place, :count] = tokens[place, path][:count]
            committed[place, count:] = torch.randint(VOCAB, (size - count,), generator=generator)
            replies[row] += tokens[place, path].tolist()[:count]
            kept.append(count)
        processors.commit(committed, torch.tensor(kept))
    assert processors.new.tolist() == [len(replies[row]) for row in rows]


def test_one_tree_for_all_rows():
    """Depths [M] and ancestors [M, M] mean the same as one copy for each row."""
    tokens, _, depths, ancestors = random_tree(2, 5, 3)
    depths, ancestors = depths[0], ancestors[0]
    processors = Processors(2, VOCAB, "cpu", STOPS, 1.5, 3)
    processors.admit(torch.arange(2), torch.tensor([[1], [3]]), torch.tensor([1, 1]))
    logits = torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(0))
    got = processors.apply(logits, tokens, depths, ancestors)
    copied = processors.apply(
        logits, tokens, depths.expand(2, -1).clone(), ancestors.expand(2, -1, -1).clone()
    )
    assert torch.equal(got, copied)


def test_by_hand():
    """Prompt 3; root 0 is new token 0; node 1 (token 4) is its child. min_new_tokens 2 forbids the
    stop ids for number 1, which the root's logits choose, not for number 2."""
    processors = Processors(1, VOCAB, "cpu", STOPS, 2.0, 2, [6])
    processors.admit(torch.tensor([0]), torch.tensor([[3, 1]]), torch.tensor([1]))
    logits = torch.tensor([[[2.0, 2, 2, -2, 2, 2, 2]] * 2])
    got = processors.apply(logits, torch.tensor([[0, 4]]))[0].tolist()
    never = float("-inf")
    assert got == [[1, 2, never, -4, 2, never, never], [1, 2, 2, -4, 1, 2, never]]
    assert logits.unique().tolist() == [-2, 2]  # the caller's tensor is not touched


def test_prompt_ids_beyond_the_vocabulary_are_nobody_s():
    """An embedding may have more rows than lm_head."""
    processors = Processors(1, VOCAB, "cpu", (VOCAB + 3,), 2.0)
    processors.admit(torch.tensor([0]), torch.tensor([[VOCAB, VOCAB + 9, 1]]), torch.tensor([3]))
    assert processors.seen[0].nonzero().flatten().tolist() == [1]


def test_what_changes_nothing_is_not_needed():
    assert not Processors.needed()
    assert not Processors.needed(1.0, 0, ())
    assert Processors.needed(repetition_penalty=1.1)
    assert Processors.needed(min_new_tokens=1)
    assert Processors.needed(suppress=[3])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 is not a number > 0; 1 turns it off"),
        (
            {"repetition_penalty": float("nan")},
            "repetition_penalty nan is not a number > 0; 1 turns it off",
        ),
        ({"min_new_tokens": -1}, "min_new_tokens -1 is negative"),
        ({"suppress": [7]}, "suppress: 7 is no token of 0 … 6"),
        ({"suppress": [-1]}, "suppress: -1 is no token of 0 … 6"),
        ({"suppress": range(7)}, "suppress: no token is left to choose"),
        (
            {"suppress": [0, 1, 3, 4, 6], "min_new_tokens": 1},
            "suppress: no token is left to choose",
        ),
    ],
)
def test_bad_settings_are_one_line(settings, line):
    with pytest.raises(SpectrainError) as caught:
        Processors(1, VOCAB, "cpu", STOPS, **settings)
    assert str(caught.value) == line

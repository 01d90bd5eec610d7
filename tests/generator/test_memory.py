"""A prompt that begins with the one before it is read from there on, for the same reply."""

from __future__ import annotations

import pytest
import torch
from head_kinds import KINDS
from helped_heads import Helped, require_said_as_read_afresh

from spectrain.generator.memory import Memory
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator

NEW = 16


@pytest.fixture(scope="module")
def turns():
    """Three prompts: the second goes on where the first ends, and the third is another one."""
    random = torch.Generator().manual_seed(2)
    first, more, other = (torch.randint(3, 380, (n,), generator=random) for n in (17, 12, 33))
    return [first, torch.cat([first, more]), other]


@pytest.fixture
def reads(tiny, monkeypatch):
    """Tokens of each forward of the target."""
    widths, forward = [], tiny.forward
    monkeypatch.setattr(
        tiny,
        "forward",
        lambda tokens, **more: widths.append(tokens.shape[1]) or forward(tokens, **more),
    )
    return widths


def answer(generator, prompt, memory=None, sampling=None):
    *_, last = generator.stream([prompt], NEW, sampling, memory=memory)
    return last.completion


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_goes_on_from_what_it_read(tiny, turns, kind):
    """Greedy: the replies are those without a memory, and after every commit the head says what it
    says having read the whole text at once."""
    plain = [answer(Generator(tiny), prompt).tokens for prompt in turns]
    texts = [p.tolist() + tokens for p, tokens in zip(turns, plain, strict=True)]
    inner = KINDS[kind](tiny, 300)
    watched, memory = Helped(inner, texts), Memory()
    generator = Generator(tiny, watched, min(3, inner.longest_draft))
    for prompt, tokens, text in zip(turns, plain, texts, strict=True):
        watched.texts = [text]  # the second prompt begins as the first one does
        assert answer(generator, prompt, memory).tokens == tokens
        if memory.state is not None:
            memory.state.text = [texts[1]]
    require_said_as_read_afresh(tiny, watched)


@pytest.mark.parametrize("way", [{}, {"lookup": 2}, {"draft_tokens": 3}])
def test_only_what_is_new_is_read(tiny, turns, reads, way):
    """All but the last position of the prompt before, however its reply ended; drawn drafts and
    penalties are those of a prompt that is read at once."""
    head = KINDS["eagle3"](tiny, 300) if "draft_tokens" in way else None
    sampling = Sampling(0.9, repetition_penalty=1.3, seed=3)
    generator, memory = Generator(tiny, head, **way), Memory()
    expected = [answer(generator, prompt, sampling=sampling) for prompt in turns]
    first = []
    for prompt, whole in zip(turns, expected, strict=True):
        reads.clear()
        got = answer(generator, prompt, memory, sampling)
        assert (got.tokens, got.runs) == (whole.tokens, whole.runs)
        first.append(reads[0])
    assert first == [17, 12 + 1, 33]
    reads.clear()
    assert answer(generator, turns[2], memory, sampling).tokens == expected[2].tokens
    assert reads[0] == 1  # the same prompt once more
    # A shorter one than is known is another one.
    reads.clear()
    answer(generator, turns[2][:9], memory, sampling)
    assert reads[0] == 9


def test_of_several_prompts_nothing_is_kept(tiny, turns, reads):
    memory = Memory()
    list(Generator(tiny).stream(turns[:2], 2, memory=memory))
    reads.clear()
    answer(Generator(tiny), turns[1], memory)
    assert reads[0] == len(turns[1])

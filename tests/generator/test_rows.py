"""Prompts admitted into free rows, replies as they grow: every reply is that of its solo run."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from head_kinds import KINDS
from helped_heads import Helped, helped, require_said_as_read_afresh

from spectrain.generator import speculate
from spectrain.generator.run import Run
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator
from spectrain.heads.tree import TreeDefaults, TreeShape

STATIC = TreeShape(paths=((0,), (1,), (0, 0), (1, 0), (1, 2), (0, 0, 0)))
WAYS = {
    "chain": {"draft_tokens": 3},
    "static": {"tree": STATIC},
    "grown": {"tree": TreeDefaults(top_k=3, depth=3, nodes=9)},
}
SAMPLED = Sampling(0.9, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.3, min_new_tokens=5)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    sizes = (7, 1, 19, 4, 30, 2, 11, 1, 8)
    return [torch.randint(3, 380, (n,), generator=generator) for n in sizes]


@pytest.fixture
def ending(tiny, prompts, monkeypatch):
    """Replies of very different lengths: the stop tokens are some that the replies hold."""
    truths = [c.tokens for c in Generator(tiny).generate(prompts, 24)]
    stops = {tokens[(5 * i + 2) % 24] for i, tokens in enumerate(truths)}
    monkeypatch.setattr(tiny, "stop_ids", tuple(sorted(stops)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, 4])
def test_admitted_rows_equal_their_solo_runs(tiny, prompts, ending, kind, rows):
    """Greedy, every family: unequal prompts, unequal runs, ends at different times."""
    head = KINDS[kind](tiny, 300)
    watched, truths = helped(tiny, head, prompts, 24)
    shape = min(4, head.longest_draft)
    got = Generator(tiny, watched, shape).generate(prompts, 24, rows=rows)
    solo = [Generator(tiny).generate([prompt], 24)[0].tokens for prompt in prompts]
    assert [c.tokens for c in got] == solo == truths
    assert len({len(tokens) for tokens in solo}) > 4
    require_said_as_read_afresh(tiny, watched)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampling", [Sampling(), replace(SAMPLED, seed=4)])
@pytest.mark.parametrize("rows", [1, 3, None])
def test_a_seed_gives_the_same_text_with_a_tree_in_a_batch_and_alone(
    tiny, prompts, ending, way, sampling, rows
):
    """The likeliest children change nothing, not even what is drawn: token by token the reply of
    plain decoding, one prompt at a time, penalties and all."""
    plain = [
        next(
            p.completion
            for p in Generator(tiny).stream([prompt], 24, sampling, numbers=[index])
            if p.completion.finish
        )
        for index, prompt in enumerate(prompts)
    ]
    texts = [p.tolist() + c.tokens for p, c in zip(prompts, plain, strict=True)]
    head = Helped(KINDS["eagle3"](tiny, 300), texts)
    generator = Generator(tiny, head, proposal="top-k", **WAYS[way])
    got = generator.generate(prompts, 24, sampling, rows)
    assert [(c.tokens, c.finish) for c in got] == [(c.tokens, c.finish) for c in plain]
    assert sum(c.committed - c.forwards for c in got) > 10, "hardly anything was accepted"
    assert any(len(c.tokens) > 4 for c in got)


def test_drawn_chains_do_not_depend_on_the_batch(tiny, prompts, ending):
    """What a row draws comes from its own key: the same replies however they are batched."""
    head = KINDS["eagle3"](tiny, 120)
    one, two, all_ = (
        Generator(tiny, head, 3).generate(prompts, 16, Sampling(0.9, seed=3), rows)
        for rows in (1, 2, None)
    )
    tokens = [c.tokens for c in one]
    assert tokens == [c.tokens for c in two] == [c.tokens for c in all_]
    assert sum(c.committed - c.forwards for c in one) > 5


def test_replies_are_told_as_they_grow(tiny, prompts, ending):
    parts, finished = defaultdict(list), []
    for progress in Generator(tiny).stream(prompts, 24, rows=2):
        new = progress.completion.tokens[-progress.added :]
        parts[progress.index] += new
        if progress.completion.finish:
            finished.append(progress.index)
    whole = Generator(tiny).generate(prompts, 24)
    assert [parts[index] for index in range(len(prompts))] == [c.tokens for c in whole]
    assert sorted(finished) == list(range(len(prompts))) != finished


@pytest.mark.parametrize("way", [*WAYS.values(), {"lookup": 2, "draft_tokens": 2}])
def test_two_streams_of_one_generator_do_not_meet(tiny, prompts, way):
    head = None if "lookup" in way else KINDS["eagle3"](tiny, 120)
    generator = Generator(tiny, head, **way)
    told = [{}, {}]
    streams = [generator.stream(part, 12, rows=2) for part in (prompts[:4], prompts[4:])]
    for states in itertools.zip_longest(*streams):
        for mine, state in zip(told, states, strict=True):
            if state is not None:
                mine[state.index] = state.completion.tokens
    together = [done[index] for done in told for index in sorted(done)]
    assert together == [c.tokens for c in Generator(tiny).generate(prompts, 12)]


def test_leaving_a_stream_early_is_no_harm(tiny, prompts):
    generator = Generator(tiny, KINDS["eagle3"](tiny, 120), 2)
    for _ in generator.stream(prompts, 24, rows=2):
        break
    again = generator.generate(prompts, 8)
    assert [c.tokens for c in again] == [c.tokens for c in Generator(tiny).generate(prompts, 8)]


def test_prompts_are_read_a_bounded_number_of_tokens_at_a_time(tiny, prompts, monkeypatch):
    """Padding included, unless one prompt alone is longer; no row takes a step before all that have
    room are read, and the replies are those of reading all at once."""
    whole = [c.tokens for c in Generator(tiny).generate(prompts, 8)]
    done, admit, step = [], Run.admit, Run.step

    def admitting(run, places, own, *more):
        done.append([len(prompt) for prompt in own])
        return admit(run, places, own, *more)

    def stepping(run, texts):
        done.append("step")
        return step(run, texts)

    monkeypatch.setattr(Run, "admit", admitting)
    monkeypatch.setattr(Run, "step", stepping)
    monkeypatch.setattr(speculate, "_READ_TOGETHER", 24)
    assert [c.tokens for c in Generator(tiny).generate(prompts, 8)] == whole
    assert done[: done.index("step")] == [[7, 1], [19], [4], [30], [2, 11], [1, 8]]
    done.clear()
    Generator(tiny).generate(prompts, 8, rows=2)
    assert done[: done.index("step")] == [[7, 1]]

"""The table of ranks and the walk of a tree, against loops and against what is known of chains."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spectrain.evaluation.alpha import Acceptance
from spectrain.evaluation.ranks import RANKS, rank_table, runs, walked
from spectrain.evaluation.summary import Conversation, summarise
from spectrain.evaluation.walk import counted_steps, walk
from spectrain.generator.shapes import best_tree
from spectrain.heads.tree import TreeShape

STEPS = 4


def greedy_reply(anchors: int, seed: int) -> Acceptance:
    """Ranks as of text that the target wrote greedily: what is accepted is also kept."""
    random = np.random.default_rng(seed)
    ranks = random.choice([0, 0, 0, 1, 2, 11, -1], size=(anchors, STEPS)).astype(np.int32)
    ranks[~counted_steps(anchors, STEPS)] = -1
    first = (ranks == 0).astype(float)
    return Acceptance(first, first, ranks)


@pytest.fixture
def conversations():
    lengths = [[1], [2, 9], [30], [], [17, 3]]
    return [
        Conversation("a", [greedy_reply(n, seed=10 * i + n) for n in own])
        for i, own in enumerate(lengths)
    ]


def test_table_equals_a_loop_and_begins_with_the_conditionals(conversations):
    table = rank_table(conversations, STEPS)
    hits = [[0] * RANKS for _ in range(STEPS)]
    reached = [0] * STEPS
    for reply in (reply for found in conversations for reply in found.replies):
        for i, row in enumerate(reply.ranks.tolist()):
            for k in range(STEPS):
                if i + k < len(reply.ranks) and all(rank == 0 for rank in row[:k]):
                    reached[k] += 1
                    if 0 <= row[k] < RANKS:
                        hits[k][row[k]] += 1
    assert table["reached"] == reached
    for k in range(STEPS):
        assert table["accepted"][k] == pytest.approx([hit / reached[k] for hit in hits[k]])
    positions = summarise(conversations, STEPS, seed=0)["positions"]
    for row, position in zip(table["accepted"], positions, strict=True):
        assert row[0] == pytest.approx(position["conditional"]["value"])


def test_a_position_that_nobody_reached_has_no_row():
    reply = Acceptance(np.zeros((3, 2)), np.zeros((3, 2)), np.full((3, 2), 1, dtype=np.int32))
    table = rank_table([Conversation("a", [reply])], 2)
    assert table == {"accepted": [[0.0, 1.0] + [0.0] * 8, None], "reached": [3, 0]}


@pytest.mark.parametrize("seed", range(3))
def test_runs_are_the_longest_paths_in_the_tree(seed):
    ranks = greedy_reply(40, seed).ranks
    shape = best_tree([[0.4, 0.3, 0.2], [0.5, 0.3], [0.3, 0.4], [0.5]], 14)
    for row, run in zip(ranks.tolist(), runs(ranks, shape), strict=True):
        inside = [tuple(row[:depth]) in shape.paths for depth in range(1, STEPS + 1)]
        assert run == [*inside, False].index(False)


@pytest.mark.parametrize("gamma", range(STEPS + 1))
def test_a_chain_is_walked_as_chains_always_were(conversations, gamma):
    """The dynamic program over `kept` and this walk are two ways to the same forwards."""
    replies = [reply for found in conversations for reply in found.replies]
    tokens = sum(len(reply.kept) for reply in replies)
    forwards = sum(walk(reply.kept).forwards[gamma - 1] for reply in replies) if gamma else tokens
    assert walked(conversations)(TreeShape.chain(gamma)) == pytest.approx(tokens / forwards)


def test_a_tree_accepts_what_a_part_of_it_accepts():
    """At every anchor. (Forwards may still differ either way: a longer run starts elsewhere.)"""
    ranks = greedy_reply(60, 5).ranks
    accepted = [[0.4, 0.3, 0.2]] * STEPS
    found = [runs(ranks, best_tree(accepted, nodes)) for nodes in (0, 1, 2, 4, 8, 16)]
    assert (found[0] == 0).all()
    for smaller, larger in itertools.pairwise(found):
        assert (larger >= smaller).all()
        assert larger.sum() > smaller.sum()

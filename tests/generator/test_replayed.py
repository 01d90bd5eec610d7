"""A replayed step is a step: all that outlives it lies in buffers that stay in place."""

from __future__ import annotations

import pytest
import torch
from head_kinds import KINDS
from replaying import Tape, TapeReplay
from torch.utils._pytree import tree_leaves

from spectrain.core.cache import KVCache
from spectrain.generator import run
from spectrain.generator.run import Run
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator
from spectrain.heads.tree import TreeDefaults, TreeShape

STATIC = TreeShape(paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
WAYS = {
    "chain": {"draft_tokens": 3},
    "static": {"tree": STATIC},
    "grown": {"tree": TreeDefaults(top_k=3, depth=3, nodes=8)},
}
SAMPLED = Sampling(0.9, top_k=30, top_p=0.95, repetition_penalty=1.2, min_new_tokens=4, seed=2)
HEADLESS = {"plain": {}, "lookup": {"lookup": 2, "draft_tokens": 3}}
# Families and variants that draft in their own way; the others differ in training.
DRAFTING = ("eagle1", "eagle3", "eagle3-two-layers", "draft", "medusa", "mtp-parallel")
DRAFTING += ("mtp-sequential", "mtp-sequential-shared")
SETTINGS = [(kind, way) for kind in DRAFTING for way in WAYS]
SETTINGS += [(None, way) for way in HEADLESS]


def made(tiny, kind, way):
    options = HEADLESS[way] if kind is None else WAYS[way]
    head = KINDS[kind](tiny, 300) if kind else None
    return lambda **more: Generator(tiny, head, **options, **more)


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 380, (n,), generator=generator).repeat(2) for n in (25, 1, 9)]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Rows are not narrowed, and a cache is allocated once."""
    monkeypatch.setattr(Generator, "_narrows", lambda *_: False)
    monkeypatch.setattr(KVCache, "reserve", lambda *_: None)


@pytest.mark.parametrize(
    ("kind", "way", "sampling"),
    [(*setting, Sampling()) for setting in SETTINGS]
    # What is drawn and penalised is the same for every family.
    + [(*setting, SAMPLED) for setting in SETTINGS if setting[0] in ("eagle3", "medusa", None)],
)
def test_replayed_steps_give_the_same_tokens(
    tiny, prompts, as_on_a_gpu, monkeypatch, kind, way, sampling
):
    """Rows come and go between the replays; two views of the cache, so two recordings in turn."""
    make, made_replays = made(tiny, kind, way), []
    plain = make().generate(prompts, 24, sampling, 2)

    def replay(*args):
        made_replays.append(TapeReplay(*args))
        return made_replays[-1]

    monkeypatch.setattr(run, "Replay", replay)
    got = make().generate(prompts, 24, sampling, 2)
    assert [c.tokens for c in got] == [c.tokens for c in plain]
    (used,) = made_replays
    assert used.replayed > 12
    assert sum(tape is not None for tape in used.tapes.values()) >= 2


@pytest.mark.parametrize(("kind", "way"), SETTINGS)
def test_no_step_reads_what_another_one_made(tiny, prompts, as_on_a_gpu, monkeypatch, kind, way):
    """A tensor that a step allocates is gone with it: nobody reads it in a later step, and the
    buffers that rows and caches had in the first step are those of the last one."""
    tapes, places, step = [], [], Run._step

    def recorded(self, view, head_view):
        tape = Tape()
        with tape:
            report = step(self, view, head_view)
        tapes.append(tape)
        state = self.drafter.state
        caches = [self.cache, *([state.cache] if hasattr(state, "cache") else [])]
        held = [t for t in vars(self.rows).values() if isinstance(t, torch.Tensor)]
        for cache in caches:
            held += [cache.lengths, cache.positions, *tree_leaves(cache._layers)]
        if self.rows.features:
            held += [t for t in vars(self.rows.features).values() if t is not None]
        places.append([t.data_ptr() for t in held])
        return report

    monkeypatch.setattr(Run, "_step", recorded)
    made(tiny, kind, way)().generate(prompts, 12, Sampling(), 2)
    assert len(tapes) > 6
    assert all(now == places[0] for now in places)
    foreign = set()  # storages that earlier steps made; their tapes keep them alive
    for tape in tapes:
        known, fresh = set(), set()
        for _, args, kwargs, result in tape.operations:
            read = storages((args, kwargs))
            assert not read & foreign
            known |= read - fresh
            fresh |= storages(result) - known
        foreign |= fresh
        assert fresh


def storages(tree):
    """Where the tensors in `tree` lie; empty ones lie nowhere."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}

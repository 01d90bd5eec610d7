"""A step is the same tensor operations, on the same shapes, whatever the drafts are worth: what a
CUDA graph needs. And it never asks the device for a value."""

from __future__ import annotations

import pytest
import torch
from head_kinds import KINDS
from helped_heads import Helped
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from spectrain.generator.rules import Typical
from spectrain.generator.run import Run
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator
from spectrain.heads.tree import TreeDefaults, TreeShape

STATIC = TreeShape(paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
WAYS = {
    "plain": {},
    "chain": {"draft_tokens": 3},
    "static": {"tree": STATIC},
    "grown": {"tree": TreeDefaults(top_k=3, depth=3, nodes=8)},
    "lookup": {"lookup": 2, "draft_tokens": 3},
}
# What makes the host wait for the device, or gives shapes that depend on values.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "is_nonzero")


class Recorder(TorchDispatchMode):
    """Names and shapes of all tensor operations."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        shapes = [tuple(t.shape) for t in args if isinstance(t, torch.Tensor)]
        self.seen.append((str(function), shapes))
        return result


class Unrecorded(Helped):
    def _help(self, state, logits):
        with _disable_current_modes():
            return super()._help(state, logits)

    def _verified(self, state, logits, counts):
        state.depth = 0
        return self._help(state, logits[:, None])[:, 0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("sampling", "typical"),
    [
        (Sampling(), None),
        (Sampling(1.0, top_k=20, top_p=0.9, min_p=0.01, seed=1), None),
        (Sampling(1.0, seed=1), Typical()),
        (Sampling(0.8, repetition_penalty=1.2, min_new_tokens=9, suppress=(5,)), None),
    ],
)
def test_a_step_is_the_same_operations_whatever_is_accepted(
    tiny, monkeypatch, way, sampling, typical
):
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 380, (n,), generator=generator).repeat(2) for n in (7, 1, 9)]
    head, options = None, WAYS[way]
    if way not in ("plain", "lookup"):
        done = Generator(tiny).generate(prompts, 28, sampling)
        texts = [p.tolist() + c.tokens for p, c in zip(prompts, done, strict=True)]
        head = Unrecorded(KINDS["eagle3"](tiny, 300), texts, ranks=(0, 0, 1, None))
    steps, step = [], Run._step

    def recorded(self, view, head_view):
        recorder = Recorder()
        with recorder:
            report = step(self, view, head_view)
        key = (view, head_view, report.shape, self.rows.count)
        steps.append((key, recorder.seen, report[:, -1].tolist()))
        return report

    monkeypatch.setattr(Run, "_step", recorded)
    Generator(tiny, head, typical=typical, **options).generate(prompts, 24, sampling)
    first, compared = {}, 0
    for key, seen, _ in steps[1:]:  # in the first step a CPU's cache grows to what the steps see
        assert not [name for name, _ in seen if any(wait in name for wait in WAITS)]
        assert seen == first.setdefault(key, seen)
        compared += seen is not first[key]
    assert compared > 2
    if head or (way == "lookup" and sampling.greedy):  # random text repeats nothing
        counts = {count for _, _, row in steps for count in row}
        assert len(counts) > 1, "every step accepted the same"

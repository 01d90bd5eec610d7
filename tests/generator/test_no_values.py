"""A step on torch's device "meta", whose tensors have shapes and no values.

No value can be looked at there, and tensors of two devices do not mix. So this fails, on any
machine, for what would make the host wait for a GPU or could not be captured there: reading a
value, shapes that depend on values, tensors that are made on the host or copied from it.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from head_kinds import KINDS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectrain.core.target import Target
from spectrain.generator.rules import Rules, Typical
from spectrain.generator.run import Run
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator
from spectrain.heads.tree import TreeDefaults, TreeShape

STATIC = TreeShape(paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
WAYS = {
    "chain": {"draft_tokens": 3},
    "static": {"tree": STATIC},
    "drawn": {"tree": STATIC, "proposal": "drawn"},
    "grown": {"tree": TreeDefaults(top_k=3, depth=3, nodes=8)},
}
RULES = {
    "greedy": Rules(),
    "sampled": Rules(Sampling(1.0, top_k=20, top_p=0.9, min_p=0.01)),
    "penalised": Rules(Sampling(0.8, repetition_penalty=1.2, min_new_tokens=9, suppress=(5,))),
    "typical": Rules(Sampling(1.0), Typical()),
}


class OnHost(TorchDispatchMode):
    """Operations that touch a tensor of the host with more than a number in it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self.found.append(str(function))
        return result


@contextmanager
def zeros_for_values():
    """What the host asks for between steps, or once for good, is zero."""
    with pytest.MonkeyPatch.context() as patch:
        for name, zero in (
            ("tolist", lambda self: [0] * len(self)),
            ("__int__", lambda self: 0),
            ("__bool__", lambda self: False),
        ):
            patch.setattr(torch.Tensor, name, _either(zero, getattr(torch.Tensor, name)))
        yield


def _either(zero, real):
    return lambda self: zero(self) if self.is_meta else real(self)


@torch.inference_mode()
def on_host(tiny, head, options, rules):
    """What a step does on the host, after rows were admitted and one step was made."""
    target = Target(copy.deepcopy(tiny.model).to("meta"), tiny.tokenizer, "meta", "0" * 16)
    if head is not None:
        head = head.to("meta").bind(target.readout)
    drafter = Generator(target, head, **options).drafter
    run = Run(target, drafter, rules, [2], rows=2, slots=512, graphs=False)
    with zeros_for_values():
        run.admit([0, 1], [torch.tensor([5, 6, 7]), torch.tensor([8])], [1, 2])
    texts = [[5, 6, 7, 5, 6], [8, 9]]
    width = drafter.look(texts)
    assert width == drafter.width
    run._step(512, 512)
    with OnHost() as host:
        report = run._step(512, 512)
    assert report.is_meta
    assert report.shape == (2, drafter.depth + 2)
    return host.found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["chain", "grown"])
def test_every_family_stays_on_the_device(tiny, kind, way):
    assert on_host(tiny, KINDS[kind](tiny, 300), WAYS[way], Rules()) == []


@pytest.mark.parametrize("way", [*WAYS, "plain", "lookup"])
@pytest.mark.parametrize("rules", RULES)
def test_every_rule_stays_on_the_device(tiny, way, rules):
    options = {"plain": {}, "lookup": {"lookup": 1, "draft_tokens": 3}} | WAYS
    head = KINDS["eagle3"](tiny, 300) if way in WAYS else None
    assert on_host(tiny, head, options[way], RULES[rules]) == []

"""Teacher-forced numbers against what the generator commits on the same prompts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from head_kinds import KINDS

from spectrain.core.batch import Batch, predicting
from spectrain.evaluation.alpha import acceptance
from spectrain.evaluation.ranks import walked
from spectrain.evaluation.walk import walk
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator
from spectrain.heads.eagle3 import Eagle3Head, Eagle3Options
from spectrain.heads.registry import FAMILIES
from spectrain.heads.tree import TreeShape

STEPS = 3  # that the EAGLE-3 head is trained for
LONGEST = 4  # draft of the families in turn


def prompts_of(seed, count):
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, 384, (int(torch.randint(2, 9, (), generator=random)),), generator=random)
        for _ in range(count)
    ]


@torch.inference_mode()
def captured(target, head, prompts, completions):
    """The batch that a store would give for these replies."""
    rows = [[*p.tolist(), *c.tokens] for p, c in zip(prompts, completions, strict=True)]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    reply = torch.zeros_like(tokens)
    for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        tokens[place, : len(row)] = torch.tensor(row)
        reply[place, len(prompt) : len(row)] = 1
    features = target.forward(tokens, aux_layers=head.needs.aux_layers)
    argmax = torch.where(predicting(reply), target.logits(features.last).argmax(-1), -1)
    return Batch(tokens=tokens, reply=reply, aux=features.aux, last=features.last, argmax=argmax)


def trained(target, head, steps):
    """A head trained for a moment on greedy replies, so that drafts are accepted at all."""
    prompts = prompts_of(1, 16)
    batch = captured(target, head, prompts, Generator(target).generate(prompts, 24))
    # Out of inference mode: clones may be used with gradients.
    tensors = {
        name: value if value is None else value.clone() for name, value in vars(batch).items()
    }
    optimiser = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(steps):
        sums = head(Batch(**tensors))
        (sums.loss.sum() / sums.count.sum()).backward()
        optimiser.step()
        optimiser.zero_grad()
    return head.eval()


@pytest.fixture(scope="module")
def head(tiny):
    """An EAGLE-3 head that guesses what the replies are made of."""
    prompts = prompts_of(1, 16)
    replies = Generator(tiny).generate(prompts, 24)
    counts = torch.bincount(torch.tensor([t for r in replies for t in r.tokens]), minlength=392)
    torch.manual_seed(0)
    options = Eagle3Options(steps=STEPS, draft_vocab_size=300)
    return trained(tiny, Eagle3Head.create(options, tiny, counts), 40)


@pytest.fixture(scope="module", params=FAMILIES)
def of_family(request, tiny):
    """The first kind of each family, from wild weights."""
    made = (make(tiny, 300) for make in KINDS.values())
    head = next(head for head in made if head.family == request.param)
    return trained(tiny, head, 12)


def require_the_walk_taken(target, head, gamma):
    """Greedy replies do not depend on the head, and the head's drafts only on the text: the walk
    through the reply is the one the generator took. The prompts include those trained on (drafts
    are accepted) and new ones (they are rejected)."""
    prompts = prompts_of(1, 16) + prompts_of(2, 8)
    completions = Generator(target, head, gamma).generate(prompts, 24)
    batch = captured(target, head, prompts, completions)
    steps = min(LONGEST, head.longest_draft)
    (found,) = acceptance(target, head, batch, steps, [0.0])
    accepted = rejected = 0
    for completion, replies in zip(completions, found, strict=True):
        runs = [completion.runs[m] for m in range(steps + 1)]
        if completion.committed == 0:
            assert not replies
            continue
        path = walk(replies[0].kept)
        assert len(replies[0].kept) == completion.committed
        assert path.forwards[gamma - 1] == completion.forwards
        assert path.runs[gamma - 1].tolist() == runs
        accepted += sum(m * runs[m] for m in range(steps + 1))
        rejected += runs[0]
    return accepted, rejected


@pytest.mark.parametrize("gamma", [1, 2, STEPS])
def test_greedy_forwards_and_runs_are_exactly_the_generators(tiny, head, gamma):
    accepted, rejected = require_the_walk_taken(tiny, head, gamma)
    assert accepted > 50
    assert rejected > 50


@pytest.mark.parametrize("gamma", [1, LONGEST])
def test_the_same_for_every_family(tiny, of_family, gamma):
    accepted, rejected = require_the_walk_taken(
        tiny, of_family, min(gamma, of_family.longest_draft)
    )
    assert accepted > 20
    assert rejected > 20


@pytest.mark.parametrize(
    "paths",
    [
        ((0,), (1,), (2,)),
        ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 2)),
    ],
)
def test_a_static_tree_commits_what_the_walk_of_the_plan_says(tiny, of_family, paths):
    """`spectrain plan` chooses trees by this number."""
    shape = TreeShape(paths=tuple(path for path in paths if len(path) <= of_family.longest_draft))
    prompts = prompts_of(1, 16) + prompts_of(2, 8)
    completions = Generator(tiny, of_family, tree=shape).generate(prompts, 24)
    batch = captured(tiny, of_family, prompts, completions)
    (found,) = acceptance(tiny, of_family, batch, shape.depth, [0.0])
    conversations = [SimpleNamespace(replies=replies) for replies in found]
    committed = sum(c.committed for c in completions)
    forwards = sum(c.forwards for c in completions)
    assert committed > 1.1 * forwards, "hardly anything was accepted"
    assert walked(conversations)(shape) == committed / forwards


def test_sampled_forwards_agree_in_the_mean(tiny, head):
    """At temperature 1 the generator's forwards minus those expected for the text it wrote have
    mean zero: |z| < 4.5 over 192 replies, missed by chance with odds below 1 in 100 000."""
    prompts = prompts_of(1, 16) * 12
    completions = Generator(tiny, head, STEPS).generate(
        prompts, 16, Sampling(temperature=1.0, seed=7)
    )
    batch = captured(tiny, head, prompts, completions)
    (found,) = acceptance(tiny, head, batch, STEPS, [1.0])
    pairs = [
        (completion.forwards, walk(replies[0].kept).forwards[STEPS - 1])
        for completion, replies in zip(completions, found, strict=True)
        if replies
    ]
    actual, expected = np.array(pairs, float).T
    gap = actual - expected
    assert gap.std() > 0
    assert abs(gap.sum()) < 4.5 * np.sqrt((gap**2).sum())
    assert actual.sum() < sum(c.committed for c in completions)  # some drafts were accepted

"""Multi-token prediction: what is drafted is what was taught, for chains and trees."""

from __future__ import annotations

import pytest
import torch
from mtp_variants import ARCHITECTURES, every_variant, make
from tiny_models import make_batch, random_rows

from spectrain.core.batch import counted


def require_both_faces(target, head, steps, rows):
    """Guesses in drafting equal those in training, for every anchor that counts."""
    tokens, reply = rows
    batch = make_batch(target, head, tokens, reply)
    taught = [(u.anchors, head.logits(u.hidden, u.step)) for u in head.unroll(batch, steps)]
    compared = 0
    for row, flat in enumerate(taught[0][0].tolist()):
        b, t = divmod(flat, tokens.shape[1])
        features = target.forward(tokens[b : b + 1])
        state = head.start(1, 64)
        logits = head.begin(state, tokens[b : b + 1], features[:, :-1], torch.tensor([t + 1]))
        for step in range(steps):
            if not counted(reply, step)[b, t]:
                break
            if step:
                fed = tokens[b, t + 1 + step].view(1, 1)
                logits = head.expand(state, fed, torch.zeros(1, 1, dtype=torch.int64))[:, 0]
            expected = taught[step][1][row]
            error = (logits[0] - expected).abs().max() / expected.abs().max()
            assert error < 1e-4, (b, t, step, float(error))
            compared += 1
    assert compared > 15


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@every_variant
@torch.no_grad()
def test_both_faces_agree_for_every_kind_of_layer(targets, architecture, variant):
    target = targets(architecture)
    head = make(target, variant)
    require_both_faces(target, head, 3, random_rows(torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("variant", ["chain", "chain before norm", "recurrent"])
@torch.no_grad()
def test_deep_and_wide_trees_draft_like_single_chains(tiny, variant):
    """Three levels of three nodes over unequal rows, one of them shorter than the tree is deep, and
    once more after unequal numbers of tokens were accepted."""
    head = make(tiny, variant, steps=4)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 380, (3, 20), generator=generator)
    features = tiny.forward(tokens)
    lengths = torch.tensor([1, 2, 9])
    state = head.start(3, 64)
    head.begin(state, tokens[:, :10], features[:, :9], lengths)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    # A row that pauses (0) goes on as if nothing had been.
    for accepted in torch.tensor([[1, 4, 2], [3, 0, 1], [2, 1, 3]]):
        index = lengths[:, None] + torch.arange(4)
        rows = torch.arange(3)[:, None]
        guess = head.extend(state, tokens[rows, index + 1], features[rows, index], accepted)
        lengths = lengths + accepted
        levels = [torch.randint(3, 380, (3, 3), generator=generator) for _ in range(3)]
        parents = [torch.zeros(3, 3, dtype=torch.int64)]
        parents += [torch.randint(0, 3, (3, 3), generator=generator) for _ in range(2)]
        got = [head.expand(state, *level) for level in zip(levels, parents, strict=True)]
        for row in range(3):
            if accepted[row] == 0:
                continue
            n = int(lengths[row])
            for node in range(3):
                path, at = [], node
                for depth in (2, 1, 0):
                    path.insert(0, at)
                    at = int(parents[depth][row, at])
                alone, one = head.start(1, 64), slice(row, row + 1)
                logits = head.begin(
                    alone, tokens[one, : n + 1], features[one, :n], torch.tensor([n])
                )
                torch.testing.assert_close(guess[row], logits[0], atol=1e-4, rtol=1e-4)
                for depth, at in enumerate(path):
                    logits = head.expand(alone, levels[depth][row, at].view(1, 1), zero)
                    torch.testing.assert_close(
                        got[depth][row, at], logits[0, 0], atol=1e-4, rtol=1e-4
                    )


@torch.no_grad()
def test_one_module_drafts_further_than_it_learnt(tiny):
    head = make(tiny, "recurrent", steps=2)
    assert head.longest_draft == 16
    assert make(tiny, "chain", steps=2).longest_draft == 2
    assert make(tiny, "parallel", steps=2).longest_draft == 2
    tokens = torch.full((2, 30), 7)
    reply = torch.ones_like(tokens)
    tokens[:, ::3] = torch.arange(20).view(2, 10) + 11
    require_both_faces(tiny, head, 9, (tokens, reply))

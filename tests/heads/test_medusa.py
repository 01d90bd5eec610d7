"""Medusa: alignment, loss and gradients by slow code; where every head starts."""

from __future__ import annotations

import math

import pytest
import torch
from head_kinds import create
from pydantic import ValidationError
from tiny_models import SIZES, make_batch, random_rows
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.batch import Batch, counted
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.generator.speculate import Generator
from spectrain.heads import medusa
from spectrain.heads.base import Needs
from spectrain.heads.medusa import MedusaOptions
from spectrain.heads.registry import FAMILIES, family


def slow_objective(head, batch: Batch):
    """SPEC §3–4 spelled out: anchor by anchor, head by head."""
    config = head.config
    ids = [i for i in range(config.vocab_size) if not head.reduced or head.t2d[i]]
    steps = config.steps
    loss = [torch.zeros(()) for _ in range(steps)]
    count, hits, seen = ([0] * steps for _ in range(3))
    for b in range(len(batch.tokens)):
        tokens, reply = batch.tokens[b].tolist(), batch.reply[b].tolist()
        for t in range(len(tokens)):
            for k in range(steps):
                inside = reply[t + 1 : t + 3 + k]
                if len(inside) < 2 + k or not inside[0] or len(set(inside)) > 1:
                    continue
                x = batch.last[b, t]
                for layer in range(config.layers):
                    linear = head.heads[k][layer].linear
                    y = linear.weight @ x + linear.bias
                    x = x + y * torch.sigmoid(y)
                logits = head.heads[k][config.layers].weight @ x
                teacher = head.readout.weight @ batch.last[b, t + 1 + k]
                best = int(teacher.argmax())
                seen[k] += 1
                hits[k] += ids[int(logits.argmax())] == best
                taught = tokens[t + 2 + k] if config.loss == "ce" else best
                if taught not in ids:
                    continue
                count[k] += 1
                if config.loss == "ce":
                    loss[k] = loss[k] - logits.log_softmax(0)[ids.index(taught)]
                else:
                    loss[k] = loss[k] - (teacher[ids].softmax(0) * logits.log_softmax(0)).sum()
    return torch.stack(loss), count, hits, seen


@pytest.mark.parametrize("loss", ["ce", "soft"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("size", [120, None])
def test_objective_and_gradients_equal_the_slow_reference(tiny, loss, layers, size):
    head = create(tiny, "medusa", steps=3, layers=layers, loss=loss, draft_vocab_size=size)
    assert head.config.draft_vocab_size == (size or 384)
    batch = make_batch(tiny, head, *random_rows(torch.Generator().manual_seed(8)))
    weights = torch.tensor(head.weights(0.0))
    assert weights.tolist() == pytest.approx([1, 0.8, 0.64])

    fast = head.objective(batch)
    (fast.loss * weights).sum().backward()
    gradients = {name: value.grad.clone() for name, value in head.named_parameters()}
    head.zero_grad()
    slow, count, hits, seen = slow_objective(head, batch)
    (slow * weights).sum().backward()

    assert fast.count.tolist() == count == head.counts(batch).tolist()
    assert min(count) > 0
    assert fast.hits.tolist() == hits
    assert fast.seen.tolist() == seen
    torch.testing.assert_close(fast.loss, slow, atol=1e-3, rtol=1e-4)
    for name, value in head.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad, atol=2e-4, rtol=2e-3)


def test_six_tokens_by_hand(tiny):
    """x = p p | r r r r: which head guesses what from where, and what it costs.

    position   0 1 2 3 4 5        reply 0 0 1 1 1 1
    head 0: f[1] f[2] f[3] guess x[3] x[4] x[5]
    head 1: f[1] f[2]      guess x[4] x[5]
    head 2: f[1]           guesses x[5]
    head 3: nothing
    """
    head = create(tiny, "medusa", steps=4, random=False)
    tokens, reply = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
    batch = make_batch(tiny, head, tokens, reply)
    assert head.counts(batch).tolist() == [3, 2, 1, 0]

    # Output layers that look at one number of the state and like one token: e^z among 384 − 1 ones.
    batch.last.zero_()
    batch.last[0, :, 0] = torch.tensor([9.0, 1.0, 2.0, 3.0, 9.0, 9.0])
    with torch.no_grad():
        for own, liked in zip(head.heads, (8, 9, 10, 3), strict=True):
            own[-1].weight.zero_()
            own[-1].weight[liked, 0] = 1.0

    def cost(z, right):
        return math.log(math.exp(z) + 383) - (z if right else 0)

    objective = head.objective(batch)
    assert objective.loss.tolist() == pytest.approx(
        [
            cost(1, True) + cost(2, False) + cost(3, False),
            cost(1, True) + cost(2, False),
            cost(1, True),
            0,
        ],
        rel=1e-5,
    )
    with torch.no_grad():
        head.heads[1][-1].weight[9, 0] = 0.0
        head.heads[1][-1].weight[10, 0] = 1.0
    again = head.objective(batch).loss.tolist()
    assert again[1] == pytest.approx(cost(1, False) + cost(2, True), rel=1e-5)
    assert again[2] == objective.loss[2]


@pytest.mark.parametrize("name", ["tiny", "whole"])
def test_every_head_starts_as_the_target_s_own(name, request):
    target = request.getfixturevalue(name)
    head = create(target, "medusa", steps=3, layers=2, random=False)
    assert head.needs == Needs()
    last = target.forward(torch.randint(3, 380, (1, 9))).last
    expected = target.logits(last)[..., : target.readout.usable]
    for step in range(3):
        logits = head.logits(head._blocks(last, step), step)
        torch.testing.assert_close(logits, expected, atol=0, rtol=0)
    assert all(not p.any() for n, p in head.named_parameters() if ".linear." in n)


def test_a_capped_target_has_capped_heads(tmp_path, tokenizer):
    torch.manual_seed(0)
    sizes = SIZES | {"initializer_range": 1.0, "final_logit_softcapping": 4.0}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **sizes)).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), pack_weights=False)
    head = create(target, "medusa", steps=2, random=False)
    last = target.forward(torch.randint(3, 380, (1, 9))).last
    logits = head.logits(head._blocks(last, 1), 1)
    torch.testing.assert_close(logits, target.logits(last)[..., :384])
    assert 2 < logits.abs().max() <= 4


def test_names_of_the_tensors_are_the_published_ones(tiny):
    head = create(tiny, "medusa", steps=2, layers=2, random=False)
    names = {f"heads.{k}.{n}.linear.{part}" for k in (0, 1) for n in (0, 1) for part in
             ("weight", "bias")}  # fmt: skip
    names |= {"heads.0.2.weight", "heads.1.2.weight", "d2t", "t2d"}
    assert set(head.state_dict()) == names
    assert MedusaOptions().steps == 5


def test_a_draft_goes_no_deeper_than_the_heads(tiny):
    head = create(tiny, "medusa", steps=2)
    assert head.longest_draft == 2
    tokens = torch.randint(3, 380, (1, 6))
    state = head.start(1, 16)
    head.begin(state, tokens, tiny.forward(tokens[:, :5]), torch.tensor([5]))
    one = torch.tensor([[3, 4]]), torch.tensor([[0, 0]])
    assert head.expand(state, *one).shape == (1, 2, 384)
    with pytest.raises(AssertionError, match="no deeper"):
        head.expand(state, *one)


def test_logits_of_rows_that_do_not_count_are_never_made(tiny, monkeypatch):
    head = create(tiny, "medusa", steps=3)
    tokens, reply = random_rows(torch.Generator().manual_seed(8))
    batch = make_batch(tiny, head, tokens, reply)
    made = []
    original = medusa.linear_cross_entropy

    def watched(hidden, *others, **more):
        made.append(len(hidden))
        return original(hidden, *others, **more)

    monkeypatch.setattr(medusa, "linear_cross_entropy", watched)
    head.objective(batch)
    assert made == [int(counted(reply, step).sum()) for step in range(3)]


@pytest.mark.parametrize("name", ["medusa", "mtp-parallel", "mtp-sequential"])
def test_a_draft_deeper_than_the_heads_is_refused_with_both_numbers(tiny, name):
    """CASE 37."""
    head = create(tiny, name, steps=3)
    with pytest.raises(SpectrainError, match="4 is not between 1 and 3"):
        Generator(tiny, head, 4)
    assert Generator(tiny, head, 3).gamma == 3


@pytest.mark.parametrize("name", FAMILIES)
def test_no_head_has_zero_steps(name):
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        family(name).Options(steps=0)

"""The objective of a target trained along with its head, by slow code and by hand."""

from __future__ import annotations

import pytest
import torch
from head_kinds import create
from joint_heads import joint, stored
from packed_rows import documents, require_same_sums
from tiny_models import make_batch
from transformers import AutoModelForCausalLM

from spectrain.core.batch import Batch, predicting
from spectrain.core.target import Target
from spectrain.trainer.settings import TrunkSettings
from spectrain.trainer.trunk import JointHead


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("loss", ["distil", "text"])
def test_objective_and_gradients_equal_the_slow_reference(tiny, tiny_path, mode, loss):
    """The library's own forward and loss, row by row; and the parts add up as the paper says."""
    made = joint(tiny_path, mode=mode, loss=loss)
    batch = stored(tiny)
    fast = made(batch)
    weights = torch.tensor(made.weights(0.9))
    assert weights.tolist() == pytest.approx([1, 0.2, 0.2 * 0.8])
    (fast.loss * weights).sum().backward()
    named = {n: p for n, p in made.named_parameters() if p.requires_grad}
    gradients = {name: value.grad.clone() for name, value in named.items()}
    made.zero_grad()

    made.trunk.set_attn_implementation("eager")
    out = made.trunk(input_ids=batch.tokens, output_hidden_states=True)
    original = AutoModelForCausalLM.from_pretrained(tiny_path)(batch.tokens).logits.log_softmax(-1)
    trunk, heads = torch.zeros(()), [torch.zeros(()) for _ in range(2)]
    counts, hits = [0, 0, 0], [0, 0]
    for b in range(len(batch.tokens)):
        tokens, reply = batch.tokens[b].tolist(), batch.reply[b].tolist()
        for t in range(len(tokens) - 1):
            own = out.logits[b, t].log_softmax(-1)
            if reply[t + 1] > 0:
                counts[0] += 1
                if loss == "text":
                    trunk = trunk - own[tokens[t + 1]]
                else:
                    p = original[b, t].exp()
                    trunk = trunk + (p * (original[b, t] - own)).sum()
            for k in range(2):
                inside = reply[t + 1 : t + 3 + k]
                if len(inside) == 2 + k and inside[0] and len(set(inside)) == 1:
                    block, output = made.head.heads[k]
                    logits = output(block(out.hidden_states[-1][b, t]))
                    ids = made.head.draft_ids.tolist()
                    heads[k] = heads[k] - logits.log_softmax(-1)[ids.index(tokens[t + 2 + k])]
                    counts[1 + k] += 1
                    live = int(out.logits[b, t + 1 + k].argmax())
                    hits[k] += ids[int(logits.argmax())] == live
    slow = torch.stack([trunk, *heads])
    (slow * weights).sum().backward()
    assert fast.count.tolist() == counts == made.counts(batch).tolist()
    assert fast.hits.tolist() == [0, *hits]
    torch.testing.assert_close(fast.loss, slow, atol=1e-3, rtol=1e-4)
    assert fast.loss[0] > 0.1
    assert len(gradients) == len(named) > 20
    for name, value in named.items():
        torch.testing.assert_close(
            gradients[name], value.grad, atol=2e-4, rtol=2e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert name.endswith("lora_A.default.weight") or gradients[name].any(), name


def test_before_training_the_trunk_is_the_original_target(tiny, tiny_path):
    """No distance to it, and the heads' terms are those of the heads alone."""
    target = Target.load(str(tiny_path), pack_weights=False)
    head = create(target, "medusa", steps=2)
    batch = stored(tiny)
    alone = head.objective(batch)
    found = JointHead(head, target, TrunkSettings(mode="lora"))(batch)
    assert found.loss[0].abs() < 1e-3
    torch.testing.assert_close(found.loss[1:], alone.loss)
    assert torch.equal(found.hits[1:], alone.hits)
    assert torch.equal(found.seen[1:], alone.seen)


def test_many_small_parts_of_the_logits_sum_to_one_large(tiny, tiny_path, monkeypatch):
    batch = stored(tiny)
    made = joint(tiny_path, mode="full")
    whole = made(batch)
    monkeypatch.setattr("spectrain.trainer.trunk._LOGITS", 3 * 392)
    parts = made(batch)
    torch.testing.assert_close(parts.loss, whole.loss)
    assert torch.equal(parts.hits, whole.hits)


@pytest.mark.parametrize(
    ("mode", "loss"), [("lora", "distil"), ("full", "distil"), ("scratch", "text")]
)
@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3", "mtp-sequential", "mtp-parallel"])
def test_packing_changes_nothing(tiny, tiny_path, mode, loss, kind):
    """CASE 22, the live target too reads each conversation of a row as if it were alone."""
    options = {"steps": 2, "draft_vocab_size": 60}
    made = joint(tiny_path, kind=kind, mode=mode, loss=loss, options=options)
    own = documents(tiny, create(tiny, "medusa", steps=1), 12)
    require_same_sums(made.train(), own)
    assert made(own[0]).seen[1] > 0


@pytest.mark.parametrize("loss", ["distil", "text"])
def test_nothing_to_learn_is_a_zero_with_a_graph(tiny, tiny_path, loss):
    batch = stored(tiny)
    batch.reply.zero_()
    made = joint(tiny_path, mode="full", loss=loss)
    found = made(batch)
    assert not found.loss.any()
    assert not found.count.any()
    found.loss.sum().backward()
    assert not any(p.grad.any() for p in made.parameters() if p.grad is not None)


def test_bf16_autocast(tiny, tiny_path):
    batch = stored(tiny)
    made = joint(tiny_path, mode="lora")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = made(batch)
    low.loss.sum().backward()
    torch.testing.assert_close(low.loss, made(batch).loss, atol=1.0, rtol=0.1)
    assert low.loss.dtype == torch.float32
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


def test_the_heads_weight_rises_when_the_trunk_begins_to_learn(tiny_path):
    def of(progress, **settings):
        made = joint(tiny_path, mode="lora", **settings)
        one, first, second = made.weights(progress)
        assert one == 1
        assert second == pytest.approx(0.8 * first)
        return first

    assert of(0.0) == of(0.99) == pytest.approx(0.2)
    assert of(0.5, heads_weight=3) == pytest.approx(3)
    ramp = {"heads_first": 0.2, "ramp": 0.4}
    values = [of(p, **ramp) for p in (0.0, 0.19, 0.2, 0.3, 0.4, 0.6, 0.9)]
    assert values == pytest.approx([0.2, 0.2, 0, 0.05, 0.1, 0.2, 0.2])
    # Families whose own terms are weighed already come in as they are.
    eagle = {"kind": "eagle3", "options": {"steps": 2, "draft_vocab_size": 60}}
    assert of(0.5, **eagle) == pytest.approx(1)


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="scratch has none"):
        TrunkSettings(mode="scratch", loss="distil")
    assert [TrunkSettings(mode=m).share(1.0) for m in ("lora", "full", "scratch")] == [
        0.25,
        0.25,
        1.0,
    ]
    assert TrunkSettings(mode="lora", lr=1e-4).share(1e-3) == pytest.approx(0.1)
    assert [TrunkSettings(mode=m).first for m in ("lora", "scratch")] == [0.25, 0.0]


def test_predicting_rows_are_the_trunk_s(tiny, tiny_path):
    """By hand: x = p r r p r: the rows before the replies' tokens, 0 1 3."""
    reply = torch.tensor([[0, 1, 1, 0, 2]])
    assert predicting(reply)[0].nonzero().flatten().tolist() == [0, 1, 3]
    batch = make_batch(
        tiny, create(tiny, "medusa", steps=1), torch.tensor([[5, 6, 7, 8, 9]]), reply
    )
    made = joint(tiny_path, mode="full", loss="text")
    assert made.counts(batch).tolist() == [3, 1, 0]
    logits = made.trunk(input_ids=batch.tokens).logits[0].log_softmax(-1)
    expected = -(logits[0, 6] + logits[1, 7] + logits[3, 9])
    torch.testing.assert_close(made(batch).loss[0], expected)
    changed = Batch(batch.tokens, batch.reply, None, batch.last + 1, batch.argmax)
    assert torch.equal(made(changed).loss, made(batch).loss)  # the store's features play no part


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_what_is_summed_is_what_is_counted_when_the_vocabulary_is_reduced(tiny, tiny_path, kind):
    """A trunk that has moved chooses other tokens than the store says; the rows in the loss are
    those of the denominators all the same."""
    options = {"steps": 2, "draft_vocab_size": 60}
    made = joint(tiny_path, kind=kind, mode="full", options=options)
    batch = stored(tiny)
    live = made(batch)
    assert live.count.tolist() == made.counts(batch).tolist()
    # Rows that the store's argmax leaves out have no influence on the loss.
    bare = made.head.guessable(batch.argmax)
    assert 0 < (bare & predicting(batch.reply)).sum() < predicting(batch.reply).sum()

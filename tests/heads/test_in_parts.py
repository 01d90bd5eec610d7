"""The gradient taken part by part, against that of the whole graph."""

from __future__ import annotations

import weakref

import pytest
import torch
from packed_rows import documents, pack
from tiny_models import gemma, make_batch, make_head, random_rows

from spectrain.core.batch import predicting
from spectrain.heads import in_parts, unrolled_loss


@pytest.fixture(params=[(1, 1), (20, 7), (3584, 256)], ids=["one by one", "some", "all"])
def small(request, monkeypatch):
    """Rows alive at a time, and rows of a chunk of logits."""
    rows, chunk = request.param
    monkeypatch.setattr(in_parts, "CPU_ROWS", rows)
    monkeypatch.setattr(unrolled_loss, "CPU_CHUNK", 1)
    monkeypatch.setattr(unrolled_loss, "FEWEST", chunk)


def require_the_same(head, batch):
    scale = torch.tensor([0.7 / (2 + k) for k in range(head.config.steps)])
    head.train()
    whole = head.objective(batch)
    (3 * (scale * whole.loss).sum()).backward()
    wanted = {n: None if p.grad is None else p.grad.clone() for n, p in head.named_parameters()}
    head.zero_grad()
    parts = head(batch, scale)
    (3 * parts.total).backward()
    torch.testing.assert_close(parts.loss, whole.loss.detach())
    torch.testing.assert_close(parts.total, (scale * whole.loss).sum().detach())
    for name in ("count", "hits", "seen"):
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name
    assert torch.equal(parts.count, head.counts(batch))
    reached = 0
    for name, parameter in head.named_parameters():
        if wanted[name] is None:
            assert parameter.grad is None, name
            continue
        reached += 1
        torch.testing.assert_close(
            parameter.grad, wanted[name], atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
    return reached


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps": 1},
        {"layers": 2, "embeddings": "own"},
        {"train_lm_head": False},
        {"loss": "lk_lambda", "draft_vocab": 384},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()) or "plain",
)
@pytest.mark.usefixtures("small")
def test_gradients_are_those_of_the_whole_graph(tiny, options):
    head = make_head(tiny, **options)
    batch = make_batch(tiny, head, *random_rows(torch.Generator().manual_seed(8)))
    assert require_the_same(head, batch) > 10


@pytest.mark.usefixtures("small")
def test_documents_that_share_a_row(tiny):
    head = make_head(tiny, steps=3)
    own = documents(tiny, head, 4)
    require_the_same(head, pack([own[:3], own[3:]], extra=2))


def test_a_target_with_a_soft_cap(tmp_path, tokenizer):
    target = gemma(tmp_path, tokenizer)
    head = make_head(target)
    require_the_same(head, make_batch(target, head, *random_rows(torch.Generator().manual_seed(2))))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_teach_nothing_may_hold_anything(tiny, value):
    """A store keeps the last state where the next token lies in a reply; elsewhere it is not read,
    not even to be multiplied by zero."""
    head = make_head(tiny, steps=3)
    batch = make_batch(tiny, head, *random_rows(torch.Generator().manual_seed(8)))
    batch.last[~predicting(batch.reply)] = value
    assert require_the_same(head, batch) > 10
    assert all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)


def test_no_anchor_at_all(tiny):
    """A micro-batch may have none; the loss is 0, and all gradients are."""
    head = make_head(tiny, steps=2)
    tokens, reply = random_rows(torch.Generator().manual_seed(1))
    found = head(make_batch(tiny, head, tokens, torch.zeros_like(reply)), torch.ones(2))
    found.total.backward()
    assert found.total == 0
    assert found.seen.tolist() == [0, 0]
    assert not any(p.grad.any() for p in head.parameters() if p.grad is not None)


class Kept:
    """A tensor that autograd keeps, alive as long as the graph that asks for it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def test_what_the_graph_keeps_does_not_grow_with_the_steps(tiny):
    """It is that of step 0; of the other steps there are gradients alone, one for each tensor."""
    kept = {}
    for steps in (1, 4):
        head = make_head(tiny, steps=steps).train()
        batch = make_batch(tiny, head, *random_rows(torch.Generator().manual_seed(8)))
        alive = weakref.WeakSet()

        def keep(value, alive=alive):
            alive.add(made := Kept(value))
            return made

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda made: made.value):
            found = head(batch, torch.ones(steps))
        kept[steps] = sum({one.value.data_ptr(): one.value.numel() for one in alive}.values())
        found.total.backward()
    assert kept[4] == kept[1] > 0


def test_products_in_bfloat16(tiny):
    """As with mixed precision in the training loop: it errs by bfloat16's rounding."""
    head = make_head(tiny, steps=3).train()
    batch = make_batch(tiny, head, *random_rows(torch.Generator().manual_seed(8)))
    scale = torch.full((3,), 0.1)
    found = {}
    for way in ("exact", "low"):
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "low"):
            objective = head(batch, scale)
        objective.total.backward()
        found[way] = objective.loss, [p.grad.flatten() for p in head.parameters()]
        head.zero_grad()
    torch.testing.assert_close(found["low"][0], found["exact"][0], rtol=0.03, atol=0)
    for low, exact in zip(found["low"][1], found["exact"][1], strict=True):
        assert torch.cosine_similarity(low, exact, dim=0) > 0.98

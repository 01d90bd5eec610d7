"""What a head says a step takes (heads/work.py) against what a real step does."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from head_kinds import KINDS as EVERY_HEAD
from hypothesis import given, settings
from hypothesis import strategies as st
from work_kinds import KINDS, LARGE, SIZES, batch_of, counted, head_of, held, target_of

from spectrain.core import batch as batches
from spectrain.core.outline import outline
from spectrain.heads.registry import FAMILIES, family
from spectrain.heads.work import Attention, Shape, trained

every_kind = pytest.mark.parametrize("kind", KINDS)
every_size = pytest.mark.parametrize("size", SIZES)


@cache
def case(kind, size):
    """(the shape of a batch, a head's outline, the head, the batch)"""
    sizes, rows = (SIZES | LARGE)[size]
    target = target_of(sizes)
    head = head_of(target, kind)
    name, options = KINDS[kind]
    made = family(name)
    told = made.outline(made.Options(**options), target)
    batch = batch_of(target, head, *rows)
    head(batch, torch.ones(len(head.weights(0)))).total.backward()  # what is made once
    return Shape.of_reply(batch.reply), told, head, batch


@cache
def run(kind, size):
    """(the counter of a step, the work that is told of it)"""
    shape, told, head, batch = case(kind, size)
    head.zero_grad(set_to_none=True)
    with counted() as counter:
        head(batch, torch.ones(len(head.weights(0)))).total.backward()
        work = told.work(shape)
    return counter, work


def test_every_family_is_under_test():
    assert {name for name, _ in KINDS.values()} == set(FAMILIES)


@every_kind
@every_size
def test_products_are_those_of_a_step(kind, size):
    """Exactly, but for two things that are no work of the maths. Attention makes its scores anew
    in its backward pass: 7 products where 6 are told. And what feeds itself computes all anchors of
    step 0 at every step, among them a few at the end of a reply that no longer count; so it is not
    exact, and more by little."""
    counter, told = run(kind, size)
    attention = sum(one.flops for one in told.products if isinstance(one, Attention))
    flops = sum(told.flops.values()) + attention / 6
    if KINDS[kind][0].startswith("eagle"):
        # A chunk of anchors looks at a rectangle of keys, of which a part is hidden.
        assert flops - attention * 7 / 6 <= counter.flops <= 1.2 * flops
    else:
        assert counter.flops == pytest.approx(flops, rel=1e-9)


@every_kind
@every_size
def test_passes_are_near(kind, size):
    """Factors, not exact: what passes elementwise, within a sixth."""
    counter, told = run(kind, size)
    passes = told.numbers + told.scored + told.streamed
    assert passes == pytest.approx(counter.numbers, rel=1 / 6)


@every_kind
@pytest.mark.parametrize("size", [*SIZES, *LARGE])
@pytest.mark.parametrize("laid", [False, True])
def test_memory_is_near(kind, size, laid):
    """Everything that a step makes and still needs, weights that are laid out for its length and
    oneDNN's copies among it: within an eighth at the worst moment."""
    shape, told, head, batch = case(kind, size)
    scale = torch.ones(len(head.weights(0)))
    head.zero_grad(set_to_none=True)
    with held(laid) as counter:
        head(batch, scale).total.backward()
        work = told.work(shape)
    head.zero_grad(set_to_none=True)
    peak = 4 * max(work.kept + work.moment + work.early + work.laid, trained(head))
    assert laid or not work.laid
    assert peak == pytest.approx(counter.peak, rel=1 / 8)


@pytest.mark.parametrize("kind", EVERY_HEAD)
def test_an_outline_has_the_parameters_of_the_head(tiny, kind):
    """Made without weights, it names the same tensors, of the same shapes, and what learns."""
    head = EVERY_HEAD[kind](tiny, 120)
    with torch.device("meta"):
        told = type(head)(head.config)

    def shapes(one):
        return {name: (value.shape, value.requires_grad) for name, value in one.named_parameters()}

    assert shapes(told) == shapes(head)


@every_kind
def test_a_config_comes_from_shapes_alone(tiny, kind):
    """What `create` gives a real target is what `configure` gives its outline, so that what is told
    of a head is told of the one that is trained."""
    name, options = KINDS[kind]
    made = family(name)
    options = made.Options(**options | ({"draft_vocab_size": 100} if name != "draft" else {}))
    real = made.create(options, tiny, torch.ones(tiny.vocab_size, dtype=torch.int64)).config
    told = made.configure(options, outline(tiny.name))
    loose = {"target": None, **({"model": None, "layer": None})}
    assert told.model_copy(update=loose) == real.model_copy(update=loose)


@given(
    st.lists(st.tuples(st.integers(4, 40), st.integers(0, 40)), min_size=1, max_size=4),
    st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_a_shape_counts_as_the_batch_does(lengths, step):
    """Anchors of a step, the keys they see and the predicting rows, counted one by one."""
    lengths = [(tokens, min(reply, tokens)) for tokens, reply in lengths]
    reply = torch.zeros(len(lengths), max(tokens for tokens, _ in lengths), dtype=torch.int64)
    for row, (tokens, supervised) in enumerate(lengths):
        reply[row, tokens - supervised : tokens] = 1
    live = batches.counted(reply, step)
    for shape in (Shape.of(lengths), Shape.of_reply(reply)):
        assert shape.tokens == reply.numel()
        assert shape.anchors(step) == live.sum()
        assert shape.seen(step) == sum(t + 1 + step for t in live.nonzero()[:, 1].tolist())
        assert shape.predicting == batches.predicting(reply).sum()
        assert shape.most_anchors == max(1, int(batches.counted(reply, 0).sum(1).max()))

"""Attention of training-time test in chunks, against the whole [R, T] of it at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spectrain.heads.ttt_attention import Anchors, ttt_attention


def slow_attention(query, keys, values, own_keys, own_values, chosen, starts, scale):
    """Anchor by anchor: the keys from the start of its document up to its place, then its own."""
    heads, groups = query.shape[1], keys.shape[2]
    out = []
    for number, (row, place) in enumerate(chosen.nonzero().tolist()):
        start = 0 if starts is None else int(starts[row, place])
        seen = [keys[row, start : place + 1], *(own[number][None] for own in own_keys)]
        said = [values[row, start : place + 1], *(own[number][None] for own in own_values)]
        key, value = (
            torch.cat(part).repeat_interleave(heads // groups, dim=1) for part in (seen, said)
        )
        weights = (torch.einsum("qd,nqd->qn", query[number], key) * scale).softmax(-1)
        out.append(torch.einsum("qn,nqd->qd", weights, value).flatten())
    return torch.stack(out) if out else query.flatten(1) * 0


def documents(cuts: list[list[int]], length: int) -> torch.Tensor:
    """Where the document of each place begins, [B, T]."""
    starts = torch.zeros(len(cuts), length, dtype=torch.int64)
    for row, begins in enumerate(cuts):
        for begin in sorted(begins):
            starts[row, begin:] = begin
    return starts


def tensors(chosen, groups, share, own, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    rows, (batch, length), size = int(chosen.sum()), chosen.shape, 2

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    query = draw(rows, groups * share, size)
    step0 = [draw(batch, length, groups, size) for _ in range(2)]
    return [query, *step0, *(draw(rows, groups, size) for _ in range(2 * own))]


@st.composite
def cases(draw):
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    places = st.lists(st.booleans(), min_size=length, max_size=length)
    chosen = torch.tensor(draw(st.lists(places, min_size=batch, max_size=batch)))
    starts = None
    if draw(st.booleans()):
        cuts = st.lists(st.integers(0, length - 1), max_size=3)
        starts = documents(draw(st.lists(cuts, min_size=batch, max_size=batch)), length)
    sizes = [draw(st.integers(*bounds)) for bounds in ((1, 2), (1, 3), (0, 3), (1, 5))]
    return chosen, starts, *sizes


@given(cases())
def test_values_and_gradients_are_those_of_the_slow_code(case):
    """No anchors, one, several documents in a row, shared keys, chunks that end anywhere. The order
    of sums is all that differs, so float64 leaves no room for a wrong key."""
    chosen, starts, groups, share, own, chunk = case
    inputs = [part.requires_grad_() for part in tensors(chosen, groups, share, own)]
    first, own_keys, own_values = inputs[:3], inputs[3 : 3 + own], inputs[3 + own :]
    slow = slow_attention(*first, own_keys, own_values, chosen, starts, 0.7)
    anchors = Anchors.of(chosen, starts)
    fast = ttt_attention(*first, own_keys, own_values, anchors, 0.7, chunk=chunk)
    torch.testing.assert_close(fast, slow)
    above = torch.randn(slow.shape, generator=torch.Generator().manual_seed(4)).double()
    wanted = torch.autograd.grad((slow * above).sum(), inputs, allow_unused=True)
    got = torch.autograd.grad((fast * above).sum(), inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other)


@pytest.mark.parametrize("own", [0, 2])
def test_gradients_equal_finite_differences(own):
    chosen = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 0]]).bool()
    anchors = Anchors.of(chosen, documents([[0, 2], [3]], 6))
    inputs = [part.requires_grad_() for part in tensors(chosen, 2, 2, own)]

    def attend(query, keys, values, *rest):
        return ttt_attention(query, keys, values, rest[:own], rest[own:], anchors, 0.7, chunk=2)

    assert torch.autograd.gradcheck(attend, inputs)


def test_parts_of_the_anchors_say_what_all_of_them_say():
    chosen = torch.rand(3, 20, generator=torch.Generator().manual_seed(1)) < 0.6
    starts = documents([[5, 11], [], [7]], 20)
    query, keys, values, key, value = tensors(chosen, 2, 2, 1)
    anchors = Anchors.of(chosen, starts)
    whole = ttt_attention(query, keys, values, [key], [value], anchors, 0.7)
    begin = 0
    for part in anchors.split(7):
        end = begin + len(part)
        own = [key[begin:end]], [value[begin:end]]
        out = ttt_attention(query[begin:end], keys, values, *own, part, 0.7)
        torch.testing.assert_close(out, whole[begin:end])
        begin = end
    assert begin == len(anchors) == int(chosen.sum())


def test_bfloat16_differs_by_its_rounding():
    """Sums are kept in float32: of 400 keys the error is a few units of the last place, not more
    with more keys."""
    chosen = torch.ones(1, 400, dtype=torch.bool)
    exact = tensors(chosen, 2, 2, 2)
    anchors = Anchors.of(chosen)
    low = [part.bfloat16() for part in exact]
    out = ttt_attention(*low[:3], low[3:5], low[5:], anchors, 0.7)
    assert out.dtype == torch.bfloat16
    slow = ttt_attention(*exact[:3], exact[3:5], exact[5:], anchors, 0.7)
    torch.testing.assert_close(out.double(), slow, atol=0.03, rtol=0.03)


def test_nothing_as_large_as_rows_by_keys_is_kept():
    """What autograd keeps of R anchors: inputs, output and one number for each query and head."""
    chosen = torch.ones(1, 256, dtype=torch.bool)
    inputs = [part.requires_grad_() for part in tensors(chosen, 2, 2, 1, torch.float32)]
    kept = {}

    def keep(value):
        kept[value.data_ptr()] = value.numel()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        ttt_attention(*inputs[:3], inputs[3:4], inputs[4:], Anchors.of(chosen), 0.7)
    own = sum(part.numel() for part in inputs) + inputs[0].numel() + inputs[0].numel() // 2
    assert sum(kept.values()) <= own < 256 * 256

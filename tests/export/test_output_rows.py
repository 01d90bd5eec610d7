"""Output rows that stand for other tokens than the map says, in heads near the target and far."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from head_kinds import create

from spectrain.core.target import Target
from spectrain.export import output_rows

D = 300


@pytest.fixture
def head(tiny: Target):
    """With the target's own rows, which training has moved a little."""
    head = create(tiny, "eagle3", random=False, draft_vocab_size=D)
    drift(head, 0.3)
    return head


@torch.no_grad()
def drift(head, far):
    """Add noise of `far` times the size of each row."""
    weight = head.lm_head.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    weight += far * F.normalize(noise, dim=-1) * weight.norm(dim=-1, keepdim=True)


@torch.no_grad()
def flip(head, start, stop):
    weight = head.lm_head.weight
    weight[start:stop] = weight[start:stop].flip(0).clone()


def found(head, target):
    (one,) = output_rows.findings(head, target)
    return one


def test_rows_in_place(head, tiny):
    one = found(head, tiny)
    assert one.verdict == "ok"
    assert "none of 300 that were looked at is of another token" in one.text
    assert list(output_rows.mends(head, tiny)) == []


def test_a_moved_part_is_found_and_put_back(head, tiny):
    before = head.lm_head.weight.clone()
    flip(head, 100, 150)
    one = found(head, tiny)
    assert one.verdict == "warn"
    assert "lm_head: 50 of 300 rows" in one.text
    ((_, _, mend),) = output_rows.mends(head, tiny)
    mend(head)
    assert torch.equal(head.lm_head.weight, before)


def test_all_moved(head, tiny):
    before = head.lm_head.weight.clone()
    flip(head, 0, D)
    one = found(head, tiny)
    assert one.verdict == "fail"
    assert "lm_head: 299 of 300 rows" in one.text  # that of the padding is zero, and like none
    ((_, _, mend),) = output_rows.mends(head, tiny)
    mend(head)
    there = before.any(-1)
    assert torch.equal(head.lm_head.weight[there], before[there])


@pytest.mark.parametrize("far", [1.0, 1.5])
def test_a_head_that_was_trained_long_is_not_moved(head, tiny, far):
    drift(head, far)
    one = found(head, tiny)
    assert one.verdict == "ok"
    assert "none of 300" in one.text


def test_rows_at_random_are_not_moved(head, tiny):
    with torch.no_grad():
        head.lm_head.weight.normal_(generator=torch.Generator().manual_seed(2))
    one = found(head, tiny)
    assert one.verdict == "ok"
    assert "not like the target's" in one.text
    assert list(output_rows.mends(head, tiny)) == []


def test_of_many_rows_a_sample_is_looked_at(head, tiny, monkeypatch):
    monkeypatch.setattr(output_rows, "_MOST", 0)
    monkeypatch.setattr(output_rows, "_SAMPLE", 40)
    assert "none of 40 that were looked at" in found(head, tiny).text
    flip(head, 0, D)
    assert "of 40 rows" in found(head, tiny).text


@torch.no_grad()
def test_the_nearest_is_that_of_all_cosines_at_once(head, tiny, monkeypatch):
    monkeypatch.setattr(output_rows, "_AT_ONCE", 37)
    weight, theirs = head.lm_head.weight, tiny.readout.weight
    own, other, place = output_rows._nearest(weight, head.draft_ids, theirs)
    cosines = F.cosine_similarity(weight[:, None], theirs[None], dim=-1)
    rows = torch.arange(D)
    torch.testing.assert_close(own, cosines[rows, head.draft_ids])
    cosines[rows, head.draft_ids] = -2
    torch.testing.assert_close(other, cosines.amax(-1))
    torch.testing.assert_close(cosines[rows, place], cosines.amax(-1))

"""A head that was never trained is told from one that was, whatever its family."""

from __future__ import annotations

import head_kinds
import pytest
import torch
from head_kinds import KINDS, create
from tiny_models import make_batch, random_rows

from spectrain.export.untouched import judged
from spectrain.heads.io import load_head, save_head

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def new(tiny, monkeypatch):
    """new(kind): a head as `create` leaves it."""
    monkeypatch.setattr(head_kinds, "wild", lambda head: head)
    return lambda kind: KINDS[kind](tiny, 120)


def train_one_step(head, target):
    """By plain gradient descent: a tensor moves if and only if its gradient is not zero. (Of one
    row of replies the last steps may count nothing.)"""
    generator = torch.Generator().manual_seed(9)
    for _ in range(4):
        batch = make_batch(target, head, *random_rows(generator))
        head.objective(batch).loss.sum().backward()
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.grad is not None:
                parameter -= 1e-2 * parameter.grad


@every_kind
def test_a_new_head_is_seen_and_one_step_is_enough(tiny, new, kind):
    head = new(kind)
    names = judged(head, tiny).untouched
    trainable = {name for name, one in head.named_parameters() if one.requires_grad}
    assert names
    assert set(names) <= trainable
    assert judged(head, tiny).never_trained
    train_one_step(head, tiny)
    assert judged(head, tiny).untouched == []
    assert not judged(head, tiny).never_trained


def test_every_tensor_that_is_copied_or_constant_is_judged(tiny, new):
    """Of an EAGLE-3 head from the target all but q/k/v, one half of which is random."""
    known = set(judged(new("eagle3"), tiny).untouched)
    random = {name for name, _ in new("eagle3").named_parameters()} - known
    assert random == {f"midlayer.self_attn.{p}_proj.weight" for p in "qkv"}


def test_a_head_trained_in_part_names_what_was_left_out(tiny, new):
    head = new("medusa")
    head.heads[0][-1].weight.data += 1e-3
    left = judged(head, tiny).untouched
    assert "heads.0.1.weight" not in left
    assert "heads.1.1.weight" in left
    assert not judged(head, tiny).never_trained


def test_frozen_tensors_are_not_judged(tiny):
    head = create(tiny, "eagle3", random=False, steps=2, draft_vocab_size=120, train_lm_head=False)
    assert "lm_head.weight" not in judged(head, tiny).untouched


def test_rounding_hides_nothing(tiny, new, tmp_path):
    """What was stored as bfloat16 is compared with a new head as it would be stored."""
    head = new("medusa").bfloat16()
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head").bind(tiny.readout)
    assert judged(again, tiny).never_trained


def test_the_random_state_is_left_alone(tiny, new):
    head, before = new("eagle1"), torch.get_rng_state()
    judged(head, tiny)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_head_of_other_sizes_is_not_judged(tiny, new):
    """It was made elsewhere: no new head here has its tensors."""
    head = new("eagle3")
    other = type(head)(head.config.model_copy(update={"intermediate_size": 32})).bind(tiny.readout)
    assert judged(other, tiny).untouched == []
    assert not judged(other, tiny).never_trained


def test_layers_that_came_with_their_target_are_not_judged(tiny, new):
    """They are of use as they came: that they equal what they were made from is no fault."""
    head = new("mtp-sequential")
    assert judged(head, tiny).never_trained
    head.config = head.config.model_copy(update={"native": "deepseek"})
    assert not judged(head, tiny).never_trained

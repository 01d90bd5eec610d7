"""Noise on the states that a head reads in training (EAGLE-1, EAGLE-3)."""

from __future__ import annotations

import pytest
import torch
from head_kinds import create
from packed_rows import pack
from tiny_models import make_batch, make_head, random_rows

from spectrain.core.batch import Batch, Features


def test_noise_in_training_alone(tiny):
    tokens, reply = random_rows(torch.Generator().manual_seed(2))
    head = create(tiny, "eagle1")
    batch = make_batch(tiny, head, tokens, reply)
    quiet = head.objective(batch).loss
    assert torch.equal(head.objective(batch).loss, quiet)
    head.train()
    torch.manual_seed(1)
    noisy = head.objective(batch).loss
    torch.manual_seed(1)
    assert torch.equal(head.objective(batch).loss, noisy)
    assert not torch.equal(noisy, quiet)
    # What is regressed stays true, and drafting has none even while the module is training.
    features = tiny.forward(tokens)
    drafts = []
    for mode in (True, False):
        state = head.train(mode).start(len(tokens), 64)
        drafts.append(head.begin(state, tokens, features[:, :-1], torch.tensor([5, 7])))
    assert torch.equal(*drafts)
    plain = create(tiny, "eagle1", noise=0.0).train()
    assert torch.equal(plain.objective(batch).loss, plain.eval().objective(batch).loss)


def test_noise_is_as_wide_as_published(tiny):
    """(rand − ½) · 0.2 · 512 / length, with the row's own length and not that of the padding."""
    head = create(tiny, "eagle1")
    last = torch.ones(2, 64, 48)
    reply = torch.zeros(2, 64, dtype=torch.int64)
    reply[0, 40:], reply[1, 9:16] = 1, 1
    batch = Batch(torch.randint(3, 99, (2, 64)), reply, None, last, reply - 1)
    noise = head.disturb(Features(last, None), batch).last - last
    assert not noise[1, 16:].any()
    for row, length in ((0, 64), (1, 16)):
        widest = 0.5 * 0.2 * 512 / length
        own = noise[row, :length]
        assert 0.99 * widest < own.abs().max() <= widest * (1 + 1e-4)
        assert own.mean().abs() < 0.05 * widest


def test_feature_noise_in_training_alone(tiny):
    """Uniform, in parts of each layer's own size at each position."""
    tokens, reply = random_rows(torch.Generator().manual_seed(2))
    head = make_head(tiny, feature_noise=0.5)
    batch = make_batch(tiny, head, tokens, reply)
    quiet = head.objective(batch).loss
    assert torch.equal(head.objective(batch).loss, quiet)
    torch.manual_seed(1)
    assert not torch.equal(head.train().objective(batch).loss, quiet)
    plain = make_head(tiny).train()
    assert torch.equal(plain.objective(batch).loss, quiet)

    aux = torch.ones(1, 50, 3 * 48)
    aux[..., 48:96] = -20.0
    reply = torch.ones(1, 50, dtype=torch.int64)
    row = Batch(reply, reply, aux, None, reply)
    noise = (head.disturb(Features(None, aux), row).aux - aux).unflatten(-1, (3, 48))
    for part, size in enumerate((1.0, 20.0, 1.0)):
        widest = 0.5 * size
        assert 0.99 * widest < noise[..., part, :].abs().max() <= widest * (1 + 1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [("eagle1", {"noise": 0.2}), ("eagle1", {"steps": 3}), ("eagle3", {"feature_noise": 0.3})],
)
def test_noise_does_not_depend_on_how_a_batch_is_cut(tiny, name, options):
    """In training, noise included: rows one by one, padded, in another order, side by side in one
    row give the same."""
    head = create(tiny, name, draft_vocab_size=120, **options).train()
    tokens, reply = random_rows(torch.Generator().manual_seed(5), rows=3)
    whole = make_batch(tiny, head, tokens, reply)
    names = ("tokens", "reply", "aux", "last", "argmax")

    def loss(rows, padding=0):
        torch.manual_seed(77)
        values = []
        for name in names:
            value = getattr(whole, name)
            if value is not None:
                value = value[rows]
                more = value.new_zeros(len(value), padding, *value.shape[2:])
                value = torch.cat([value, more], dim=1)
            values.append(value)
        return head.objective(Batch(*values)).loss.detach()

    expected = loss([0, 1, 2])
    torch.testing.assert_close(loss([2, 0, 1], padding=5), expected)
    torch.testing.assert_close(loss([0]) + loss([1]) + loss([2], padding=3), expected)
    own = [make_batch(tiny, head, tokens[i : i + 1], reply[i : i + 1]) for i in range(3)]
    for bins in ([own], [[own[2]], [own[1], own[0]]]):
        torch.manual_seed(77)
        torch.testing.assert_close(head.objective(pack(bins, extra=2)).loss.detach(), expected)
    torch.manual_seed(78)
    assert not torch.allclose(head.objective(whole).loss, expected)
    assert not torch.allclose(head.eval().objective(whole).loss, expected)

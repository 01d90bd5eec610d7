"""Our Muon is torch's, in the number type that suits the machine."""

from __future__ import annotations

import pytest
import torch

from spectrain.trainer import muon


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_are_those_of_torch(monkeypatch, shape, dtype):
    monkeypatch.setattr(muon, "working_type", lambda device: dtype)
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    mine = muon.Muon([ours], lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1)
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
    # The reference rounds to bfloat16 (3 digits) at every iteration; an update is about 0.02.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


def test_singular_values_come_near_to_one():
    torch.manual_seed(0)
    result = muon.orthogonal(torch.randn(30, 50), torch.float32)
    values = torch.linalg.svdvals(result)
    assert 0.5 < values.min() < values.max() < 1.3

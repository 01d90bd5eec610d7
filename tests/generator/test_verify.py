"""Chains: the leading run of drafts, and how often a drawn one is accepted."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spectrain.generator import verify
from spectrain.generator.drafters import ancestors_of
from spectrain.generator.sampling import pick


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_a_chain_is_accepted_up_to_the_first_difference(drafts, choices):
    """And says what a tree of width one says."""
    choice = torch.tensor([choices[: len(drafts) + 1]])
    tokens = torch.tensor([[9, *drafts]])
    expected = 0
    while expected < len(drafts) and drafts[expected] == choices[expected]:
        expected += 1
    assert verify.chain(choice, tokens).tolist() == [expected]
    parents = (torch.arange(len(drafts) + 1) - 1).clamp(min=0)[None]
    count, path = verify.tree(choice, tokens, parents, ancestors_of(parents, len(drafts)))
    assert count.tolist() == [expected]
    assert path[0, : expected + 1].tolist() == list(range(expected + 1))


def test_acceptance_rate_is_one_minus_total_variation():
    """β = Σ min(p, q): 200,000 draws, 5 standard errors (odds of a false alarm below 1e-6)."""
    generator = torch.Generator().manual_seed(3)
    p, q = (1.5 * torch.randn(2, 1, 5, generator=generator)).softmax(-1)
    draws = 200_000
    u = torch.rand(3, draws, dtype=torch.float64, generator=generator)
    drafts = pick(q.expand(draws, -1), u[0])
    children, widths = verify.children_of((0, 0))
    count, _, _ = verify.drawn_tree(
        p.expand(draws, 2, -1),
        q.expand(draws, 1, -1),
        torch.stack([torch.zeros_like(drafts), drafts], 1),
        children,
        widths,
        u[1][:, None, None],
        u[2][:, None].expand(-1, 2),
    )
    beta = torch.minimum(p, q).sum().item()
    error = (beta * (1 - beta) / draws) ** 0.5
    assert 0.2 < beta < 0.9
    assert abs(count.double().mean().item() - beta) < 5 * error

"""Engines with a fault, for tests of what must notice it."""

from __future__ import annotations

import torch

from spectrain.generator import static, verify
from spectrain.generator.drafters import Drafter
from spectrain.generator.sampling import pick


def accepts_one_too_many(monkeypatch):
    """The draft behind the accepted ones stays, whatever the target says."""
    chain, tree = verify.chain, verify.tree

    def wrong_chain(choice, tokens):
        return (chain(choice, tokens) + 1).clamp(max=tokens.shape[1] - 1)

    def wrong_tree(choice, tokens, parents, ancestors):
        count, path = tree(choice, tokens, parents, ancestors)
        return (count + 1).clamp(max=int(ancestors.sum(-1).max()) - 1), path

    monkeypatch.setattr(verify, "chain", wrong_chain)
    monkeypatch.setattr(verify, "tree", wrong_tree)


def keeps_the_draft_s_token(monkeypatch):
    """The rejected draft takes the place of the target's own token."""
    right = Drafter._accepted

    def wrong(self, block, count, own, path):
        if path is None:
            following = (count + 1).clamp(max=block.tokens.shape[1] - 1)
            own = torch.where(
                count + 1 < block.tokens.shape[1],
                block.tokens.gather(1, following[:, None]).squeeze(1),
                own,
            )
        return right(self, block, count, own, path)

    monkeypatch.setattr(Drafter, "_accepted", wrong)


def does_not_subtract_q(monkeypatch):
    """After a rejection the target draws from p, not from what is left of it."""
    right = verify.drawn_tree

    def wrong(p, q, tokens, children, widths, accept_u, own_u):
        count, path, _ = right(p, q, tokens, children, widths, accept_u, own_u)
        last = path.gather(1, count[:, None]).squeeze(1)
        own = pick(p[torch.arange(len(p)), last], own_u.gather(1, count[:, None]).squeeze(1))
        return count, path, own

    monkeypatch.setattr(verify, "drawn_tree", wrong)


def reuses_its_random_numbers(monkeypatch):
    """Drafts and their tests come from one stream of random numbers."""
    monkeypatch.setattr(static, "ACCEPT", static.DRAFT)

"""Verification rules for a chain of γ drafted tokens; pure functions, no model inside.

B batch, γ drafted tokens, V vocabulary. Both rules leave the target's output distribution as it is
(Leviathan et al. 2211.17192, Chen et al. 2302.01318).
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.generator.sampling import draw


def greedy(logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, γ+1, V] of the target, drafts [B, γ] → accepted [B], the next token [B].

    A draft is accepted while it is the target's argmax; the next token is the argmax after the
    last accepted one.
    """
    choice = logits.argmax(-1)
    accepted = _run(drafts == choice[:, :-1])
    return accepted, choice.gather(1, accepted[:, None]).squeeze(1)


def sampling(
    p: Tensor, q: Tensor, drafts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """p [B, γ+1, V], q [B, γ, V] probabilities, drafts [B, γ] drawn from q → accepted, next token.

    x is accepted with probability min(1, p(x)/q(x)); after the first rejection the next token is
    drawn from norm(max(0, p − q)), after γ acceptances from p.
    """
    picked = drafts[..., None]
    p_draft = p[:, :-1].gather(-1, picked).squeeze(-1)
    q_draft = q.gather(-1, picked).squeeze(-1)
    uniform = torch.rand(drafts.shape, generator=generator, device=p.device)
    accepted = _run(uniform * q_draft < p_draft)
    index = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    at = p.gather(1, index).squeeze(1)
    rest = torch.cat([q, torch.zeros_like(p[:, :1])], dim=1).gather(1, index).squeeze(1)
    residual = (at - rest).clamp(min=0)
    # p = q to the last bit: nothing is left over, and a rejection there has probability 0.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, at)
    return accepted, draw(residual, generator)


def _run(matches: Tensor) -> Tensor:
    """Length of the leading run of True: [B, γ] → [B]."""
    return matches.long().cumprod(1).sum(1)

"""How many target forwards a generator needs for a text that is already known.

n anchors of one reply (its tokens − 1), K draft steps, γ draft tokens per forward (1 … K).

Anchor i stands before the reply's token i+1 (tokens counted from 0; token 0 came with the prompt's
forward). A forward drafts γ tokens there, m of them are accepted (the run), and m+1 tokens are
committed: the next anchor is i+m+1. An accepted last token ends the reply and adds no token of its
own. So every walk commits exactly n tokens; only the number of forwards varies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Walk:
    """Expectations over the acceptance draws, given the text; row g is for γ = g+1.

    forwards [K] target forwards, the prompt's own excluded
    runs [K, K+1] forwards whose run was m = 0 … K (the last forward's run may be cut by the end)
    """

    forwards: Floats
    runs: Floats


def counted_steps(anchors: int, steps: int) -> NDArray[np.bool_]:
    """[n, K] True where the guessed token (i+1+k of the reply) still lies in the reply."""
    return np.arange(anchors)[:, None] + np.arange(steps)[None, :] < anchors


def run_chances(kept: Floats) -> Floats:
    """P(run = m) at each anchor: [n, K (γ − 1), K+1 (m)].

    kept [n, K]: the chance that the draft of step k is accepted, given that those before it were
    and that the text goes on as it does; 0 where the step is past the reply's end.
    """
    anchors, steps = kept.shape
    survive = np.concatenate([np.ones((anchors, 1)), np.cumprod(kept, axis=1)], axis=1)
    chances = np.zeros((anchors, steps, steps + 1))
    for draft in range(1, steps + 1):
        chances[:, draft - 1, :draft] = survive[:, :draft] - survive[:, 1 : draft + 1]
        chances[:, draft - 1, draft] = survive[:, draft]
    return chances


def walk(kept: Floats) -> Walk:
    """Exact expectations by dynamic programming over the anchors: no draws, no noise.

    visits[γ, i], the chance that the generator stands at anchor i, is carried forward. Where every
    `kept` is 0 or 1 (temperature 0) this is the one walk that happens.
    """
    anchors, steps = kept.shape
    chances = run_chances(kept)
    visits = np.zeros((steps, anchors + steps + 1))
    visits[:, 0] = 1.0
    for i in range(anchors):
        visits[:, i + 1 : i + steps + 2] += visits[:, i, None] * chances[i]
    visits = visits[:, :anchors]  # what lies beyond is the end
    return Walk(visits.sum(axis=1), np.einsum("gi,igm->gm", visits, chances))

"""From the acceptances of conversations to the numbers of the report, each with its interval.

C conversations, K draft steps, S resamples, γ draft tokens per target forward (1 … K).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spectrain.evaluation.alpha import Acceptance
from spectrain.evaluation.bootstrap import FEWEST, Floats, intervals, ratio
from spectrain.evaluation.walk import counted_steps, walk

DEFINITIONS = {
    "marginal": "Σ min(p, q), at temperature 0 equal argmaxes; mean over all anchors",
    "conditional": "the same, anchors weighted by P(positions before accepted | text)",
    "joint": "P(this position and all before it accepted), product of conditionals",
    "tau": "tokens per target forward, the target's own included; not counted: "
    "the prompt's forward with its token, anything after the end of the reply. "
    "Less than 1 + the sum of the joints: α is a mean over all positions, while a draft "
    "starts behind a rejection more often than elsewhere, where text is harder to guess",
    "rule": "greedy at temperature 0 (an anchor leaves once the text's token is not "
    "the target's argmax), else lossless sampling of a drawn chain",
    "rejections": "include every token that the draft vocabulary lacks",
    "interval": "95 %, bootstrap over conversations; none from fewer than "
    f"{FEWEST} that have the quantity",
}


@dataclass(frozen=True)
class Conversation:
    """A stored row at one temperature: its domain and its replies that have an anchor."""

    domain: str
    replies: list[Acceptance]


def summarise(conversations: Sequence[Conversation], steps: int, seed: int) -> dict[str, Any]:
    """All numbers over these conversations, as plain JSON values; None where undefined."""
    sums = _stack([_sums(conversation, steps) for conversation in conversations])
    marginal, conditional, joint, tau = (
        intervals(sums, statistic, seed) for statistic in (_marginal, _conditional, _joint, _tau)
    )
    total = {name: column.sum(0) for name, column in sums.items()}
    return {
        "conversations": len(conversations),
        "replies": sum(len(conversation.replies) for conversation in conversations),
        "tokens": int(total["tokens"][0]),
        "positions": [
            {
                "position": k + 1,
                "marginal": marginal[k],
                "conditional": conditional[k],
                "joint": joint[k],
                "anchors": int(total["anchors"][k]),
                "reached": float(total["reached"][k]),
            }
            for k in range(steps)
        ],
        "tau": [
            {
                "draft": g + 1,
                **tau[g],
                "forwards": float(total["forwards"][g]),
                "runs": total["runs"][g, : g + 2].tolist(),
            }
            for g in range(steps)
        ],
    }


def totals(conversations: Sequence[Conversation], steps: int) -> dict[str, Floats]:
    """What enters the ratios, summed over conversations (none: zeros): anchors, beta, reached,
    reached_beta [K]; tokens, forwards [K] over γ; runs [K, K+1]. Totals of parts may be added."""
    own = [_sums(Conversation("", []), steps), *(_sums(each, steps) for each in conversations)]
    return {name: column.sum(0) for name, column in _stack(own).items()}


def values(sums: dict[str, Floats]) -> dict[str, list[float | None]]:
    """Of `totals`, the values that `summarise` gives: marginal, conditional [K], tau [K] over γ."""
    found = {"marginal": _marginal(sums), "conditional": _conditional(sums), "tau": _tau(sums)}
    return {
        name: [None if np.isnan(value) else float(value) for value in column]
        for name, column in found.items()
    }


def differences(
    one: Sequence[Conversation], other: Sequence[Conversation], steps: int, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """Marginal acceptance by position and τ by length of draft, `one` less `other`, both measured
    on the same conversations in the same order: what is drawn for an interval are pairs."""
    pairs = zip(one, other, strict=True)
    both = [{"one": _sums(a, steps), "other": _sums(b, steps)} for a, b in pairs]
    sums = _stack([{f"{who} {n}": v for who in p for n, v in p[who].items()} for p in both])

    def less(top: str, bottom: str) -> list[dict[str, Any]]:
        def statistic(s: dict[str, Floats]) -> Floats:
            mine, theirs = (ratio(s[f"{w} {top}"], s[f"{w} {bottom}"]) for w in ("one", "other"))
            return mine - theirs

        return intervals(sums, statistic, seed)

    return {"marginal": less("beta", "anchors"), "tau": less("tokens", "forwards")}


def by_domain(
    conversations: Sequence[Conversation], steps: int, seed: int
) -> dict[str, dict[str, Any]]:
    """`summarise` for each domain, in alphabetical order."""
    domains = sorted({conversation.domain for conversation in conversations})
    return {
        domain: summarise([c for c in conversations if c.domain == domain], steps, seed)
        for domain in domains
    }


def _sums(conversation: Conversation, steps: int) -> dict[str, Floats]:
    """What enters the ratios, see `totals` (tokens are the same for each γ)."""
    sums = {
        name: np.zeros(steps)
        for name in ("anchors", "beta", "reached", "reached_beta", "tokens", "forwards")
    }
    sums["runs"] = np.zeros((steps, steps + 1))
    for reply in conversation.replies:
        count = len(reply.beta)
        inside = counted_steps(count, steps)
        before = np.cumprod(reply.kept, axis=1)[:, :-1]
        weight = np.concatenate([np.ones((count, 1)), before], axis=1) * inside
        path = walk(reply.kept)
        sums["anchors"] += inside.sum(0)
        sums["beta"] += reply.beta.sum(0)
        sums["reached"] += weight.sum(0)
        sums["reached_beta"] += (weight * reply.beta).sum(0)
        sums["tokens"] += count
        sums["forwards"] += path.forwards
        sums["runs"] += path.runs
    return sums


def _stack(rows: list[dict[str, Floats]]) -> dict[str, Floats]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _marginal(sums: dict[str, Floats]) -> Floats:
    return ratio(sums["beta"], sums["anchors"])


def _conditional(sums: dict[str, Floats]) -> Floats:
    return ratio(sums["reached_beta"], sums["reached"])


def _tau(sums: dict[str, Floats]) -> Floats:
    return ratio(sums["tokens"], sums["forwards"])


def _joint(sums: dict[str, Floats]) -> Floats:
    """Product of the conditionals [S, K]; once it is 0 it stays 0, though nothing is reached."""
    conditional = _conditional(sums)
    product = np.ones_like(conditional)
    for k in range(conditional.shape[1]):
        before = product[:, k - 1] if k else np.ones(len(conditional))
        lost = (before == 0) & (sums["anchors"][:, k] > 0)
        product[:, k] = np.where(lost, 0.0, before * conditional[:, k])
    return product

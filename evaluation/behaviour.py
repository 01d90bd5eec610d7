"""A head on a handful of replies that its target writes now: is anything of it accepted at all?

Greedy and teacher-forced, by the definitions of `eval-alpha`. C replies, T length, K draft steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectrain.core.batch import Batch, counted
from spectrain.core.target import Target
from spectrain.evaluation.alpha import acceptance
from spectrain.evaluation.bootstrap import Floats, intervals, ratio
from spectrain.evaluation.summary import Conversation, summarise
from spectrain.generator.decode import complete
from spectrain.heads.base import DraftHead

# A head knows nothing when it surely has less over a blind guess, on the same replies, than this
# share of what that one leaves.
NOTHING = 0.05
# A change is a likely cause when it lifts the first position by this much, and by this part of it,
# and surely (lower end of the interval of the difference, over the same replies, above 0).
# Small: of a target of 30 layers the auxiliary states of neighbours are much alike.
LIFT, PART = 0.03, 0.05
# Whoever is fed the answer may repeat it: that lifts a whole head too. Only one that learnt with it
# does nearly nothing else (this much is accepted with it), and guesses nothing without.
LEAKED = 0.9
_ROWS = 256  # rows whose logits are held at a time

DEFINITIONS = {
    "replies": "written now by the target, greedily, to prompts that the head may have learnt "
    "from: whether it works, not how well (for that: eval-alpha on held-out rows)",
    "blind": "acceptance of the one token that is most frequent among those asked for, always "
    "guessed: what a head that knows nothing may have",
    "nothing": "a head fails when the upper end of the interval of its acceptance less that of the "
    f"blind guess, reply by reply, is below {NOTHING:.0%} of (1 − blind); it passes when the lower "
    "end is above 0; else more replies are needed to tell (8 at least)",
    "likely cause": f"a change that lifts the first position that it concerns by {LIFT:g} and by "
    f"{PART:.0%} of it at least, the lower end of the interval of the difference above 0 (so of "
    "8 replies or more); where it feeds the answer: "
    f"{LEAKED:g} accepted at least, and no more than a blind guess without",
}


@dataclass(frozen=True)
class Seen:
    """One position of each reply, given that all before it were accepted.

    hits [C] accepted · asked [C] how often it was asked for · blind [C] what the one token that is
    most frequent among all asked for would have had · broken: anchors whose logits are not finite
    """

    hits: Floats
    asked: Floats
    blind: Floats
    broken: int = 0

    @property
    def value(self) -> float | None:
        return self._part(self.hits)

    @property
    def blind_value(self) -> float | None:
        return self._part(self.blind)

    def _part(self, hits: Floats) -> float | None:
        total = self.asked.sum()
        return float(hits.sum() / total) if total else None


def answered(target: Target, prompts: list[Tensor], longest: int) -> Batch:
    """Greedy replies of the target to prompts [n], without features."""
    done = complete(target, prompts, longest)
    rows = [torch.cat([p, torch.tensor(d.tokens)]) for p, d in zip(prompts, done, strict=True)]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    reply = torch.zeros_like(tokens)
    for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        tokens[place, : len(row)] = row
        reply[place, len(prompt) : len(row)] = 1
    return Batch(tokens, reply, None, None, torch.full_like(tokens, -1))


def measured(
    target: Target, head: DraftHead, batch: Batch, steps: int, seed: int
) -> dict[str, Any]:
    """`summary.summarise` of the replies."""
    (rows,) = acceptance(target, head, batch, steps, (0.0,))
    return summarise([Conversation("", replies) for replies in rows], steps, seed)


@torch.inference_mode()
def seen(head: DraftHead, batch: Batch, steps: int = 1) -> list[Seen]:
    """Positions 1 … steps: how often the head's first guess is the target's choice. What the target
    chose is read from `batch.argmax`: tokens and features may be changed without changing the
    question."""
    chosen, found = batch.argmax.flatten(), []
    reached = counted(batch.reply, 0)
    for step in head.unroll(batch, steps):
        asked = (reached & counted(batch.reply, step.step)).flatten()
        hits, blind = torch.zeros_like(asked), torch.zeros_like(asked)
        broken = 0
        for rows in asked[step.anchors].nonzero().flatten().split(_ROWS):
            anchors = step.anchors[rows]
            logits = head.logits(step.hidden[rows], step.step)
            broken += int((~logits.isfinite().all(-1)).sum())
            guess = head.to_target(logits.argmax(-1))
            hits[anchors] = guess == chosen[anchors + 1 + step.step]
        if asked.any():
            places = asked.nonzero().flatten()
            wanted = chosen[places + 1 + step.step]
            blind[places] = wanted == wanted.bincount().argmax()
        found.append(Seen(*(_by_reply(part, batch) for part in (hits, asked, blind)), broken))
        reached = hits.view_as(reached)
    return found


def _by_reply(places: Tensor, batch: Batch) -> Floats:
    """[C·T] → [C]"""
    return places.view_as(batch.reply).sum(1).cpu().double().numpy()


def over_blind(one: Seen, seed: int) -> dict[str, Any]:
    """{value, low, high} of acceptance less that of the blind guess, on the same anchors."""
    return _difference(one.hits, one.blind, one.asked, seed)


def knows(one: Seen, over: dict[str, Any]) -> bool | None:
    """Whether a head knows more than a blind guess; None where the replies do not tell."""
    if over["low"] is None:
        return None
    if over["high"] < NOTHING * (1 - one.blind_value):
        return False
    return True if over["low"] > 0 else None


def lift(plain: Seen, changed: Seen, seed: int) -> dict[str, Any]:
    """{value, low, high} of the difference at one position, over the same replies."""
    return _difference(changed.hits, plain.hits, plain.asked, seed)


def _difference(more: Floats, less: Floats, asked: Floats, seed: int) -> dict[str, Any]:
    def statistic(sums: dict[str, Floats]) -> Floats:
        return ratio(sums["more"] - sums["less"], sums["asked"])

    columns = {"more": more, "less": less, "asked": asked}
    (found,) = intervals({n: np.asarray(c)[:, None] for n, c in columns.items()}, statistic, seed)
    return found


def lifts(plain: Seen, difference: dict[str, Any]) -> bool:
    """Whether the difference makes a likely cause."""
    value, low = difference["value"], difference["low"]
    if value is None or value < max(LIFT, PART * plain.value):
        return False
    return low is not None and low > 0  # too few replies for an interval prove nothing


def leaked(plain: Seen, fed: Seen, seed: int) -> bool:
    """Whether a head was trained with the token that it has to guess; fed: position 1 with it."""
    if plain.value is None or fed.value is None:
        return False
    return fed.value >= LEAKED and knows(plain, over_blind(plain, seed)) is not True

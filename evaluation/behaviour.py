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

# A head knows nothing when even the upper end of the interval of its first position is below what
# the most frequent token alone has, plus this share of what that one leaves.
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
    "blind": "acceptance at position 1 of the one token that is most frequent among those asked "
    "for, always guessed: what a head that knows nothing may have",
    "nothing": "a head fails when the upper end of its interval at position 1 is below blind + "
    f"{NOTHING:.0%} of (1 − blind): it knows less than {NOTHING:.0%} of what a blind guess misses",
    "likely cause": f"a change that lifts position 1 by {LIFT:g} and by {PART:.0%} of it at least, "
    "the lower end of the interval of the difference above 0 (so of 8 replies or more); where it "
    f"feeds the answer: {LEAKED:g} accepted at least, and none but a blind guess without",
}


@dataclass(frozen=True)
class First:
    """Position 1 of each reply: hits [C], and how often it was asked for [C]."""

    hits: Floats
    asked: Floats

    @property
    def value(self) -> float | None:
        total = self.asked.sum()
        return float(self.hits.sum() / total) if total else None


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
def first(head: DraftHead, batch: Batch) -> First:
    """How often the head's first guess is the target's choice. What the target chose is read from
    `batch.argmax`: tokens and features may be changed without changing the question."""
    places = counted(batch.reply, 0)
    hits = torch.zeros(places.numel(), device=places.device)
    for step in head.unroll(batch, 1):
        wanted = batch.argmax.flatten()[step.anchors + 1]
        for rows in torch.arange(len(step.anchors), device=places.device).split(_ROWS):
            guess = head.to_target(head.logits(step.hidden[rows], 0).argmax(-1))
            hits[step.anchors[rows]] = (guess == wanted[rows]).float()
    summed = ((hits.view_as(places) * places).sum(1), places.sum(1))
    return First(*(part.cpu().double().numpy() for part in summed))


def blind(batch: Batch) -> float | None:
    """Acceptance at position 1 of the most frequent of the tokens asked for; None without any."""
    anchors = counted(batch.reply, 0).flatten().nonzero().flatten()
    if not len(anchors):
        return None
    wanted = batch.argmax.flatten()[anchors + 1]
    return int(torch.bincount(wanted).max()) / len(wanted)


def least(blind: float) -> float:
    """What the upper end at position 1 has to reach."""
    return blind + NOTHING * (1 - blind)


def lift(plain: First, changed: First, seed: int) -> dict[str, Any]:
    """{value, low, high} of the difference at position 1, over the same replies."""

    def statistic(sums: dict[str, Floats]) -> Floats:
        return ratio(sums["changed"] - sums["plain"], sums["asked"])

    columns = {"plain": plain.hits, "changed": changed.hits, "asked": plain.asked}
    (found,) = intervals({n: np.asarray(c)[:, None] for n, c in columns.items()}, statistic, seed)
    return found


def lifts(plain: First, difference: dict[str, Any]) -> bool:
    """Whether the difference makes a likely cause."""
    value, low = difference["value"], difference["low"]
    if value is None or value < max(LIFT, PART * plain.value):
        return False
    return low is not None and low > 0  # too few replies for an interval prove nothing


def leaked(plain: First, fed: First, blind: float) -> bool:
    """Whether a head was trained with the token that it has to guess; fed: position 1 with it."""
    if plain.value is None or fed.value is None:
        return False
    return fed.value >= LEAKED and plain.value < least(blind)

"""One random head of each kind, for the tests that every family has to pass.

To put a family under the common tests, add it to KINDS: name → function (target, draft_vocab) →
head. `wild` gives it weights large enough that every path matters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spectrain.heads.base import DraftHead
from spectrain.heads.registry import family

STEPS = 4


def create(target, name: str, *, seed: int = 0, random: bool = True, **options: Any) -> DraftHead:
    """A head of the family with these options, bound to `target`; `random`: wild weights."""
    torch.manual_seed(seed)
    counts = torch.randint(0, 50, (target.vocab_size,))
    kind = family(name)
    head = kind.create(kind.Options(**options), target, counts)
    return wild(head) if random else head.eval()


@torch.no_grad()
def wild(head: DraftHead) -> DraftHead:
    for parameter in head.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(std=0.15)
        else:
            parameter.uniform_(0.5, 1.5)
    return head.eval()


KINDS: dict[str, Callable[[Any, int], DraftHead]] = {
    "eagle3": lambda target, d: create(target, "eagle3", steps=STEPS, draft_vocab_size=d),
    "medusa": lambda target, d: create(target, "medusa", steps=STEPS, draft_vocab_size=d),
    "medusa-two-layers": lambda target, d: create(
        target, "medusa", steps=STEPS, layers=2, draft_vocab_size=d
    ),
    "medusa-soft": lambda target, d: create(
        target, "medusa", steps=STEPS, loss="soft", draft_vocab_size=d
    ),
}

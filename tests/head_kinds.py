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
    "eagle1": lambda target, d: create(target, "eagle1", draft_vocab_size=d, fc_bias=True),
    "eagle1-steps": lambda target, d: create(target, "eagle1", steps=3, draft_vocab_size=d),
    "eagle2": lambda target, d: create(target, "eagle2", draft_vocab_size=d),
    "eagle3": lambda target, d: create(target, "eagle3", steps=STEPS, draft_vocab_size=d),
    "eagle3-two-layers": lambda target, d: create(
        target, "eagle3", steps=STEPS, draft_vocab_size=d, layers=2, aux_layers=(1, 3)
    ),
    "eagle3-own-embeddings": lambda target, d: create(
        target, "eagle3", steps=2, draft_vocab_size=d, embeddings="own", loss="lk_lambda"
    ),
    "mtp-parallel": lambda target, d: create(
        target, "mtp-parallel", steps=STEPS, draft_vocab_size=d
    ),
    "mtp-sequential": lambda target, d: create(
        target, "mtp-sequential", steps=STEPS, draft_vocab_size=d
    ),
    "mtp-sequential-shared": lambda target, d: create(
        target, "mtp-sequential", steps=3, draft_vocab_size=d, shared=True, loss="soft"
    ),
    "draft": lambda target, d: create(target, "draft", steps=STEPS),
    "draft tv": lambda target, d: create(
        target, "draft", layers=3, loss="tv", train_embeddings=True
    ),
    "medusa": lambda target, d: create(target, "medusa", steps=STEPS, draft_vocab_size=d),
    "medusa-two-layers": lambda target, d: create(
        target, "medusa", steps=STEPS, layers=2, draft_vocab_size=d
    ),
    "medusa-soft": lambda target, d: create(
        target, "medusa", steps=STEPS, loss="soft", draft_vocab_size=d
    ),
}

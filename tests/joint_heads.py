"""A head with a target that is trained along, and rows to train them on."""

from __future__ import annotations

import torch
from head_kinds import create
from tiny_models import make_batch, random_rows

from spectrain.core.batch import Batch
from spectrain.core.target import Target
from spectrain.trainer.settings import TrunkSettings
from spectrain.trainer.trunk import JointHead, from_scratch


def joint(path, *, seed=0, kind="medusa", options=None, **trunk):
    """A joint head of the target in `path`, everything trainable moved off its start."""
    target = Target.load(str(path), pack_weights=False)
    if trunk.get("mode") == "scratch":
        target = from_scratch(target)
    head = create(target, kind, **(options or {"steps": 2}))
    made = JointHead(head, target, TrunkSettings(**trunk))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in made.named_parameters():
            if name.startswith("trunk.") and value.requires_grad:
                value += 0.05 * torch.randn(value.shape, generator=generator)
    return made


def stored(tiny, seed=8) -> Batch:
    """Rows with what the original target says of them."""
    tokens, reply = random_rows(torch.Generator().manual_seed(seed))
    return make_batch(tiny, create(tiny, "medusa", steps=1), tokens, reply)

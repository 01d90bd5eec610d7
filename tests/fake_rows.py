"""Rows and states of a feature store without a model."""

from __future__ import annotations

import torch

from spectrain.core.batch import predicting
from spectrain.data.shard import Row, States

SETTINGS = {
    "dtype": "float32",
    "max_length": 64,
    "target": {"fingerprint": "feedbeefcafe0123", "dtype": "torch.float32"},
}


def random_row(seed: int, length: int, split: str = "train", hidden: int = 4) -> tuple[Row, States]:
    """A row whose second half is a reply, and random states of it (A = 3·hidden)."""
    random = torch.Generator().manual_seed(seed)
    reply = torch.zeros(length, dtype=torch.int16)
    reply[length // 2 :] = 1
    tokens = torch.randint(1, 50, (length,), dtype=torch.int32, generator=random)
    row = Row(id=f"{seed:016x}", split=split, tokens=tokens, reply=reply, domain="chat")
    count = int(predicting(reply).sum())
    states = States(
        aux=torch.randn(length, 3 * hidden, generator=random),
        last=torch.randn(count, hidden, generator=random),
        argmax=torch.randint(0, 50, (count,), dtype=torch.int32, generator=random),
        logprob=-torch.rand(count, generator=random),
        lognorm=torch.randn(count, generator=random),
    )
    return row, states

"""Did training do what it should: every trainable tensor changed, and no other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from spectrain.core.errors import RunFailed
from spectrain.heads.base import DraftHead
from spectrain.trainer.sharding import whole


def digests(head: DraftHead) -> dict[str, str]:
    """A checksum for every tensor of the head, its vocabulary map included; by all processes."""
    return {
        name: hashlib.sha256(
            whole(value.detach()).cpu().contiguous().flatten().view(torch.uint8).numpy()
        ).hexdigest()
        for name, value in head.state_dict().items()
    }


def require_changes(
    head: DraftHead, before: dict[str, str], where: str, unreached: Iterable[str] = ()
) -> None:
    """Compare with the digests of the head before its first step.

    unreached: trainable tensors that no gradient reached, as the training loop counted them.
    Raises RunFailed that names these, trainable tensors which stayed as they were, and frozen ones
    which did not.
    """
    trainable = {name for name, value in head.named_parameters() if value.requires_grad}
    now = digests(head)
    same = {name for name in trainable if now[name] == before[name]}
    still = sorted(same | set(unreached))
    moved = sorted(name for name in now.keys() - trainable if now[name] != before[name])
    problems = [f"not trained: {', '.join(still)}"] if still else []
    problems += [f"frozen but changed: {', '.join(moved)}"] if moved else []
    if problems:
        raise RunFailed(
            "; ".join(problems),
            where=where,
            fix="the head was not written; train longer or look for an unused part",
        )

"""Whether a head was ever trained: its weights beside those of a head that is newly made.

What a new head has at random differs from one new head to the next and cannot be told from what was
learnt; two of them with different seeds show which tensors those are. The others, copies of the
target, ones and zeros, are judged. Frozen tensors are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads.base import DraftHead

_SEEDS = (1, 2)
_STORED = (torch.float32, torch.bfloat16, torch.float16)


def untouched(head: DraftHead, target: Target) -> list[str]:
    """Names of trainable tensors that are those of a new head for `target` (its weights not
    packed), of the way to start that most are like; none where no new head can be made."""
    return max((same for same, _ in _beside_new_ones(head, target)), key=len, default=[])


def never_trained(head: DraftHead, target: Target) -> bool:
    """Whether all that can be judged is as in a new head."""
    return any(same and not other for same, other in _beside_new_ones(head, target))


def _beside_new_ones(head: DraftHead, target: Target) -> Iterator[tuple[list[str], list[str]]]:
    """For each way to start: judged tensors that equal those of a new head, and that do not."""
    own = {name: one.detach() for name, one in head.named_parameters() if one.requires_grad}
    for options in _starts(head, target):
        first: dict[str, str | None] = {}  # None: equal; else its digest, so that it can go
        for name, new in _new(head, target, options, _SEEDS[0]).items():
            if name in own:
                first[name] = None if _equal(own[name], new) else _digest(new)
        same, other = [], []
        for name, new in _new(head, target, options, _SEEDS[1]).items():
            if name not in own:
                continue
            if first[name] is None:
                if _equal(own[name], new):
                    same.append(name)
            elif first[name] == _digest(new):
                other.append(name)
        yield same, other


def _starts(head: DraftHead, target: Target) -> Iterator[BaseModel]:
    """Options that make a head of the same tensors."""
    shapes = {name: one.shape for name, one in head.named_parameters()}
    try:
        for options in head.starts():
            new = type(head).outline(options, target)
            if {name: one.shape for name, one in new.named_parameters()} == shapes:
                yield options
    except (SpectrainError, ValidationError):
        return  # such a head is not made here, it was read from elsewhere


def _new(head: DraftHead, target: Target, options: BaseModel, seed: int) -> dict[str, Tensor]:
    """The parameters of a new head that guesses the same tokens."""
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    counts[head.draft_ids.cpu()] = 1
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        new = type(head).create(options, target, counts)
    return {name: one.detach() for name, one in new.named_parameters()}


def _equal(own: Tensor, new: Tensor) -> bool:
    """Also where one's own was rounded when it was stored."""
    own = own.to(new.device).float()
    return any(torch.equal(own, new.to(dtype).float()) for dtype in _STORED)


def _digest(value: Tensor) -> str:
    numbers = value.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(numbers).hexdigest()

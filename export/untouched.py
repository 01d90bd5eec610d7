"""Whether a head was ever trained: its weights beside those of a head that is newly made.

What a new head has at random differs from one new head to the next and cannot be told from what was
learnt; two of them with different seeds show which tensors those are. The others, copies of the
target, ones and zeros, are judged. Frozen tensors are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads.base import DraftHead

_SEEDS = (1, 2)
_STORED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Judged:
    """What of a head is as in a new one.

    untouched: names of trainable tensors that are, of the way to start that most are like
    never_trained: whether all that can be judged is
    """

    untouched: list[str]
    never_trained: bool


def judged(head: DraftHead, target: Target) -> Judged:
    """`head` beside new ones for `target`, whose weights are not packed; nothing is found where no
    new head can be made. New heads ask the target: one that lies on the disk is read for each."""
    found = list(_beside_new_ones(head, target))
    return Judged(
        untouched=max((same for same, _ in found), key=len, default=[]),
        never_trained=any(same and not other for same, other in found),
    )


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

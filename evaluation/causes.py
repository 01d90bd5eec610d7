"""Common mistakes, undone one at a time: what a head is fed, changed; does it guess then?

Nothing here knows a layout or a family: the inputs of the training face are changed, the question
(`Batch.reply`, `Batch.argmax`) stays.

B batch, T length, H hidden, A auxiliary layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor

from spectrain.core.batch import Batch
from spectrain.core.target import Target
from spectrain.data.online import read
from spectrain.heads.base import DraftHead

_ALL_ORDERS = 3  # up to so many auxiliary states every order is tried


@dataclass(frozen=True)
class Cause:
    """name: what is wrong, as readers of layouts call it too · fix: how that is mended for good
    batch: the changed inputs
    layers: those that the head should read, where that mends it · training: whether nothing but
    training does · leak: whether the head is fed what it is asked for
    """

    name: str
    fix: str
    batch: Batch
    layers: tuple[int, ...] = ()
    training: bool = False
    leak: bool = False


def causes(
    target: Target, head: DraftHead, batch: Batch, called: Callable[[str], str] = str
) -> Iterator[Cause]:
    """Changes of the inputs that make a difference to this kind of head. called: names of the
    head's tensors → of the file it came from."""
    if head.needs.aux_layers:
        yield from _layers(target, head.needs.aux_layers, batch)
        yield from _orders(len(head.needs.aux_layers), batch, called("fc.weight"))
    else:
        yield from _last(target, batch)
    yield from _tokens(batch)


def _layers(target: Target, layers: tuple[int, ...], batch: Batch) -> Iterator[Cause]:
    shifted = {
        "the layers read are one too high": tuple(layer - 1 for layer in layers),
        "the layers read are one too low": tuple(layer + 1 for layer in layers),
    }
    if target.num_layers > 2:
        shifted["the layers read are not the usual ones"] = target.default_aux_layers()
    why = {
        "the layers read are one too high": ": the config counts layer inputs, or from 1",
        "the layers read are one too low": ": the config was taken for one of layer inputs",
    }
    for name, chosen in shifted.items():
        inside = all(0 <= layer < target.num_layers for layer in chosen)
        if inside and len(chosen) == len(layers) and chosen != layers:
            told = ", ".join(map(str, chosen))
            fix = f"the head reads the outputs of layers {told}, from 0{why.get(name, '')}"
            yield Cause(name, fix, replace(batch, aux=read(target, batch, chosen).aux), chosen)


def _orders(count: int, batch: Batch, joined: str) -> Iterator[Cause]:
    """joined: the weight that reads them side by side"""
    usual = tuple(range(count))
    orders = permutations(usual) if count <= _ALL_ORDERS else [usual[::-1]]
    parts = batch.aux.unflatten(-1, (count, -1))
    for order in orders:
        if order != usual:
            told = f"in the order {', '.join(str(place + 1) for place in order)}"
            if order == usual[::-1]:
                told = "from high to low"
            back = ", ".join(str(order.index(place) + 1) for place in usual)
            yield Cause(
                f"fc reads the states {told}",
                f"put the {count} column blocks of {joined} into the order {back}",
                replace(batch, aux=parts[:, :, list(order)].flatten(-2)),
            )


@torch.no_grad()
def _last(target: Target, batch: Batch) -> Iterator[Cause]:
    norm = getattr(target.decoder, "norm", None)
    if norm is None:
        return
    fix = "train the head on the state after the target's final norm, normed once"
    yield Cause(
        "trained on the last state without the final norm",
        fix,
        replace(batch, last=_unnormed(target, norm, batch)),
        training=True,
    )
    twice = replace(batch, last=norm(batch.last))
    yield Cause("trained on the last state normed twice", fix, twice, training=True)


def _unnormed(target: Target, norm: torch.nn.Module, batch: Batch) -> Tensor:
    seen: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        target.forward(batch.tokens)
    finally:
        hook.remove()
    return seen[-1]


def _tokens(batch: Batch) -> Iterator[Cause]:
    """What is asked for stays in place, so that rolled rows shift what is fed beside each state."""
    yield Cause(
        "trained with x[t] in the place of x[t+1]",
        "train the head with the token behind each state, not the state's own",
        replace(batch, tokens=batch.tokens.roll(1, dims=1)),
        training=True,
    )
    yield Cause(
        "trained with x[t+2] in the place of x[t+1]",
        "that is the token that it has to guess; train it with the one before",
        replace(batch, tokens=batch.tokens.roll(-1, dims=1)),
        training=True,
        leak=True,
    )

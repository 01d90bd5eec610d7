"""What a training will take, told before it runs: memory and time from the work of its steps.

The work comes from shapes alone (heads/work.py). How fast this machine is at products, attention
and elementwise passes of these shapes is measured on the spot, in a second or two (speeds.py).

M micro-batches of one process in a step. Memory in bytes, time in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spectrain.core.environment import free_memory
from spectrain.core.target import Target
from spectrain.heads.base import DraftHead
from spectrain.heads.work import Product, Shape, Work, decoder, trained
from spectrain.trainer import optim, order
from spectrain.trainer.muon import STEPS as MUON_STEPS
from spectrain.trainer.settings import TrainerSettings
from spectrain.trainer.trunk import JointHead

_SAMPLE = 16  # steps whose batches are looked at, evenly over an epoch
# Numbers that an update reads and writes for each that learns: the norm of the gradient, clipping,
# and adamw's own pass over weight, gradient and two moments.
_UPDATE = 10
_CLEARLY = 1.1  # the estimate may be wrong by so much
_ADD = 3  # a gradient onto what other micro-batches left
# Bytes of a number that a step keeps: under bf16 what products read is short, other things are not.
_KEPT = {"no": 4, "bf16": 3}


@dataclass(frozen=True)
class Step:
    """One optimiser step of one process: the shapes of its micro-batches, and the (tokens, reply
    tokens) of their conversations."""

    shapes: tuple[Shape, ...]
    lengths: tuple[tuple[int, int], ...]


def steps_of(
    lengths: Sequence[tuple[int, int]], settings: TrainerSettings, world: int, device: str
) -> list[Step]:
    """Some steps of a run over conversations of (tokens, reply tokens), as the loop would cut them;
    the last one is the largest that the order can give."""
    tokens = [length for length, _ in lengths]
    size = min(settings.batch_size, len(lengths))
    rows = order.Order(tokens, size, settings.seed)
    count = max(1, len(lengths) // size)
    chosen = [rows.batch(step * count // _SAMPLE) for step in range(min(_SAMPLE, count))]
    longest = sorted(range(len(tokens)), key=lambda row: (tokens[row], row))[-size:]
    steps = []
    for batch in [*chosen, longest]:
        parts = _cut(batch, tokens, settings, world)
        own = tuple(lengths[one] for part in parts for row in part for one in row)
        steps.append(Step(tuple(_shape(part, lengths, device) for part in parts), own))
    return steps


def _cut(
    batch: list[int], tokens: list[int], settings: TrainerSettings, world: int
) -> list[list[list[int]]]:
    usable = batch[: len(batch) - len(batch) % world] or batch
    cut = {"micro_batch": settings.micro_batch, "pack": settings.pack_length}
    return order.share(usable, tokens, 0, world if len(usable) >= world else 1, **cut)


def _shape(part: list[list[int]], lengths: Sequence[tuple[int, int]], device: str) -> Shape:
    """A micro-batch: rows of conversations, each a prompt and one reply."""
    replies = [(n - reply, n) for row in part for n, reply in (lengths[one] for one in row)]
    longest = max(sum(lengths[one][0] for one in row) for row in part)
    return Shape(len(part), longest, tuple(replies), device=device)


# ── work ─────────────────────────────────────────────────────────────────────


def work_of(
    head: DraftHead | JointHead, shape: Shape, asked: Target | None = None, resting: bool = False
) -> Work:
    """One micro-batch, the features of which `asked` computes (online), if anybody."""
    rests = resting and isinstance(head, JointHead)
    work = head.resting_work(shape) if rests else head.work(shape)
    if asked is not None:
        rows, size = shape.predicting, asked.vocab_size
        work += decoder(asked.decoder, shape, "target").forward_alone(packed=True) + Work(
            (Product("target", rows, asked.hidden_size, size, 1),), scored=rows * size
        )
    return work


def update_work(head: nn.Module, settings: TrainerSettings, batches: int) -> Work:
    """Gradients added up over `batches` micro-batches, clipped and used."""
    count = trained(head)
    products: list[Product] = []
    for value in _of_muon(head, settings):
        low, high = sorted(value.shape)
        products.append(Product("muon", low, high, low, 2 * MUON_STEPS))
        products.append(Product("muon", low, low, low, MUON_STEPS))
    passes = _UPDATE + _ADD * (batches - 1) + (_ADD if settings.ema is not None else 0)
    return Work(tuple(products), streamed=count * passes)


def _of_muon(head: nn.Module, settings: TrainerSettings) -> list[Tensor]:
    """The trained tensors that Muon has."""
    if settings.optimizer != "muon":
        return []
    mapped = optim.maps(head, optim.head_tables(head))
    return [value for value in head.parameters() if value.requires_grad and mapped(value)]


def step_work(
    head: DraftHead | JointHead,
    step: Step,
    settings: TrainerSettings,
    asked: Target | None = None,
    resting: bool = False,
) -> Work:
    """All micro-batches and the update. resting: as long as the trunk does not learn yet."""
    learns = head.head if resting and isinstance(head, JointHead) else head
    total = update_work(learns, settings, len(step.shapes))
    for shape in step.shapes:
        total += work_of(head, shape, asked, resting)
    return total


# ── memory ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Memory:
    """Bytes on the training device at the worst moment of a step, by what holds them.

    shared: the target's embedding and output layer, and a target that is asked online; optimizer:
    its memory and the running mean
    batch: one micro-batch's features; step: what its forward holds for its backward
    """

    parameters: int
    shared: int
    gradients: int
    optimizer: int
    batch: int
    step: int

    @property
    def peak(self) -> int:
        """Gradients are there when what a step keeps is gone, or the other way round, but for those
        made early (`Work.early`), which `step` holds."""
        return self.parameters + self.shared + self.beyond

    @property
    def beyond(self) -> int:
        """What a step holds beside the parameters and what is shared."""
        return self.optimizer + self.batch + max(self.step, self.gradients)


def memory_of(
    head: DraftHead | JointHead,
    steps: Iterable[Step],
    settings: TrainerSettings,
    asked: Target | None = None,
) -> Memory:
    """The largest of these steps. settings.mixed_precision: no or bf16; asked: it computes the
    features."""
    kept, joint = _KEPT[settings.mixed_precision], isinstance(head, JointHead)
    readout, count = (head.head if joint else head).readout, trained(head)
    width = (len(head.needs.aux_layers) + 1) * head.config.target.hidden_size
    batch = step = 0
    for one in steps:
        for shape in one.shapes:
            work = work_of(head, shape)
            held = (work.kept + work.moment) * kept + work.early * 4
            held += work.laid * 4 if settings.mixed_precision == "no" else 0
            step = max(step, int(held))
            batch = max(batch, shape.tokens * width * 4)
    own = bytes_of(head.parameters())
    shared = 0 if joint else bytes_of([readout.embedding.weight, readout.weight])
    if joint and head.loss == "distil" and head.settings.mode == "full":
        shared = bytes_of([readout.weight])  # the original output layer, to stay close to
    if asked is not None:
        shared += bytes_of(asked.model.parameters())
    if settings.mixed_precision == "bf16":
        step += own // 2  # parameters cast for products
    # Two moments, of muon one; and the running mean.
    states = 2 * count - sum(value.numel() for value in _of_muon(head, settings))
    states += count if settings.ema is not None else 0
    return Memory(own, shared, 4 * count, 4 * states, batch, step)


def parameters_of(head: nn.Module) -> list[dict[str, int | str]]:
    """By part: rows of name, all, trained; a tensor that two parts share counts once."""
    found: dict[str, list[int]] = {}
    for name, value in head.named_parameters():
        part = name.split(".")[0]
        row = found.setdefault(part, [0, 0])
        row[0] += value.numel()
        row[1] += value.numel() * value.requires_grad
    return [{"part": k, "parameters": a, "trained": t} for k, (a, t) in found.items()]


def bytes_of(values: Iterable[Tensor]) -> int:
    """Of tensors, each once."""
    return sum({id(v): v.numel() * v.element_size() for v in values}.values())


def shortage(
    head: DraftHead | JointHead,
    lengths: Sequence[tuple[int, int]],
    settings: TrainerSettings,
    world: int,
    device: torch.device,
) -> str | None:
    """One line if a step will clearly need more memory than is free now; the head is loaded."""
    steps = steps_of(lengths, settings, world, device.type)
    need, free = memory_of(head, steps, settings).beyond, free_memory(device)
    if need <= _CLEARLY * free:
        return None
    return (
        f"note: a step will need about {need / 1e9:.1f} GB beside the weights, "
        f"{free / 1e9:.1f} GB are free; `spectrain estimate` with the same settings says what "
        "would fit"
    )

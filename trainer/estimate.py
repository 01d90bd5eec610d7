"""What a training will take, told before it runs: memory and time from the work of its steps.

The work comes from shapes alone (heads/work.py). How fast this machine is at products, attention
and elementwise passes of these shapes is measured on the spot, in a second or two (`speeds.py`).

M micro-batches of one process in a step. Memory in bytes, time in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from spectrain.core.target import Target
from spectrain.heads.base import DraftHead
from spectrain.heads.work import Product, Shape, Work, decoder, trained
from spectrain.trainer import order
from spectrain.trainer.muon import STEPS as MUON_STEPS
from spectrain.trainer.settings import TrainerSettings
from spectrain.trainer.trunk import JointHead

_SAMPLE = 16  # steps whose batches are looked at, evenly over an epoch
# Numbers that an update reads and writes for each that learns: the norm of the gradient, clipping,
# and adamw's own pass over weight, gradient and two moments.
_UPDATE = 10
_ADD = 3  # a gradient onto what other micro-batches left
# Bytes of a number that a step keeps: under bf16 what products read is short, other things are not.
_KEPT = {"no": 4, "bf16": 3}


@dataclass(frozen=True)
class Step:
    """One optimiser step of one process: the shapes of its micro-batches."""

    shapes: tuple[Shape, ...]

    @property
    def tokens(self) -> int:
        return sum(shape.tokens for shape in self.shapes)


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
    return [
        Step(tuple(_shape(part, lengths, device) for part in _cut(batch, tokens, settings, world)))
        for batch in [*chosen, longest]
    ]


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


def work_of(head: DraftHead | JointHead, shape: Shape, asked: Target | None) -> Work:
    """One micro-batch, the features of which `asked` computes (online), if anybody."""
    work = head.work(shape)
    if asked is not None:
        rows, size = shape.predicting, asked.vocab_size
        work += decoder(asked.decoder, shape, "target").forward_alone() + Work(
            (Product("target", rows, asked.hidden_size, size, 1),), numbers=rows * size
        )
    return work


def update_work(head: nn.Module, settings: TrainerSettings, batches: int) -> Work:
    """Gradients added up over `batches` micro-batches, clipped and used."""
    count = trained(head)
    products: list[Product] = []
    if settings.optimizer == "muon":
        for value in head.parameters():
            if value.requires_grad and value.ndim == 2:
                low, high = sorted(value.shape)
                products.append(Product("muon", low, high, low, 2 * MUON_STEPS))
                products.append(Product("muon", low, low, low, MUON_STEPS))
    return Work(tuple(products), numbers=count * (_UPDATE + _ADD * (batches - 1)))


def step_work(
    head: DraftHead | JointHead, step: Step, settings: TrainerSettings, asked: Target | None = None
) -> Work:
    """All micro-batches and the update; a trunk's rest at first is counted by its share."""
    total = update_work(head, settings, len(step.shapes))
    for shape in step.shapes:
        total += work_of(head, shape, asked)
    return total


# ── memory ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Memory:
    """Bytes on the training device at the worst moment of a step, by what holds them; `target`: of
    a target that is loaded, whole, before anything else."""

    parameters: int
    shared: int
    gradients: int
    optimizer: int
    batch: int
    step: int
    target: int = 0

    @property
    def peak(self) -> int:
        """Gradients are there when what a step keeps is gone, or the other way round, but for those
        made early (`Work.early`), which `step` holds."""
        fixed = self.parameters + self.shared + self.optimizer + self.batch
        return max(fixed + max(self.step, self.gradients), self.target)

    @property
    def beyond(self) -> int:
        """What a step holds beside the parameters and what is shared."""
        return self.peak - self.parameters - self.shared


def memory_of(
    head: DraftHead | JointHead,
    target: Target,
    steps: Iterable[Step],
    settings: TrainerSettings,
    asked: Target | None = None,
) -> Memory:
    """The largest of these steps. target: its readout is shared; asked: it computes features."""
    kept, size = _KEPT[settings.mixed_precision], 0 if asked is None else _bytes(asked.model)
    needs, count = head.needs, trained(head)
    width = len(needs.aux_layers) * target.hidden_size + target.hidden_size
    batch = step = 0
    for one in steps:
        for shape in one.shapes:
            work = work_of(head, shape, None)
            held = (work.kept + work.moment) * kept + work.early * 4
            step = max(step, int(held))
            batch = max(batch, shape.tokens * width * 4)
    joint = isinstance(head, JointHead)
    readout = [target.readout.embedding.weight, target.readout.weight]
    own = _bytes(head)
    shared = 0 if joint else _unique(readout)
    if joint and head.loss == "distil" and head.settings.mode == "full":
        shared = _unique(readout[1:])  # the original output layer, to stay close to
    if settings.mixed_precision == "bf16":
        step += own // 2  # parameters cast for products
    states = 1 if settings.optimizer == "muon" else 2
    return Memory(own, shared + size, 4 * count, 4 * count * states, batch, step, 0)


def parameters_of(head: nn.Module) -> list[dict[str, int | str]]:
    """By part: rows of name, all, trained; a tensor that two parts share counts once."""
    found: dict[str, list[int]] = {}
    for name, value in head.named_parameters():
        part = name.split(".")[0]
        row = found.setdefault(part, [0, 0])
        row[0] += value.numel()
        row[1] += value.numel() * value.requires_grad
    return [{"part": k, "parameters": a, "trained": t} for k, (a, t) in found.items()]


def _bytes(module: nn.Module) -> int:
    return _unique(module.parameters())


def _unique(values: Iterable[Tensor]) -> int:
    return sum({id(v): v.numel() * v.element_size() for v in values}.values())


# ── time ─────────────────────────────────────────────────────────────────────

Seconds = Callable[[Work], float]


def mean_seconds(seconds: Seconds, works: Sequence[Work]) -> float:
    return sum(map(seconds, works)) / len(works)

"""What a step of target and head takes on this machine, by width.

Forwards are called one by one. On a GPU the engine replays whole steps as graphs instead, so times
of narrow widths there are upper bounds and the choice of a plan is to be checked by
`generate --compare`.

B batch, n tokens the target verifies or the head reads, m nodes the head expands; milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from spectrain.core.environment import cpu_model
from spectrain.core.progress import progress
from spectrain.core.target import Target
from spectrain.heads.base import DraftHead
from spectrain.heads.tree import TreeShape

_VIEW = 64  # caches are looked at in multiples of this, as when generating
_CHOICES = 10  # of a head's guess, as a tree may look at


class Costs(BaseModel):
    """Medians by width, between measured widths on a straight line.

    verify n → forward of the target over n tokens behind the context, its choices on the host
    extend n → the head reads n verified positions and makes its first guess
    expand m → the head goes one level deeper from m nodes
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    dtype: str
    device: str = Field(description="name of the GPU or of the processor")
    threads: int
    batch: int
    context: int
    verify: dict[int, float]
    extend: dict[int, float]
    expand: dict[int, float]

    def verify_ms(self, shape: TreeShape) -> float:
        """The root and every node."""
        return _between(self.verify, shape.nodes + 1)

    def draft_ms(self, shape: TreeShape) -> float:
        """What the head takes for this tree: nothing for the root alone."""
        if not shape.nodes:
            return 0.0
        # As many positions are handed over as can have been accepted, whatever was.
        deeper = (_between(self.expand, len(nodes)) for nodes in shape.frontiers[1:])
        return _between(self.extend, shape.depth + 1) + sum(deeper)


def _between(measured: dict[int, float], width: int) -> float:
    """Raises ValueError outside of what was measured: a guess there would look like a fact."""
    widths = sorted(measured)
    if not widths[0] <= width <= widths[-1]:
        raise ValueError(f"width {width} is not between {widths[0]} and {widths[-1]}")
    return float(np.interp(width, widths, [measured[each] for each in widths]))


def machine(device: torch.device) -> str:
    """The name that costs are kept under."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def precision(target: Target) -> str:
    """Number type, and how the weights are kept if otherwise: "float32", "float32 int8"."""
    kept = f" {target.quantisation}" if target.quantisation else ""
    return str(target.dtype).removeprefix("torch.") + kept


@torch.inference_mode()
def measure(
    target: Target,
    head: DraftHead,
    batch: int,
    context: int,
    widths: Sequence[int],
    repeats: int,
    draft_widths: Sequence[int] | None = None,
) -> Costs:
    """Time target and head (bound to it) on random tokens behind `context` ones.

    widths are what `verify` is measured for, draft_widths (the same by default) the other two. All
    widths are measured in turn, `repeats` times: other load on the machine hits all of them about
    equally. Nothing that is timed is committed, so each finds the caches as they were.
    """
    draft_widths = draft_widths or widths
    device = target.device
    room = context + max(widths) + 2 * max(draft_widths)
    view = -(-room // _VIEW) * _VIEW
    random = torch.Generator().manual_seed(0)
    usable = min(target.vocab_size, len(target.tokenizer))
    tokens = torch.randint(usable, (batch, room), generator=random).to(device)
    nothing = torch.zeros(batch, dtype=torch.int64, device=device)
    parents = torch.zeros_like(tokens)
    layers = head.needs.aux_layers

    cache = target.new_cache(batch, view)
    features = target.forward(tokens[:, :context], cache=cache, aux_layers=layers, view=view)
    cache.commit(nothing + context)
    state = head.start(batch, view)
    head.begin(state, tokens[:, : context + 1], features, nothing + context)
    read = target.forward(
        tokens[:, context : context + max(draft_widths)],
        cache=cache,
        aux_layers=layers,
        view=view,
    )

    def verify(width: int) -> None:
        block = tokens[:, context : context + width]
        found = target.forward(block, cache=cache, aux_layers=layers, view=view)
        target.logits(found.last).argmax(-1).tolist()

    def extend(width: int) -> None:
        _choose(head.extend(state, tokens[:, :width], read[:, :width], nothing, view))

    def expand(width: int) -> None:
        _choose(head.expand(state, tokens[:, :width], parents[:, :width]))

    works = [
        *(("verify", verify, width, None) for width in widths),
        *(("extend", extend, width, None) for width in draft_widths),
        # Reading again forgets what was drafted: each expansion starts at the first level.
        *(("expand", expand, width, lambda: extend(1)) for width in draft_widths),
    ]
    times: dict[tuple[str, int], list[float]] = {(name, n): [] for name, _, n, _ in works}
    with progress((repeats + 1) * len(works), f"costs at batch {batch}", "timings") as bar:
        for repeat in range(repeats + 1):
            for name, work, width, before in works:
                taken = _time(work, width, before, device)
                if repeat:  # the first round warms up
                    times[name, width].append(taken)
                bar.update(1)
    found = {
        kind: {n: round(median(taken), 4) for (name, n), taken in times.items() if name == kind}
        for kind in ("verify", "extend", "expand")
    }
    return Costs(
        dtype=precision(target),
        device=machine(device),
        threads=torch.get_num_threads(),
        batch=batch,
        context=context,
        **found,
    )


def _choose(logits: torch.Tensor) -> None:
    """A guess is of use once its best tokens are known."""
    logits.topk(min(_CHOICES, logits.shape[-1]), dim=-1)


def _time(
    work: Callable[[int], None],
    width: int,
    before: Callable[[], None] | None,
    device: torch.device,
) -> float:
    """Milliseconds; on a GPU until the work is done, not only queued."""
    if before:
        before()
    _settle(device)
    started = time.perf_counter()
    work(width)
    _settle(device)
    return 1e3 * (time.perf_counter() - started)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

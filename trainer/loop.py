"""The training loop, from top to bottom.

K terms of the objective (usually draft steps), M micro-batches of this process in one step.

The loss of a step is Σ_k w_k · S_k / C_k, where S_k and C_k are sums over all processes and all
micro-batches. The counts C_k come from the data alone, so they are known before the first forward
and every micro-batch is divided by the same number: however the batch is cut, the gradient is the
same to rounding.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from spectrain.core.batch import Batch
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.core.files import require_free
from spectrain.heads.base import DraftHead
from spectrain.trainer import checkpoint, optim, order, sharding
from spectrain.trainer.ema import Ema
from spectrain.trainer.journal import Evaluate, opened
from spectrain.trainer.metrics import Stopwatch
from spectrain.trainer.prefetch import reading
from spectrain.trainer.settings import TrainerSettings
from spectrain.trainer.signals import interrupts, wanted
from spectrain.trainer.state import State, require_one_step, resume
from spectrain.trainer.update import Plain, Way


@dataclass(frozen=True)
class Data:
    """Training conversations. lengths and supervised: tokens and reply tokens of each; load: one
    batch, each row the conversations of a list, on any device, features in any type; ahead: whether
    a thread may call it for the next step while this one is computed."""

    lengths: Sequence[int]
    supervised: Sequence[int]
    load: Callable[[list[list[int]]], Batch]
    ahead: bool = True


def train(
    head: DraftHead,
    data: Data,
    settings: TrainerSettings,
    accelerator: Accelerator,
    run: Path,
    identity: Mapping[str, Any],
    extend: bool = False,
    evaluate: Evaluate | None = None,
    way: Way = Plain,
) -> State:
    """Train `head` in place for settings.steps, going on from the newest checkpoint in `run`.

    With settings.ema `head` is the running mean of its weights afterwards.
    identity: JSON values that have to be the same for a run to be continued; evaluate: called by
    all processes after every settings.eval_every steps and the last one; way: how the processes
    share the work of an update.
    Raises SpectrainError for a run with another identity or damaged checkpoints alone, RunFailed
    when the loss stays not finite; KeyboardInterrupt after Ctrl-C and Terminated after SIGTERM,
    with a checkpoint written.
    """
    steps, world, rank = settings.steps, accelerator.num_processes, accelerator.process_index
    assert steps is not None, "the recipe has worked out the number of steps"
    _check_batch(settings, data, world)
    main = accelerator.is_main_process
    head.to(accelerator.device).train()
    parts = optim.build(head, settings, optim.head_tables(head))
    ema = Ema(head, settings.ema)
    update = way(head, parts, settings, accelerator)
    state = resume(run, head, update, ema, identity, extend)
    require_one_step(state, accelerator, run)
    if main:
        checkpoint.clean(run)
        require_free(run, checkpoint.size(head, ema))  # now, not after hours of work
        if state.step:
            print(f"going on from step {state.step} of {steps}", file=sys.stderr)
    trainable = [value for value in head.parameters() if value.requires_grad]
    rows = order.Order(data.lengths, settings.batch_size, settings.seed)
    cut = {"micro_batch": settings.micro_batch, "pack": settings.pack_length}
    watch = Stopwatch()
    saved_at, most = time.monotonic(), 60 * settings.save_minutes or math.inf

    def read(step: int) -> list[Batch]:
        mine = order.share(rows.batch(step), data.lengths, rank, world, **cut)
        return [data.load(part) for part in mine]

    on_gpu = accelerator.device.type == "cuda"
    with (
        interrupts() as asked,
        reading(read, steps, data.ahead, pin=on_gpu) as batches_of,
        opened(run, settings, accelerator, identity, state, evaluate) as journal,
    ):

        def measure() -> None:
            """On held-out rows, where it is due: that is no training time."""
            if journal.measures(state.step):
                with watch.paused(), ema.swapped_in(head):
                    journal.heldout(state.step)

        measure()  # what a run that was interrupted had not come to
        while state.step < steps:
            step = state.step
            # The same for all processes: noise is drawn by conversation (heads/noise.py).
            torch.manual_seed(order.mixed_seed(settings.seed, step))
            rate = optim.factor(settings.schedule, step, steps, settings.warmup)
            optim.set_rate(parts, rate)
            optim.rest(parts, step / steps)
            weights = head.weights(step / steps)

            # The data, and how much of it counts.
            batches = batches_of(step)
            counts = [_counts(head, batch, accelerator.device) for batch in batches]  # M × [K]
            total = accelerator.reduce(torch.stack(counts).sum(0), "sum")  # [K]
            # Processes average their gradients where a sum is meant, hence × world.
            share = torch.tensor(weights, device=total.device) * world
            scale = (share / total.clamp(min=1)).float()
            empty = (torch.stack(counts) == 0).any(1).tolist()

            # Forward and backward.
            sums = torch.zeros(4, len(weights), dtype=torch.float64, device=total.device)
            for index, batch in enumerate(batches):
                with update.micro_batch(last=index == len(batches) - 1):
                    objective = update.model(batch.to(accelerator.device, torch.float32), scale)
                    loss = objective.total
                    if empty[index]:
                        loss = loss + _nothing(trainable)
                    accelerator.backward(loss)
                sums[0] += objective.loss.detach()
                sums[1] += counts[index]
                sums[2] += objective.hits
                sums[3] += objective.seen
            del batches, batch  # before the next ones are asked for
            update.join()
            if state.unreached != []:
                state.unreached = _unreached(head, state.unreached, update.reached())
            norm = update.clip()

            # One exchange of all that the processes have to agree on, one wait for the device.
            bad = ~(torch.isfinite(norm) & torch.isfinite(sums[0]).all())
            due = main and time.monotonic() - saved_at >= most  # as one clock says
            flags = torch.cat([bad[None], bad.new_tensor([due, *asked.flags()])]).double()
            *sums, flags = _split(accelerator.reduce(torch.cat([sums.flatten(), flags])))
            bad, due, stop = flags[0], flags[1], wanted(flags[2:])

            # The update, by all processes or none.
            if bad:
                state.skipped, state.skipped_in_row = state.skipped + 1, state.skipped_in_row + 1
                state.window.skipped += 1
            else:
                update.step()
                ema.update(head, earlier=step - state.skipped)
                state.skipped_in_row = 0
                chosen = rows.batch(step)
                state.window.add(sums, order.padding(chosen, data.lengths, world, **cut))
                state.supervised += sum(data.supervised[row] for row in chosen)
            update.clear()
            state.step += 1
            state.seconds += watch.lap()
            if state.skipped_in_row >= settings.max_bad_steps:
                raise RunFailed(
                    f"the loss or its gradient was not finite in {state.skipped_in_row} steps in a "
                    f"row, up to step {state.step}",
                    where=str(run),
                    fix=f"try a lower learning rate; {_last_good(run)}",
                )

            # What the world gets to see, and what survives us.
            journal.step(state, weights, rate, None if bad else norm)
            if state.step % settings.save_every == 0 or state.step == steps or stop or due:
                saved = {**asdict(state), "seed": settings.seed, "config": dict(identity)}
                checkpoint.save(run, head, update, ema, saved, settings.keep, main)
                journal.saved(state.step)
                saved_at = time.monotonic()
            if stop and state.step < steps:
                if main:
                    print(f"checkpoint of step {state.step} of {steps} written", file=sys.stderr)
                accelerator.wait_for_everyone()  # launchers end the others when the first one goes
                raise stop
            measure()
    if state.skipped_in_row:
        raise RunFailed(
            f"the loss or its gradient was not finite in the last {state.skipped_in_row} steps",
            where=str(run),
            fix="the weights may be spoilt: a few steps more would tell (--set extend=true --steps "
            f"{steps + settings.max_bad_steps}), or train again with a lower learning rate",
        )
    ema.leave_in(head)
    return state


def _check_batch(settings: TrainerSettings, data: Data, world: int) -> None:
    if not data.lengths:
        raise SpectrainError("no training rows in the store", fix="prepare more conversations")
    if settings.batch_size > len(data.lengths):
        raise SpectrainError(
            f"batch_size {settings.batch_size} is more than the {len(data.lengths)} training rows",
            fix=f"use --batch-size {len(data.lengths)} or less, or prepare more conversations",
        )
    if settings.batch_size % world:
        raise SpectrainError(
            f"batch_size {settings.batch_size} cannot be shared by {world} processes",
            fix=f"use a multiple of {world}",
        )


def _counts(head: DraftHead, batch: Batch, device: torch.device) -> Tensor:
    """[K] float64; the features stay where they are, the counts do not depend on them."""
    return head.counts(replace(batch, aux=None, last=None).to(device)).double()


def _nothing(trainable: list[nn.Parameter]) -> Tensor:
    """0, as a function of every trainable tensor that is whole.

    A micro-batch in which a term has no rows may leave tensors out of the graph; the other
    processes would wait for their gradients for ever.
    """
    plain = (value for value in trainable if not sharding.is_cut(value))
    return sum((value.flatten()[:1].sum() for value in plain), torch.zeros(())) * 0


def _unreached(head: nn.Module, before: list[str] | None, reached: set[str]) -> list[str]:
    """Names of trainable tensors, among those of `before`, that this step has not reached."""
    if before is None:
        before = [name for name, value in head.named_parameters() if value.requires_grad]
    return [name for name in before if name not in reached]


def _split(flat: Tensor) -> tuple[list[float], ...]:
    """loss [K], count [K], hits [K], seen [K] and the four flags, as numbers."""
    values = flat.tolist()
    terms = (len(values) - 4) // 4
    return *(values[i * terms : (i + 1) * terms] for i in range(4)), values[-4:]


def _last_good(run: Path) -> str:
    found = next(checkpoint.whole(run), None)
    return f"the last good checkpoint is {found[0]}" if found else "no checkpoint was written yet"

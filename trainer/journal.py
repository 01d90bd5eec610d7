"""What a run tells: metrics.jsonl, the tracker, and the person who watches, all from one place.

Every process has a journal and calls it alike; only rank 0's writes and shows. What is measured on
held-out rows is measured by all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from torch import Tensor

from spectrain.core.progress import say
from spectrain.trainer import optim
from spectrain.trainer.metrics import HELDOUT, MetricsFile, Window, read_heldout, read_metrics
from spectrain.trainer.settings import TrainerSettings
from spectrain.trainer.tracking import start_trackers
from spectrain.trainer.view import Lines, Panel, watch

if TYPE_CHECKING:
    from spectrain.trainer.state import State

# What the head is worth on held-out rows after so many steps, as plain JSON values.
Evaluate = Callable[[int], Mapping[str, Any]]


@contextmanager
def opened(
    run: Path,
    settings: TrainerSettings,
    accelerator: Accelerator,
    identity: Mapping[str, Any],
    state: State,
    evaluate: Evaluate | None = None,
) -> Iterator[Journal]:
    """The journal of a run that goes on behind state.step: rows of later steps are dropped."""
    past = [
        [row for row in read(run) if row["step"] <= state.step]
        for read in (read_metrics, read_heldout)
    ]
    _say_new_rate(settings, past[0], state.step)
    file = MetricsFile(run, after=state.step) if accelerator.is_main_process else None
    start_trackers(accelerator, identity, run, state.step)
    with watch(settings.steps, state.step, *past, accelerator.device) as view:
        evaluated = past[1][-1]["step"] if past[1] else 0
        yield Journal(settings, accelerator, file, view, state, evaluate, evaluated)


def _say_new_rate(settings: TrainerSettings, past: Sequence[Mapping[str, Any]], done: int) -> None:
    """Tell how the learning rate goes on behind `done` steps where the rows of the past followed
    the schedule of another number of steps: a run that was finished had come down to almost 0."""

    def rate(step: int) -> float:
        assert settings.steps is not None, "the recipe has worked out the number of steps"
        return settings.lr * optim.factor(settings.schedule, step, settings.steps, settings.warmup)

    if not past or done == settings.steps:
        return
    last, before = past[-1]["step"], past[-1]["lr"]
    if not math.isclose(before, rate(last - 1), rel_tol=1e-6):
        say(
            f"the {settings.schedule} schedule is now that of {settings.steps} steps: the learning "
            f"rate was {before:.2g} in step {last}, it goes on with {rate(done):.2g}"
        )


class Journal:
    """See `opened`. evaluated: the step of the last evaluation that is written down."""

    def __init__(
        self,
        settings: TrainerSettings,
        accelerator: Accelerator,
        file: MetricsFile | None,
        view: Lines | Panel,
        state: State,
        evaluate: Evaluate | None,
        evaluated: int,
    ) -> None:
        self._settings, self._accelerator, self._file = settings, accelerator, file
        self._view, self._evaluate, self._evaluated = view, evaluate, evaluated
        self._supervised, self._seconds = state.supervised, state.seconds

    def step(
        self, state: State, weights: Sequence[float], rate: float, norm: Tensor | None
    ) -> None:
        """A step is done. Every log_every steps a row is told and state.window begun anew.

        weights: of the terms; rate: share of the highest learning rate; norm: of the gradient,
        None where the step was skipped.
        """
        means = state.window.row(weights)
        if state.step % self._settings.log_every == 0 or state.step == self._settings.steps:
            row = {
                "step": state.step,
                **means,
                "lr": self._settings.lr * rate,
                "grad_norm": None if norm is None else norm.item(),
                "supervised_tokens": state.supervised,
                "tokens_per_second": (state.supervised - self._supervised)
                / (state.seconds - self._seconds),
            }
            self._supervised, self._seconds = state.supervised, state.seconds
            state.window = Window()
            self._write(row)
            # The first term of a joint training is the trunk's, which drafts nothing.
            accepted = row["acceptance"][1 if self._settings.trunk.trained else 0 :]
            self._view.row(row, accepted, state.skipped)
        self._view.step(state.step, means["loss"])

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is written."""
        self._view.saved(step)

    def measures(self, step: int) -> bool:
        """Whether held-out rows are to be measured after `step` steps, and are not yet."""
        every = self._settings.eval_every
        due = bool(every) and (step % every == 0 or step == self._settings.steps)
        return due and self._evaluate is not None and step > self._evaluated

    def heldout(self, step: int) -> None:
        """Measure on held-out rows."""
        assert self._evaluate is not None, "`measures` has said so"
        self._view.measuring()
        row = {"step": step, HELDOUT: dict(self._evaluate(step))}
        self._evaluated = step
        self._write(row)
        self._view.heldout(row)

    def _write(self, row: dict[str, Any]) -> None:
        if self._file:
            self._file.append(row)
        self._accelerator.log(dict(_flat(row)), step=row["step"])


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """A row of metrics as single numbers, for trackers."""
    if isinstance(value, (dict, list)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _flat(part, f"{name}/{key}" if name else str(key))
    elif value is not None:
        yield name, value

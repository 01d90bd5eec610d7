"""DeepSpeed's ZeRO, stages 1 and 2: optimiser states, and joined gradients, cut over the processes.

DeepSpeed lays each group of the optimiser's tensors into one flat float32 buffer, of which the
head's tensors become views, and gives each process an equal piece of it to update:

    stage 1     pieces of the moments and of a copy of the weights; gradients whole until they join
    stage 2     joined gradients in pieces, too, micro-batch by micro-batch

Called by the loop and not through accelerate, whose backward pass also clips and steps. Here the
norm is asked for before, so that all processes can drop a step together. A checkpoint has whole
tensors with the names of trainer/optim.py, so a run goes on with or without DeepSpeed.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from packaging.specifiers import SpecifierSet
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim import AdamW

from spectrain.core.errors import SpectrainError
from spectrain.trainer import optim
from spectrain.trainer.settings import TrainerSettings
from spectrain.trainer.update import Plain, Way
from spectrain.trainer.zero_config import ZERO, checked

VERSIONS = ">=0.19.8,<0.20"  # whose inner workings this file was written for and tested with
_MOMENTS = ("exp_avg", "exp_avg_sq")
_BUCKET = 500_000_000  # numbers that are exchanged at a time, at most, where the config is silent


def way(asked: Mapping[str, Any] | None, settings: TrainerSettings) -> Way:
    """How to update a head where the launcher asked for this config (`zero_config.asked_for`); to
    be called before the processes know each other, so that all of them end in the same error.

    Raises SpectrainError where the package is missing and for what `zero_config.checked` refuses.
    """
    if asked is None:
        return Plain
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    config = checked(asked, settings, processes)
    _require_package()
    if processes == 1:
        print("DeepSpeed has nothing to cut: there is one process", file=sys.stderr)
        return Plain
    return partial(Zero, config)


class Zero:
    """An `Update` (trainer/update.py) whose work the processes share."""

    def __init__(
        self,
        config: Mapping[str, Any],
        head: nn.Module,
        parts: dict[str, optim.Part],
        settings: TrainerSettings,
        accelerator: Accelerator,
    ) -> None:
        """config: what `zero_config.checked` gives. From here on the tensors of `head` are views of
        DeepSpeed's buffers, to be written in place."""
        deepspeed = _package(accelerator.device.type)
        # Precision alone, no DDP. DeepSpeed's own bfloat16 would round the weights.
        self.model = accelerator.prepare_model(head, evaluation_mode=True)
        self._parts, self._device = parts, accelerator.device
        # One optimiser for all; its groups stay those of the parts, which set their rates.
        groups = [group for part in parts.values() for group in part.optimizer.param_groups]
        self._whole = [list(group["params"]) for group in groups]
        adamw = AdamW(groups, fused=groups[0]["fused"])
        adamw.register_step_pre_hook(self._let_rest)
        group = {id(v): index for index, values in enumerate(self._whole) for v in values}
        own = [(name, v) for name, v in head.named_parameters() if id(v) in group]
        self._names = {id(value): name for name, value in own}
        self._order = [(value, group[id(value)]) for _, value in reversed(own)]
        size = sum(value.numel() for _, value in own)
        told = {f"{ZERO}.reduce_bucket_size": min(size, _BUCKET), **config}
        full = {key: value for key, value in told.items() if "." not in key}
        full[ZERO] = {k.removeprefix(f"{ZERO}."): v for k, v in told.items() if "." in k}
        # The loop divides its loss and cuts its batches itself.
        full |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        full["gradient_clipping"] = settings.clip
        try:
            self._engine, *_ = deepspeed.initialize(model=head, optimizer=adamw, config=full)
        except ValidationError as error:
            told = error.errors()[0]
            key = ".".join(str(part) for part in told["loc"])
            raise SpectrainError(f"{key}: {told['msg']}", where="DeepSpeed's config") from None
        except (ValueError, AssertionError) as error:
            raise SpectrainError(f"{error}", where="DeepSpeed", fix="mend its config") from None
        self._engine.enable_backward_allreduce = False  # it comes after what `micro_batch` adds
        self._zero = self._engine.optimizer
        self._pieces = self._zero.single_partition_of_fp32_groups  # one a group
        self._reduce = self._zero.process_gradients
        self._zero.process_gradients = self._ready
        self._waiting: deque[tuple[nn.Parameter, int]] = deque()
        self._have: set[int] = set()
        tools = deepspeed.utils
        self._whole_moment = tools.safe_get_full_optimizer_state
        self._put_moment = tools.safe_set_full_optimizer_state
        self._begin_memory(adamw)
        if accelerator.is_main_process:
            stage, count = full[ZERO]["stage"], accelerator.num_processes
            print(f"DeepSpeed ZeRO-{stage} over {count} processes", file=sys.stderr)

    # ── gradients ────────────────────────────────────────────────────────────

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Gradients are exchanged in one order in all processes, last tensor first, as with DDP's
        buckets. In the order in which they are ready, which is DeepSpeed's, processes whose graphs
        differ (a term without rows) would add gradients of different tensors."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._waiting = deque(pair for pair in self._order if pair[0].requires_grad)
        self._have.clear()
        yield
        for value, index in self._waiting:
            if value.grad is None:  # here; the others may have one
                value.grad = torch.zeros_like(value)
            self._reduce(value, index)
        self._engine.allreduce_gradients()

    def _ready(self, value: nn.Parameter, index: int) -> None:
        """Called by DeepSpeed in the backward pass when a tensor has its gradient, or turns out to
        have none; index: its group."""
        if value.grad is not None:
            self._have.add(id(value))
        while self._waiting and id(self._waiting[0][0]) in self._have:
            self._reduce(*self._waiting.popleft())

    def join(self) -> None:
        """They have joined in `micro_batch`."""

    def reached(self) -> set[str]:
        flags = {name: torch.zeros((), device=self._device) for name in self._names.values()}
        for index, values in enumerate(self._zero.params_in_partition):
            found = self._zero.averaged_gradients[index]
            pieces = (piece for piece in found if not getattr(piece, "_zero_padding", False))
            for value, piece in zip(values, pieces, strict=False):  # zeros where it has no tensor
                flags[self._names[id(value)]] += piece.any()
        counts = torch.stack(list(flags.values()))
        dist.all_reduce(counts)
        return {name for name, count in zip(flags, counts.tolist(), strict=True) if count}

    def clip(self) -> Tensor:
        return self._zero.scaled_global_norm()  # infinite where it is no number

    def step(self) -> None:
        self._engine.step()

    def clear(self) -> None:
        self._zero.zero_grad()
        for joined in (self._zero.averaged_gradients, self._zero.all_grad_tensors):
            joined.update(dict.fromkeys(joined))

    def _let_rest(self, *_: Any) -> None:
        """Before AdamW steps: a group whose tensors ask for no gradient has none, where DeepSpeed
        gives its piece one of zeros; so it is left out, as without DeepSpeed."""
        for piece, values in zip(self._pieces, self._whole, strict=True):
            if not values[0].requires_grad:
                piece.grad = None

    # ── the optimiser's memory ───────────────────────────────────────────────

    def memory(self, main: bool) -> dict[str, Tensor]:
        found = {}
        for key, value, step in self._each():
            if not step:
                continue  # as of a tensor that has rested so far
            for moment in _MOMENTS:
                full = self._whole_moment(value, moment)
                if main:
                    found[f"{key}/{moment}"] = full.cpu()
            if main:
                found[f"{key}/step"] = step.cpu().clone()
        return found

    def restore(self, memory: Mapping[str, Tensor]) -> None:
        self._zero.refresh_fp32_params()  # the head's weights were filled after it was cut
        steps = {}
        for key, value, step in self._each():
            told = memory.get(f"{key}/step", torch.zeros(()))
            if steps.setdefault(step, told) != told:
                raise SpectrainError(
                    f"{key} has made {told:.0f} steps, others of its group {steps[step]:.0f}",
                    where="DeepSpeed",
                    fix="it keeps one number for them: go on without it",
                )
            for moment in _MOMENTS if told else ():
                self._put_moment(value, memory[f"{key}/{moment}"].to(self._device), moment)
        for step, told in steps.items():
            step.copy_(told)

    def _begin_memory(self, adamw: AdamW) -> None:
        """What AdamW would make in its first step, so that a checkpoint can fill it before."""
        for piece in self._pieces:
            memory = {moment: torch.zeros_like(piece) for moment in _MOMENTS}
            adamw.state[piece] = memory | {"step": torch.zeros((), device=self._device)}
        self._zero._lazy_init_hp_params_optimizer_state()

    def _each(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Name, tensor and number of steps of all that is trained; the number is its group's."""
        groups = zip(self._pieces, self._whole, strict=True)
        steps = {id(v): self._zero.state[piece]["step"] for piece, values in groups for v in values}
        for kind, part in self._parts.items():
            for name, value in zip(part.names, part.parameters, strict=True):
                yield f"{kind}/{name}", value, steps[id(value)]


def _require_package() -> None:
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        raise SpectrainError(
            "DeepSpeed is not installed", fix="pip install 'spectrain[deepspeed]'"
        ) from None
    if not SpecifierSet(VERSIONS).contains(found):
        fix = f"pip install 'deepspeed{VERSIONS}'"
        raise SpectrainError(f"DeepSpeed {found} is not supported", fix=fix)


def _package(device: str) -> ModuleType:
    """The package, told which device it works on."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed

    warnings.filterwarnings("ignore", ".*all_gather_into_tensor. is deprecated", FutureWarning)
    # For CPUs it would first compile sums in shared memory, minutes in which all others wait.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed

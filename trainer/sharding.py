"""Spreading a target over the processes (torch's FSDP2), and what the loop does with its pieces.

A decoder layer's tensors are DTensors, cut along their first dimension, one piece a process; a
layer is whole only while it computes. Embedding, lm_head, final norm, LoRA matrices and the head
are plain tensors, whole in every process: a head reads the target's tables directly, and they are
few. Whoever makes a DTensor whole asks all processes: such functions are called by all of them, in
the same order.

    gradient of a piece         summed over the processes and divided by their number in backward
    gradient of a plain tensor  the same, by `average`, after the last micro-batch
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate


def shard(decoder: nn.Module, device: torch.device, products: torch.dtype | None) -> None:
    """Cut the layers of a target's decoder over all processes; its tensors may still be on meta.

    products: type in which a layer multiplies where that is not the one it is kept in.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # What a layer reads stays as it is: under autocast the sum of all layers is float32, too.
    policy = MixedPrecisionPolicy(
        param_dtype=products, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    rest = {value for value in decoder.parameters() if not is_cut(value)}
    # The root has no piece of its own: it fetches the next layer while one computes.
    fully_shard(decoder, mesh=mesh, mp_policy=policy, ignored_params=rest)


def is_cut(value: Tensor) -> bool:
    """Whether each process holds only a piece of this tensor."""
    return isinstance(value, DTensor)


def whole(value: Tensor) -> Tensor:
    """The whole tensor, in every process."""
    return value.full_tensor() if is_cut(value) else value


def any_of(value: Tensor) -> bool:
    """Whether the whole tensor has a value other than 0."""
    return bool(whole(value.any()))


def like(full: Tensor, value: Tensor) -> Tensor:
    """This process's part of a whole tensor, as `value` is cut; nothing is sent."""
    if not is_cut(value):
        return full
    same = DTensor.from_local(full, value.device_mesh, [Replicate()], run_check=False)
    return same.redistribute(placements=value.placements)


@torch.no_grad()
def put(value: Tensor, full: Tensor) -> None:
    """Fill a tensor, or this process's piece of it, from the whole one."""
    value.copy_(like(full.to(value.device, value.dtype), value))


def gathered(tensors: Mapping[str, Tensor], main: bool) -> dict[str, Tensor]:
    """The whole tensors on the CPU of the main process, nothing elsewhere; one at a time."""
    found = {}
    for name, value in tensors.items():
        full = whole(value.detach())
        if main:
            found[name] = full.cpu().contiguous()
    return found


def joined(model: nn.Module, main: bool) -> dict[str, Tensor]:
    """A model's state as if nothing were cut, for the main process; tied tensors stay tied."""
    state = model.state_dict()
    cut = {name: value for name, value in state.items() if is_cut(value)}
    return state | gathered(cut, main) if main else gathered(cut, main)


def prepare(head: nn.Module, accelerator: Accelerator) -> nn.Module:
    """What the loop calls in the place of `head`: under DDP, or, where a part of it is cut, with
    plain tensors as the first process has them, and `average` to follow."""
    if not any(is_cut(value) for value in head.parameters()):
        return accelerator.prepare_model(head)
    for value in [*head.parameters(), *head.buffers()]:
        if not is_cut(value):
            dist.broadcast(value.detach(), 0)
    return accelerator.prepare_model(head, evaluation_mode=True)  # precision alone, no DDP


def average(model: nn.Module) -> None:
    """Means over the processes of the gradients of plain tensors, where nothing else makes them.

    After the backward pass and not within it, as DDP would: there the exchanges could meet those of
    the pieces in another order in each process. A tensor without a gradient here counts as 0.
    """
    values = list(model.parameters())
    if not any(is_cut(value) for value in values):
        return
    for value in values:
        if value.requires_grad and not is_cut(value):
            if value.grad is None:
                value.grad = torch.zeros_like(value)
            dist.all_reduce(value.grad)
            value.grad /= dist.get_world_size()


def clip(values: Iterable[nn.Parameter], most: float) -> Tensor:
    """Scale the gradients down to a common norm of at most `most` → the norm before, a scalar."""
    values = [value for value in values if value.grad is not None]
    cut = [value.grad for value in values if is_cut(value)]
    if not cut:
        return nn.utils.clip_grad_norm_(values, most)
    plain = [value.grad for value in values if not is_cut(value)]
    norms = [nn.utils.get_total_norm(cut).full_tensor(), nn.utils.get_total_norm(plain)]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = (most / (norm + 1e-6)).clamp(max=1.0)  # as torch does
    for grad in [*plain, *(grad.to_local() for grad in cut)]:
        grad.mul_(scale)
    return norm

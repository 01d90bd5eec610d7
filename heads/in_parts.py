"""The gradient of training-time test, some anchors at a time.

Once the keys of step 0 are there, anchors know nothing of each other. So some of them go through
all K steps, forward and backward, before the next ones begin: what a step keeps for its gradient is
there for these anchors alone, however long the batch is, and nothing is computed twice. For that
the gradient must be wanted in the forward already, and known up to one factor (`scale`).

B batch, T length, R anchors, C anchors of a part, K steps, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectrain.core.fast_linear import laid_out
from spectrain.heads.recurrent import Prefix, RecurrentHead
from spectrain.heads.unrolled_loss import UnrolledLoss

# Rows that are alive at a time, K for each anchor: enough for products at full speed.
CPU_ROWS, GPU_ROWS = 2048, 1 << 16


def total_in_parts(
    head: RecurrentHead,
    prefix: Prefix,
    tokens: Tensor,
    loss: UnrolledLoss,
    finish: Callable[[Tensor], Tensor],
    rows: int | None = None,
) -> Tensor:
    """Σ_k scale_k · loss_k, its gradient taken already and kept in the place of the graph.

    finish: what the head's output goes through before its output layer, [C, H] → [C, H].
    """
    steps = len(loss.scale)
    if rows is None:
        rows = CPU_ROWS if tokens.device.type == "cpu" else GPU_ROWS
    size = max(1, rows // steps)
    own = [prefix.hidden, prefix.x]
    shared = [*prefix.keys, *prefix.values]
    learnt = [p for p in head.parameters() if p.requires_grad and p is not loss.weight]
    sums: list[Tensor | None] = [None] * (len(shared) + len(learnt))
    to_own: list[list[Tensor]] = []
    leaves = _leaves(shared)
    layers = len(prefix.keys)
    count = max(1, -(-len(prefix.anchors) // size))
    size = max(1, -(-len(prefix.anchors) // count))  # all of one size: a small rest is slow
    with laid_out(head):
        for anchors, *values in zip(
            prefix.anchors.split(size), *(part.split(size) for part in own), strict=True
        ):
            mine = _leaves(values)
            part = Prefix(anchors, *mine, leaves[:layers], leaves[layers:])
            states = torch.stack([finish(u.hidden) for u in head.steps(part, tokens, steps)])
            above = loss.add(anchors, states.detach())
            with torch.autocast(tokens.device.type, enabled=False):
                found = torch.autograd.grad(
                    states, [*mine, *leaves, *learnt], above, allow_unused=True
                )
            to_own.append(found[:2])
            for place, value in enumerate(found[2:]):
                if value is not None:
                    sums[place] = value if sums[place] is None else sums[place].add_(value)
            del states, above, found, value  # the next part is not to find them still there
    gradients = [*(torch.cat(part) for part in zip(*to_own, strict=True)), *sums]
    inputs = [*own, *shared, *learnt]
    if loss.weight.requires_grad:
        inputs.append(loss.weight)
        gradients.append(loss.to_weight)
    return _Known.apply(loss.total, gradients, *inputs)


def _leaves(values: Sequence[Tensor]) -> list[Tensor]:
    return [value.detach().requires_grad_() for value in values]


class _Known(torch.autograd.Function):
    """A number with gradients that are known; its backward pass gives them away, once."""

    @staticmethod
    def forward(ctx, total: Tensor, gradients: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(None if value is None else value.mul_(grad) for value in gradients)

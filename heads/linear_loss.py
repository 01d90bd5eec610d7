"""A linear layer and its cross-entropy in one, so that logits never outlive a chunk of rows.

With a vocabulary of 100 000 the logits of one batch are larger than all else a small head keeps.
Here the gradient is worked out in the same pass as the loss: a chunk's logits are made, used for
both and dropped. What stays is one gradient as large as the hidden rows (and one as large as the
weight, when the weight is trained).

R rows, H hidden, D tokens that can be guessed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectrain.core.fast_linear import Weight, fast_linear, fast_product
from spectrain.heads import kernels

# Logits of one chunk, in numbers: what a CPU's cache holds goes through the loss fastest; a GPU
# wants large products (256 MiB in float32).
CPU_CHUNK, GPU_CHUNK = 1 << 21, 1 << 26

# Row range → what these rows are taught: token ids [r] (hard) or distributions [r, D] (soft).
Taught = Callable[[int, int], Tensor]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    taught: Taught | Tensor,
    keep: Tensor,
    *,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ over rows with `keep` of the cross-entropy of softmax(cap(hidden · weightᵀ + bias)).

    hidden [R, H], weight [D, H], bias [D] or None, keep [R] bool: the rows that are in the loss.
    taught: all of it, [R] or [R, D], or a function that makes a range of it.
    Returns the sum (float32 scalar) and the first choice of every row [R], kept or not. What rows
    that are not kept are taught may be any valid value. chunk bounds the logits held at a time.
    """
    if isinstance(taught, Tensor):
        whole = taught

        def taught(start: int, stop: int) -> Tensor:
            return whole[start:stop]

    chunk = chunk or (CPU_CHUNK if hidden.device.type == "cpu" else GPU_CHUNK)
    return _LinearCrossEntropy.apply(hidden, weight, bias, taught, keep, softcap, chunk)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        taught: Taught,
        keep: Tensor,
        softcap: float | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        exact = torch.promote_types(hidden.dtype, torch.float32)
        loss = hidden.new_zeros((), dtype=exact)
        choice = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if to_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if to_weight else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if to_bias else None
        size = max(1, chunk // len(weight))
        cast = weight.to(product_type(weight))  # once, not in every chunk
        output = Weight(cast)
        for start in range(0, len(hidden), size):
            rows = slice(start, min(start + size, len(hidden)))
            part = hidden[rows].to(cast.dtype)
            logits = output.times(part)
            if bias is not None:
                logits = logits + bias
            if softcap is None and kernels.usable(logits):
                what = taught(rows.start, rows.stop)
                losses, choice[rows] = kernels.cross_entropy_(logits, what, keep[rows])
                loss += losses.sum()
                grad = logits
            else:
                logits = logits.to(exact)
                slope = None
                if softcap is not None:
                    capped = torch.tanh(logits / softcap)
                    logits, slope = capped * softcap, 1 - capped**2
                choice[rows] = logits.argmax(-1)
                log_q = logits.log_softmax(-1)
                del logits
                target, kept = taught(rows.start, rows.stop), keep[rows, None]
                # log_q becomes the gradient in place: a second chunk would double what is held.
                if target.dim() == 1:
                    picked = log_q.gather(1, target[:, None])
                    loss -= torch.where(kept, picked, 0).sum()
                    grad = log_q.exp_()
                    grad.scatter_add_(1, target[:, None], torch.full_like(picked, -1))
                else:
                    target = target.to(exact)
                    loss -= torch.where(kept, (target * log_q).sum(-1, keepdim=True), 0).sum()
                    grad = log_q.exp_().mul_(target.sum(-1, keepdim=True)).sub_(target)
                # Not times zero: a row without a teacher may hold anything, infinities included.
                grad.masked_fill_(~kept, 0)
                if slope is not None:
                    grad.mul_(slope)
            lower = grad.to(cast.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = output.back(lower).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += fast_product(lower.t(), part.t())
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=exact)
            log_q = target = grad = lower = None  # the next chunk is not to find them still there
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.types = weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(choice)
        return loss, choice

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _choice: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight, to_bias = ctx.saved_tensors
        types = ctx.types
        return (
            None if to_hidden is None else (to_hidden * grad).to(to_hidden.dtype),
            None if to_weight is None else (to_weight * grad).to(types[0]),
            None if to_bias is None else (to_bias * grad).to(types[1]),
            *(None,) * 4,
        )


def linear_row_loss(
    hidden: Tensor,
    weight: Tensor,
    taught: Callable[[int, int], Tensor],
    keep: Tensor,
    row_loss: Callable[[Tensor, Tensor], Tensor],
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Any loss of a row: Σ over rows with `keep` of row_loss(hidden · weightᵀ, taught).

    row_loss: logits [r, D] and teacher [r, D] → [r]; of different rows independent. Its gradient is
    taken by autograd, chunk by chunk.
    """
    chunk = chunk or (CPU_CHUNK if hidden.device.type == "cpu" else GPU_CHUNK)
    return _LinearRowLoss.apply(hidden, weight, taught, keep, row_loss, chunk)


class _LinearRowLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        taught: Callable[[int, int], Tensor],
        keep: Tensor,
        row_loss: Callable[[Tensor, Tensor], Tensor],
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        learns = any(ctx.needs_input_grad[:2])
        fixed = weight.detach().requires_grad_(ctx.needs_input_grad[1])
        losses, choices, to_hidden, to_weight = [], [], [], None
        size = max(1, chunk // len(weight))
        kept = Weight(fixed)
        for start in range(0, len(hidden), size):
            part = hidden[start : start + size].detach().requires_grad_(ctx.needs_input_grad[0])
            stop = start + len(part)
            with torch.set_grad_enabled(learns):
                logits = fast_linear(part, fixed, None, kept)
                loss = torch.where(keep[start:stop], row_loss(logits, taught(start, stop)), 0).sum()
                if learns:
                    wanted = [value for value in (part, fixed) if value.requires_grad]
                    found = list(torch.autograd.grad(loss, wanted))
                    if fixed.requires_grad:
                        last = found.pop()
                        to_weight = last if to_weight is None else to_weight.add_(last)
                    to_hidden += found
            losses.append(loss.detach())
            choices.append(logits.detach().argmax(-1))
        loss = torch.stack(losses).sum() if losses else hidden.new_zeros(()).float()
        choice = torch.cat(choices) if choices else keep.new_zeros(0, dtype=torch.int64)
        ctx.save_for_backward(
            (torch.cat(to_hidden) if to_hidden else torch.zeros_like(hidden))
            if ctx.needs_input_grad[0]
            else None,
            (torch.zeros_like(weight) if to_weight is None else to_weight)
            if ctx.needs_input_grad[1]
            else None,
        )
        ctx.mark_non_differentiable(choice)
        return loss, choice

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _choice: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight = ctx.saved_tensors
        return (
            None if to_hidden is None else (to_hidden * grad).to(to_hidden.dtype),
            None if to_weight is None else (to_weight * grad).to(to_weight.dtype),
            *(None,) * 4,
        )


def product_type(weight: Tensor) -> torch.dtype:
    """What the products are computed in: the lower type under autocast."""
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and weight.dtype == torch.float32:
        return torch.get_autocast_dtype(kind)
    return weight.dtype

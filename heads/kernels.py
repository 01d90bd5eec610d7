"""Cross-entropy of rows of logits on CUDA, with its gradient, by Triton.

torch goes over a row about ten times for what takes two sweeps: the maximum, the softmax, products
with the teacher, sums, the difference. Where Triton is missing the caller takes torch's way.

R rows of logits, U teacher rows, D columns. Sums are float32 (of float64 logits float64).
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from spectrain.core.progress import say

# Columns at a time, 16 for each thread.
BLOCK = 4096


def usable(rows: Tensor) -> bool:
    """Whether logits on the device of `rows` go through the kernels; SPECTRAIN_KERNELS=0: never."""
    return rows.is_cuda and _works(rows.device)


@cache
def _works(device: torch.device) -> bool:
    """Triton compiles what it runs, and that takes a C compiler and a GPU it knows."""
    if os.environ.get("SPECTRAIN_KERNELS") == "0" or find_spec("triton") is None:
        return False
    try:
        log_norm(torch.zeros(1, 1, device=device))
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        say(f"the loss is computed without Triton, slower: {type(error).__name__}: {first}")
        return False
    return True


def log_norm(logits: Tensor) -> Tensor:
    """log Σ exp of every row: [R, D] → [R]"""
    norms = logits.new_empty(len(logits), dtype=_wide(logits))
    _launch("log_norms", logits, norms)
    return norms


def cross_entropy_(logits: Tensor, taught: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """logits [R, D] become gradients; → losses [R] and first choices [R], of equals the lowest.

    taught: token ids [R] or distributions [R, D]; one of sum s < 1 pulls with s. keep [R] bool:
    other rows have no loss and gradient zero, whatever they and their teachers hold.
    """
    kind = "labels" if taught.dim() == 1 else "shares"
    return _losses(logits, taught, None, None, keep, kind)


def soft_cross_entropy_(
    logits: Tensor, teacher: Tensor, norm: Tensor, place: Tensor, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """As `cross_entropy_`, row r taught by softmax(teacher[place[r]]).

    teacher [U, D] logits, norm [U] their `log_norm`, place [R] int64.
    """
    return _losses(logits, teacher, norm, place, keep, "logits")


def _losses(
    logits: Tensor,
    taught: Tensor,
    norm: Tensor | None,
    place: Tensor | None,
    keep: Tensor,
    kind: str,
) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(len(logits), dtype=_wide(logits))
    choices = logits.new_empty(len(logits), dtype=torch.int64)
    others = (taught, norm, place, keep)
    taught, norm, place, keep = (x if x is None else x.contiguous() for x in others)
    _launch("row_losses", logits, taught, norm, place, keep, losses, choices, KIND=kind)
    return losses, choices


def _launch(name: str, logits: Tensor, *arguments: Tensor | None, **fixed: str) -> None:
    """One program for each row of the logits."""
    import triton.language as tl

    from spectrain.heads import row_kernels

    if not logits.is_contiguous():
        raise ValueError("the kernels take rows of logits that lie one behind the other")
    if not logits.numel():
        return
    size = min(BLOCK, 1 << (logits.shape[1] - 1).bit_length())
    wide = tl.float64 if logits.dtype == torch.float64 else tl.float32
    # Triton launches on the current device, whichever the tensors are on.
    with torch.cuda.device_of(logits):
        getattr(row_kernels, name)[(len(logits),)](
            logits,
            *arguments,
            logits.shape[1],
            **fixed,
            BLOCK=size,
            WIDE=wide,
            num_warps=max(1, min(8, size // 512)),
        )


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)

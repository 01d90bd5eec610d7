"""Triton code of kernels.py: one program takes one row of logits, a block of columns at a time.

A row is swept twice: for the log-sum-exp and the first choice, then for the loss and the gradient,
which is written over the logits. Nothing else is as long as a row.

D columns, BLOCK columns taken at a time, WIDE the type of sums. A kernel is compiled for each D: a
run has one or two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log_norms(logits, norms, D: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """logits [R, D] → norms [R]"""
    row = tl.program_id(0).to(tl.int64)  # rows · D may be beyond 32 bits
    norm, _choice = _norm(logits + row * D, D, BLOCK, WIDE)
    tl.store(norms + row, norm)


@triton.jit
def row_losses(
    logits,
    taught,
    norms,
    place,
    keep,
    losses,
    choices,
    D: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """logits [R, D] → losses [R], choices [R], and the gradients over the logits.

    KIND of what is taught: "logits" [U, D] whose row place[r] is row r's, with norms [U];
    "shares" [R, D], distributions, not necessarily of sum 1; "labels" [R].
    """
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * D
    columns = tl.arange(0, BLOCK)
    norm, choice = _norm(own, D, BLOCK, WIDE)
    tl.store(choices + row, choice)
    if tl.load(keep + row):
        mass = 1.0
        if KIND == "labels":
            label = tl.load(taught + row)
        elif KIND == "logits":
            other = tl.load(place + row)
            above = taught + other * D
            other_norm = tl.load(norms + other)
        else:
            above = taught + row * D
            mass = _sum(above, D, BLOCK, WIDE)
        parts = tl.zeros((BLOCK,), WIDE)
        for start in range(0, D, BLOCK):
            inside = start + columns < D
            x = tl.load(own + start + columns, mask=inside, other=0.0).to(WIDE)
            if KIND == "labels":
                p = tl.where(start + columns == label, 1.0, 0.0).to(WIDE)
            else:
                p = tl.load(above + start + columns, mask=inside, other=0.0).to(WIDE)
                if KIND == "logits":
                    p = tl.exp(p - other_norm)
            # 0 · ∞, a token that neither side thinks possible, costs nothing.
            counts = inside & ((p != 0) | (x != float("-inf")))
            parts += tl.where(counts, p * (norm - x), 0.0)
            grad = tl.exp(x - norm) * mass - p
            tl.store(own + start + columns, grad.to(logits.dtype.element_ty), mask=inside)
        tl.store(losses + row, tl.sum(parts, 0))
    else:
        # Not times zero: a row without a teacher may hold anything, infinities included.
        for start in range(0, D, BLOCK):
            zero = tl.zeros((BLOCK,), logits.dtype.element_ty)
            tl.store(own + start + columns, zero, mask=start + columns < D)
        tl.store(losses + row, 0.0)


@triton.jit
def _norm(own, D: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """log Σ exp of a row, and its first choice: of equals, the lowest."""
    columns = tl.arange(0, BLOCK)
    top = tl.full((), float("-inf"), WIDE)
    total = tl.full((), 0.0, WIDE)
    choice = tl.full((), 0, tl.int32)
    for start in range(0, D, BLOCK):
        x = tl.load(own + start + columns, mask=start + columns < D, other=float("-inf")).to(WIDE)
        best, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        choice = tl.where(best > top, start + place, choice)
        higher = tl.maximum(best, top)
        # −inf − −inf is not a number: as long as nothing is possible, nothing is subtracted.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)
        top = higher
    return tl.where(top == float("-inf"), 0.0, top) + tl.log(total), choice


@triton.jit
def _sum(row, D: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    parts = tl.zeros((BLOCK,), WIDE)
    for start in range(0, D, BLOCK):
        parts += tl.load(row + start + columns, mask=start + columns < D, other=0.0).to(WIDE)
    return tl.sum(parts, 0)

"""The work of a linear layer and its cross-entropy (linear_loss.py), see work.py.

H hidden, D tokens that can be guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from spectrain.heads.linear_loss import CPU_CHUNK, GPU_CHUNK
from spectrain.heads.work import GATHER, LAY, Product, Shape, Work, layout

# For each logit of a row: its loss and gradient, taught by a distribution or by a token.
SOFT, HARD = 18.5, 9


def row_loss_work(
    shape: Shape,
    rows: Sequence[int],
    hidden: int,
    size: int,
    *,
    learns: bool,
    soft: bool,
    enters: bool = True,
) -> Work:
    """Over an output layer H → D, `rows` of each call. learns: the layer does; soft: taught by
    distributions; enters: a gradient goes on to what the layer reads."""
    chunk = CPU_CHUNK if shape.device == "cpu" else GPU_CHUNK
    at_once = max(1, min(chunk // size, max(rows)))
    calls = sum(max(1, -(-one // at_once)) for one in rows)
    total, weight, logits = sum(rows), hidden * size, at_once * size
    passes = 1 + enters + learns
    product = Product("vocabulary", total, hidden, size, passes, calls, laid=True)
    laid = layout(shape, at_once, weight)
    turned = logits if laid else 0  # oneDNN copies them for the product that makes the gradient
    moments = (
        logits * (3 if soft else 2),
        logits + (turned + weight) * learns,
        logits * (1 + soft) + laid * enters,  # a layout of the transpose is made from a copy
    )
    return Work(
        (product,),
        scored=total * size * (SOFT if soft else HARD),
        streamed=weight * learns * (GATHER * calls + 2 * len(rows)) + LAY * laid * len(rows),
        kept=total * hidden * enters,
        moment=max(moments),
        early=weight * learns * len(rows),
        laid=laid * (1 + enters),
    )

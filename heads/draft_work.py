"""The work of a draft model, see work.py: its decoder on every row, its loss on the anchors.

D draft vocabulary, H hidden size of the draft, Ht of the target.
"""

from __future__ import annotations

from typing import Any

from spectrain.heads.draft_config import CHUNK
from spectrain.heads.work import Product, Shape, Work, decoder, layout


def draft_work(head: Any, shape: Shape) -> Work:
    """Where the logits are more than a chunk, they and the teacher are made twice."""
    config, rows = head.config, shape.anchors(0)
    size, hidden = config.draft_vocab_size, head.decoder.config.hidden_size
    logits, again = rows * size, rows * size > CHUNK
    learns = config.train_embeddings
    products = (
        Product("vocabulary", rows, hidden, size, 2 + learns + again),
        Product("teacher", rows, config.target.hidden_size, size, 1 + again),
    )
    chunk = min(rows, max(1, CHUNK // size))
    weight = hidden * size * learns
    moments = (
        6 * chunk * size + weight * again,  # the gradient that chunks before have left
        chunk * size + 3 * weight,  # that, a chunk's own, and both added up
        chunk * size + 2 * layout(shape, chunk, hidden * size),  # of the transpose, from a copy
    )
    return decoder(head.decoder, shape) + Work(
        products,
        streamed=logits * (28 + 12 * again),
        kept=rows * (hidden + config.target.hidden_size),
        moment=max(moments),
    )

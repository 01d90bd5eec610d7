"""The work of a draft model, see work.py: its decoder on every row, its loss on the anchors.

D draft vocabulary, H hidden size of the draft, Ht of the target.
"""

from __future__ import annotations

from typing import Any

from spectrain.heads.draft_config import CHUNK
from spectrain.heads.work import Product, Shape, Work, decoder


def draft_work(head: Any, shape: Shape) -> Work:
    """Where the logits are more than a chunk, they and the teacher are made twice."""
    config, rows = head.config, shape.anchors(0)
    size, hidden = config.draft_vocab_size, head.decoder.config.hidden_size
    logits, again = rows * size, rows * size > CHUNK
    passes = 3 if config.train_embeddings else 2
    products = (
        Product("vocabulary", rows, hidden, size, passes + again),
        Product("teacher", rows, config.target.hidden_size, size, 1 + again),
    )
    chunk = min(logits, CHUNK)
    return decoder(head.decoder, shape) + Work(
        products,
        streamed=logits * (28 + 12 * again),
        kept=rows * (hidden + config.target.hidden_size),
        moment=chunk * 6.5,
    )

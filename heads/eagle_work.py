"""The work of heads that feed themselves (recurrent.py), see work.py.

Step 0 makes keys at every position; queries, the output and the MLP are asked for at the anchors,
in layers below the last at every position, too. Later steps work on anchors alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from spectrain.core.fast_linear import preferred
from spectrain.heads.in_parts import CPU_ROWS, GPU_ROWS
from spectrain.heads.unrolled_loss import CPU_CHUNK, FEWEST, GPU_CHUNK
from spectrain.heads.work import (
    GATE,
    GATHER,
    NORM,
    RESIDUAL,
    TURN,
    Attention,
    Product,
    Shape,
    Work,
    layer_kept,
    row_loss_work,
    trained,
)

# What a row of a step keeps, of H, of I, of Q·d + G·d: more than a plain layer's, for its norms
# read the embedding and the state apart.
KEPT_HIDDEN, KEPT_WIDE, KEPT_TURNED = 10, 4, 1


def rows_of(head: Any, shape: Shape) -> tuple[int, int]:
    """(anchors of step 0, anchors of all later steps)"""
    counts = [shape.anchors(step) for step in range(head.config.steps)]
    return counts[0], sum(counts[1:])


def stack_work(head: Any, shape: Shape, calls: int) -> Work:
    """Its decoder layers over all steps, without what is before and behind them, in `calls` pieces;
    `kept` of step 0 at every position alone."""
    config, (first, later), every = head.config, rows_of(head, shape), shape.tokens
    hidden, wide = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    seen = [shape.seen(step) for step in range(config.steps)]
    products: list[Product | Attention] = []
    numbers = kept = 0.0
    for index, layer in enumerate(head.stack):
        last = index == len(head.stack) - 1
        asked, held = later + (first if last else every), later + every
        rows = {"k_proj": held, "v_proj": held}
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                count = rows.get(name.rpartition(".")[2], asked)
                sizes = module.in_features, module.out_features
                products.append(Product("layers", count, *sizes, calls=calls))
        sizes = config.num_attention_heads, config.num_key_value_heads, *[config.head_dim] * 2
        if not last:
            products.append(Attention(shape.pairs, *sizes, shape.length))
        pairs = sum(seen) if last else sum(seen[1:])
        products.append(Attention(pairs, *sizes, shape.length, own=True))
        numbers += asked * ((NORM + 2 * RESIDUAL) * hidden + GATE * wide + TURN * query)
        numbers += held * TURN * keys
        kept += every * 2 * keys
        if not last:
            turned = query + keys
            kept += every * layer_kept(hidden, wide, turned)
    return Work(tuple(products), numbers, kept=kept)


def row_kept(head: Any) -> float:
    """Numbers that one row keeps at a step, in all layers."""
    config = head.config
    turned = (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    first = KEPT_HIDDEN * hidden + KEPT_WIDE * wide + KEPT_TURNED * turned
    return first + (len(head.stack) - 1) * layer_kept(hidden, wide, turned)


def eagle3_work(head: Any, shape: Shape) -> Work:
    """The gradient is taken in parts: of all anchors only one part's steps are kept."""
    config, (first, later) = head.config, rows_of(head, shape)
    hidden, size, steps = config.hidden_size, config.draft_vocab_size, config.steps
    total, learns = first + later, head.lm_head.weight.requires_grad
    cpu, plain = shape.device == "cpu", config.loss == "soft_ce"
    chunk = max(FEWEST, (CPU_CHUNK if cpu else GPU_CHUNK) // size)
    pieces = max(1, -(-total // chunk))
    products = (
        Product("fc", shape.tokens, head.fc.in_features, hidden, 3 if shape.live else 2),
        Product("vocabulary", total, hidden, size, 3 if learns else 2, pieces),
        Product("teacher", first, config.target.hidden_size, size, 1, pieces),
    )
    parts = max(1, -(-first // max(1, (CPU_ROWS if cpu else GPU_ROWS) // steps)))
    entry = 2 * NORM * hidden + 4 * 2 * hidden  # two norms, side by side
    numbers = (shape.tokens + later) * entry + total * NORM * hidden
    weight, others = hidden * size, trained(head) - hidden * size * learns
    streamed = weight * learns * (GATHER * pieces + 4) + others * (GATHER * parts + 4)
    scored = (18 if plain else 56) * total * size
    kept = shape.tokens * 6 * hidden + head.reduced * hidden * size
    kept += -(-first // parts) * steps * row_kept(head)
    # The output layer's gradient of a chunk; oneDNN copies the layer twice for that of its input.
    logits, copies = min(chunk, total) * size, 2 if cpu and preferred() else learns
    moment = max(logits * (2.3 if plain else 3.3), logits + copies * weight)
    return stack_work(head, shape, steps * parts) + Work(
        products,
        numbers=numbers,
        scored=scored,
        streamed=streamed,
        kept=kept,
        moment=moment,
        early=trained(head),
    )


def eagle1_work(head: Any, shape: Shape) -> Work:
    """The whole graph is kept; the teacher is made anew at each step."""
    config, (first, later) = head.config, rows_of(head, shape)
    hidden, size, total = config.hidden_size, config.draft_vocab_size, first + later
    both = head.fc.in_features
    each = [shape.anchors(step) for step in range(config.steps)]
    learns = head.readout.weight.requires_grad  # where the target learns, too
    loss = row_loss_work(shape, each, hidden, size, learns=learns, soft=True)
    products = (
        Product("fc", shape.tokens, both, hidden, 3 if shape.live else 2),
        Product("fc", later, both, hidden),
        replace(loss.products[0], part="teacher", inputs=config.target.hidden_size, passes=1),
    )
    numbers = (shape.tokens * 37 + later * 12 + total * 30) * hidden
    kept = (shape.tokens + later) * (both + hidden) + total * row_kept(head)
    return stack_work(head, shape, config.steps) + loss + Work(products, numbers, kept=kept)

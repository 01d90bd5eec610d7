"""The work of heads that feed themselves (recurrent.py), see work.py.

Step 0 makes keys at every position; queries, the output and the MLP are asked for at the anchors,
in layers below the last at every position, too. Later steps work on anchors alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from spectrain.heads import ttt_attention
from spectrain.heads.in_parts import CPU_ROWS, GPU_ROWS
from spectrain.heads.loss_work import row_loss_work
from spectrain.heads.unrolled_loss import COLUMNS, CPU_CHUNK, FEWEST, GPU_CHUNK
from spectrain.heads.work import (
    GATE,
    GATHER,
    LAY,
    NORM,
    RESIDUAL,
    TURN,
    Attention,
    Product,
    Shape,
    Work,
    layer_kept,
    layout,
    trained,
)

# What a row of a step keeps, of H, of I, of Q·d + G·d: more than a plain layer's, for its norms
# read the embedding and the state apart.
KEPT_HIDDEN, KEPT_WIDE, KEPT_TURNED = 10, 4, 1


def rows_of(head: Any, shape: Shape) -> tuple[int, int]:
    """(anchors of step 0, anchors of all later steps)"""
    counts = [shape.anchors(step) for step in range(head.config.steps)]
    return counts[0], sum(counts[1:])


def stack_work(head: Any, shape: Shape, calls: int, part: int | None = None) -> Work:
    """Its decoder layers over all steps, without what is before and behind them, in `calls` pieces,
    of at most `part` anchors, for which weights are laid out; `kept` of step 0 at every position
    alone."""
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
                products.append(Product("layers", count, *sizes, calls=calls, laid=bool(part)))
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
    return Work(tuple(products), numbers, kept=kept, moment=_scores(head, shape, part))


def _scores(head: Any, shape: Shape, part: int | None) -> float:
    """Numbers of attention at the worst moment of a chunk, its way back: weights, their slope, and
    what is hidden (ttt_attention.py)."""
    chunk = ttt_attention.CPU_CHUNK if shape.device == "cpu" else ttt_attention.GPU_CHUNK
    config, most = head.config, min(shape.most_anchors, part or shape.most_anchors)
    scores = min(chunk, most * config.num_attention_heads * shape.length)
    by_group = layout(shape, most, 1)  # oneDNN multiplies single matrices
    return 2.25 * scores / (config.num_key_value_heads if by_group else 1)


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
    parts = max(1, -(-first // max(1, (CPU_ROWS if cpu else GPU_ROWS) // steps)))
    part = -(-first // parts)  # anchors of one
    chunk = max(FEWEST, (CPU_CHUNK if cpu else GPU_CHUNK) // size)
    pieces = max(1, -(-total // chunk))
    products = (
        Product("fc", shape.tokens, head.fc.in_features, hidden, 3 if shape.live else 2),
        Product("vocabulary", total, hidden, size, 3 if learns else 2, pieces, laid=True),
        Product("teacher", first, config.target.hidden_size, size, 1, pieces),
    )
    entry = 2 * NORM * hidden + 4 * 2 * hidden  # two norms, side by side
    weight, others = hidden * size, trained(head) - hidden * size * learns
    # Gradients are added up in pieces that a cache holds.
    gathered = GATHER * (weight * learns * pieces + others * parts)
    numbers = (shape.tokens + later) * entry + total * NORM * hidden + gathered
    streamed = 4 * trained(head)
    scored = (18 if plain else 56) * total * size
    held = _held(head, shape, parts, part, min(max(1, chunk // steps), part))
    return (
        stack_work(head, shape, steps * parts, part)
        + held
        + Work(
            products,
            numbers=numbers,
            scored=scored,
            streamed=streamed + LAY / 2 * held.laid,
            early=trained(head) if parts > 1 else weight * learns,
        )
    )


def _held(head: Any, shape: Shape, parts: int, part: int, some: int) -> Work:
    """At the loss of the last of `parts`, each of `part` anchors, `some` of which are in a chunk of
    logits: what all parts share, the steps of one, and what the parts before have left."""
    config, (first, _) = head.config, rows_of(head, shape)
    hidden, size, steps = config.hidden_size, config.draft_vocab_size, config.steps
    weight, learns, more = hidden * size, head.lm_head.weight.requires_grad, parts > 1
    inside = [one for layer in head.stack for one in layer.modules() if isinstance(one, nn.Linear)]
    layers = layout(shape, part, sum(one.weight.numel() for one in inside))
    keys = 2 * config.num_key_value_heads * config.head_dim
    kept = shape.tokens * (5 * hidden + more * keys) + head.reduced * weight
    kept += (2 * first - part) * 3 * hidden  # what the anchors start from, and its gradient
    kept += part * steps * (row_kept(head) + 2 * hidden)  # states, and their gradient
    rows, columns = some * steps, min(size, COLUMNS)
    logits, teacher = rows * size, (some + steps) * size
    output = layout(shape, rows, weight)
    copied = rows * columns if output else 0  # by oneDNN, for the output layer's gradient
    # Of a table that learns: the sum over steps so far, one step's, and both added up.
    table = (
        (config.embeddings == "own") * config.vocab_size * hidden * (3 if steps > 2 else steps - 1)
    )
    own = 1 if config.loss == "soft_ce" else 8  # of a step's rows, beside its logits
    moments = (
        logits + teacher + own * some * size,
        logits + (copied + columns * hidden) * learns,
        # In the first part a layout of the transpose is made, from a copy.
        logits + output - more * (trained(head) - weight * learns + layers + shape.tokens * keys),
        teacher + layout(shape, some + steps, weight),
        table,
    )
    laid = layers * (1 + more) + 2 * output
    return Work(kept=kept, moment=max(moments), laid=laid)


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
    # A later row has no norms side by side, but states and truth that a loss compares.
    kept = (shape.tokens + later) * (both + hidden) + total * row_kept(head) - later * 2 * hidden
    return stack_work(head, shape, config.steps) + loss + Work(products, numbers, kept=kept)

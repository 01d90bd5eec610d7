"""What one training step asks of a machine, from shapes alone: products, passes, numbers held.

A head says it of itself (`DraftHead.work`); nothing is run, no weight is looked at. Products are
exact: what the maths asks for, with the rows that count. The rest is counted in numbers that pass
through elementwise operations or are held, from factors that tests/heads/test_work.py holds against
real steps.

B rows, T their padded length, R anchors, K steps, H hidden, I MLP width, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from spectrain.core.fast_linear import FEWEST_ROWS, Linear, preferred

# Numbers read and written in a forward and its backward for each number of a tensor that passes
# through: an RMS norm, a residual connection, a gated MLP's inside, a rotation by positions.
NORM, RESIDUAL, GATE, TURN = 36, 5, 15, 25
# A part's gradient of a weight is made, and added to what others left.
GATHER = 4
# Both layouts of a weight are made, that of the transpose from a copy.
LAY = 6


@dataclass(frozen=True)
class Shape:
    """A micro-batch: B rows of T tokens, padding included.

    replies: (begin, end) of each, places counted from the start of its document
    live: features come with a graph (a target that is trained along)
    device: the kind, "cpu" or "cuda": chunks are cut for it
    """

    rows: int
    length: int
    replies: tuple[tuple[int, int], ...]
    live: bool = False
    device: str = "cpu"

    @classmethod
    def of(cls, lengths: Sequence[tuple[int, int]], device: str = "cpu") -> Shape:
        """Rows of (tokens, reply tokens): each a prompt and one reply."""
        replies = tuple((tokens - reply, tokens) for tokens, reply in lengths if reply)
        longest = max((tokens for tokens, _ in lengths), default=0)
        return cls(len(lengths), longest, replies, device=device)

    @classmethod
    def of_reply(cls, reply: Tensor) -> Shape:
        """reply [B, T] of a Batch whose rows are one document each."""
        found = []
        for row in reply.tolist():
            for number in sorted(set(row) - {0}):
                begin = row.index(number)
                found.append((begin, begin + row.count(number)))
        return cls(*reply.shape, tuple(found), device=reply.device.type)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def pairs(self) -> float:
        """Queries and the keys each sees, all rows read causally."""
        return self.rows * self.length * (self.length + 1) / 2

    @property
    def predicting(self) -> int:
        """Rows whose next token lies in a reply."""
        return sum(end - max(begin, 1) for begin, end in self.replies)

    @property
    def most_anchors(self) -> int:
        """Anchors of the row that has most, if each row has one reply; at least 1."""
        return max([1, *(n for n, _ in self._spans(0))])

    def anchors(self, step: int) -> int:
        """Anchors that count at a step (core.batch.counted)."""
        return sum(n for n, _ in self._spans(step))

    def seen(self, step: int) -> float:
        """Keys that all anchors of a step look at, summed: one at place t sees t + 1 + step."""
        return sum(n * (first + last) / 2 for n, (first, last) in self._spans(step))

    def _spans(self, step: int) -> Iterable[tuple[int, tuple[int, int]]]:
        for begin, end in self.replies:
            begin = max(begin, 1)
            yield max(0, end - begin - 1 - step), (begin + step, end - 2)


@dataclass(frozen=True)
class Product:
    """rows × inputs → outputs by one weight, in `calls` pieces. passes: 1 forward alone, 2 with one
    gradient, 3 with those to the input and to the weight. plain: by torch's own product, not by
    core/fast_linear.py. laid: the weight is laid out once for all calls, which is not counted."""

    part: str
    rows: float
    inputs: int
    outputs: int
    passes: int = 3
    calls: float = 1.0
    plain: bool = False
    laid: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inputs * self.outputs * self.passes


@dataclass(frozen=True)
class Attention:
    """pairs: of a query and a key that it sees, of one head; key, value: their sizes.

    length: places a row of keys has; own: by heads/ttt_attention.py, else by the library
    """

    pairs: float
    heads: int
    groups: int
    key: int
    value: int
    length: int
    own: bool = False
    passes: int = 3
    part: str = "attention"

    @property
    def flops(self) -> float:
        return 2.0 * self.pairs * self.heads * (self.key + self.value) * self.passes


@dataclass(frozen=True)
class Work:
    """One micro-batch, forward and backward.

    numbers: what passes through elementwise operations, read and written
    scored: the same of logits: softmax, choice, loss and its gradient
    streamed: the same of tensors that no cache holds: weights, large chunks of logits
    kept: numbers held between forward and backward, beside parameters and the batch
    moment: numbers held beside them at the worst moment (logits, say)
    early: numbers of gradients that are made in the forward already
    laid: of weights that are laid out for oneDNN at the worst moment, in float32 alone
    """

    products: tuple[Product | Attention, ...] = ()
    numbers: float = 0.0
    scored: float = 0.0
    streamed: float = 0.0
    kept: float = 0.0
    moment: float = 0.0
    early: float = 0.0
    laid: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.numbers + other.numbers,
            self.scored + other.scored,
            self.streamed + other.streamed,
            self.kept + other.kept,
            max(self.moment, other.moment),
            self.early + other.early,
            max(self.laid, other.laid),
        )

    def scaled(self, share: float) -> Work:
        """So much of it, with all that it holds: what is done in a share of the steps."""
        products = tuple(
            replace(one, rows=one.rows * share, calls=one.calls * share)
            if isinstance(one, Product)
            else replace(one, pairs=one.pairs * share)
            for one in self.products
        )
        passes = {n: getattr(self, n) * share for n in ("numbers", "scored", "streamed")}
        return replace(self, products=products, **passes)

    @property
    def flops(self) -> dict[str, float]:
        """By part."""
        found: dict[str, float] = {}
        for one in self.products:
            found[one.part] = found.get(one.part, 0.0) + one.flops
        return found

    def forward_alone(self, packed: bool = False) -> Work:
        """The same without a gradient: a third of the passes, nothing kept. packed: the layers are
        laid out for the quickest product, as of a target that is only read."""
        products = tuple(
            replace(one, passes=1, plain=one.plain and not packed)
            if isinstance(one, Product)
            else replace(one, passes=1)
            for one in self.products
        )
        return Work(products, self.numbers / 3, self.scored / 3, moment=self.moment)


def linears(
    module: nn.Module, rows: float, part: str, experts: int | None = None
) -> tuple[Product, ...]:
    """Its linear layers, each on `rows`; of stacked experts [E, out, in] each row asks `experts`
    (None: all)."""
    found = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            sizes = layer.in_features, layer.out_features, 2 + layer.weight.requires_grad
            found.append(Product(part, rows, *sizes, plain=not isinstance(layer, Linear)))
            continue
        for value in layer.parameters(recurse=False):
            if value.ndim == 3 and "experts" in name:
                asked = rows * (experts or len(value))
                sizes = value.shape[2], value.shape[1], 2 + value.requires_grad
                found.append(Product(part, asked, *sizes, plain=True))
    return tuple(found)


def decoder_layer(
    layer: nn.Module, config: Any, rows: float, pairs: float, length: int, part: str = "layers"
) -> Work:
    """A layer of `transformers`. rows it reads; pairs of queries and keys that one head looks at;
    length: keys of a row."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    key = getattr(config, "qk_head_dim", None) or size
    value = getattr(config, "v_head_dim", None) or size
    products = linears(layer, rows, part, getattr(config, "num_experts_per_tok", None))
    return Work(
        (*products, Attention(pairs, heads, groups, key, value, length)),
        numbers=rows * layer_numbers(config.hidden_size, _wide(config), (heads + groups) * size),
        kept=rows * layer_kept(config.hidden_size, _wide(config), (heads + groups) * size),
    )


def masked(pairs: float, config: Any) -> Work:
    """What a mask adds to a layer's attention (core/attention.py): one for each query head that
    shares keys, as bytes and as numbers."""
    share = config.num_attention_heads // (
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    )
    return Work(numbers=5 * share * pairs, kept=1.25 * share * pairs)


def layer_numbers(hidden: int, wide: int, turned: int) -> float:
    """Of a row of a Llama layer; wide: of its MLP, turned: queries and keys."""
    return 2 * (NORM + RESIDUAL) * hidden + GATE * wide + TURN * turned


def layer_kept(hidden: int, wide: int, turned: int) -> float:
    """Of a row of a Llama layer: two norms with what they read, the MLP's inside, queries, keys,
    values and what attention says."""
    return 6 * hidden + 4 * wide + 2 * turned


def _wide(config: Any) -> int:
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:
        return experts * getattr(config, "moe_intermediate_size", config.intermediate_size)
    return config.intermediate_size


def decoder(module: nn.Module, shape: Shape, part: str = "layers") -> Work:
    """All layers of a decoder of `transformers` and its last norm, on every row."""
    config = module.config
    result = Work(
        numbers=shape.tokens * config.hidden_size * (NORM + 2),
        kept=shape.tokens * config.hidden_size * 2,
    )
    for layer in module.layers:
        result += decoder_layer(layer, config, shape.tokens, shape.pairs, shape.length, part)
    return result


def trained(module: nn.Module) -> int:
    """Numbers of its parameters that learn."""
    return sum(value.numel() for value in module.parameters() if value.requires_grad)


def layout(shape: Shape, rows: float, weight: float) -> float:
    """Numbers of one of oneDNN's layouts of a weight that meets so many rows in a product: 0 where
    torch's own product is the better one (core/fast_linear.py)."""
    return weight if shape.device == "cpu" and rows >= FEWEST_ROWS and preferred() else 0

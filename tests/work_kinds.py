"""Heads, targets and batches of chosen sizes, for the tests of what a step takes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import Counter
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM, LlamaConfig

from spectrain.core import attention, fast_linear
from spectrain.core.batch import Batch
from spectrain.core.outline import UNREAD, NoTokenizer
from spectrain.core.target import Target
from spectrain.heads import ttt_attention, work
from spectrain.heads.base import DraftHead
from spectrain.heads.registry import family

# name → family and options
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("eagle1", {}),
    "eagle2 of three steps": ("eagle2", {"steps": 3}),
    "eagle3": ("eagle3", {"steps": 4, "draft_vocab_size": 400}),
    "eagle3 of two layers": ("eagle3", {"steps": 3, "draft_vocab_size": 400, "layers": 2}),
    "eagle3 with embeddings": ("eagle3", {"steps": 4, "embeddings": "own", "loss": "lk_lambda"}),
    "eagle3 with a frozen lm_head": ("eagle3", {"steps": 2, "train_lm_head": False}),
    "medusa": ("medusa", {"steps": 4}),
    "medusa of two blocks": ("medusa", {"steps": 3, "layers": 2}),
    "medusa without blocks": ("medusa", {"steps": 3, "layers": 0}),
    "medusa softly": ("medusa", {"steps": 3, "loss": "soft"}),
    "mtp-parallel": ("mtp-parallel", {}),
    "mtp-sequential": ("mtp-sequential", {}),
    "mtp-sequential softly": ("mtp-sequential", {"loss": "soft", "draft_vocab_size": 400}),
    "mtp-sequential shared": ("mtp-sequential", {"shared": True}),
    "draft": ("draft", {}),
    "draft with embeddings": ("draft", {"train_embeddings": True, "layers": 3}),
}
# hidden, MLP, query heads, kv heads, head size, vocabulary; rows, tokens, share in replies
SIZES = {
    "long": ((128, 320, 4, 2, 32, 2000), (2, 384, 0.5)),
    "wide": ((192, 256, 8, 2, 16, 1200), (3, 128, 0.9)),
}
# More anchors than EAGLE-3 takes in one part, more logits than a chunk has.
LARGE = {"parts": ((96, 256, 4, 2, 24, 6000), (2, 800, 0.9))}


def target_of(sizes: tuple[int, ...], layers: int = 4) -> Target:
    """A Llama with random weights."""
    hidden, wide, heads, groups, size, vocab = sizes
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=wide,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        vocab_size=vocab,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    return Target(model, NoTokenizer(vocab), "random", UNREAD)


def head_of(target: Target, kind: str) -> DraftHead:
    """A head with random weights, bound to its target."""
    name, options = KINDS[kind]
    made = family(name)
    config = made.configure(made.Options(**options), target)
    return made(config).bind(target.readout).train()


def batch_of(target: Target, head: Any, rows: int, length: int, share: float) -> Batch:
    """Rows of a prompt and a reply, every token of which the head can guess."""
    reply = torch.zeros(rows, length, dtype=torch.int64)
    reply[:, length - round(share * length) :] = 1
    tokens = torch.randint(0, head.config.draft_vocab_size, reply.shape)
    width = len(head.needs.aux_layers) * target.hidden_size
    aux = torch.randn(rows, length, width) if width else None
    last = torch.randn(rows, length, target.hidden_size)
    return Batch(tokens, reply, aux, last, tokens)


@contextmanager
def counted() -> Any:
    """A Counter; of our own attention only the products are counted, as of the library's; torch's
    products in the place of oneDNN's, which it would not see."""
    counter, kind = Counter(), ttt_attention._Attention

    def products_alone(function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with _disable_current_modes(), Counter() as inner:
                out = function(*arguments)
            counter.flops += inner.flops
            return out

        return staticmethod(run)

    with pytest.MonkeyPatch.context() as patch:
        for place in (fast_linear, work):
            patch.setattr(place, "preferred", lambda: False)
        for name in ("forward", "backward"):
            patch.setattr(kind, name, products_alone(getattr(kind, name)))
        with counter:
            yield counter


@contextmanager
def held(laid: bool) -> Any:
    """A Counter of all tensors. laid: weights are laid out for oneDNN, whose layouts and copies
    are hidden from a Counter: so plain tensors of their sizes stand in for them."""

    def pack(right: Tensor) -> Tensor:
        return right.detach().contiguous().clone()

    def multiply(left: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(left.contiguous(), packed, bias)

    with pytest.MonkeyPatch.context() as patch:
        for place in (fast_linear, work):
            patch.setattr(place, "preferred", lambda: laid)
        patch.setattr(fast_linear, "_pack", pack)
        patch.setattr(fast_linear, "_multiply", multiply)
        with Counter() as counter:
            yield counter

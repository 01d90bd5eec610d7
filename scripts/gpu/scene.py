"""What the parts of gpu_validate.py share: seeded models of made-up sizes, prompts, time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from spectrain.core import attention
from spectrain.core.target import Target
from spectrain.heads.base import DraftHead
from spectrain.heads.registry import family
from spectrain.heads.tree import TreeDefaults, TreeShape

STATIC = TreeShape(paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0,) * 4))
WAYS = {
    "chain": {"draft_tokens": 4},
    "static tree": {"tree": STATIC},
    "grown tree": {"tree": TreeDefaults(top_k=4, depth=4, nodes=16)},
}
# (layers, H, I, query heads, kv heads, V)
SIZES = {
    "small": (8, 512, 1024, 8, 4, 2048),
    "8B": (32, 4096, 14336, 32, 8, 128256),
    "tiny": (5, 48, 96, 4, 2, 392),  # in the place of "small" when rehearsing
    "tiny 8B": (5, 64, 96, 4, 2, 640),
}
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and nobody minds.",
    "How many apples are left when two of seven are eaten?",
    "def add(a, b):\n    return a + b\n",
]


@dataclass
class Scene:
    """device · rehearse: tiny shapes, to try the script out · ends: when the part has to stop"""

    device: torch.device
    rehearse: bool
    ends: float = 0.0
    left_out: list[str] = field(default_factory=list)

    def begin(self, budget: float) -> None:
        self.ends, self.left_out = time.monotonic() + budget, []

    def time_for(self, what: str) -> bool:
        """Whether there is; if not, `what` is told as left out."""
        if time.monotonic() < self.ends:
            return True
        self.left_out.append(what)
        return False

    def target(self, size: str, dtype: torch.dtype) -> Target:
        """A Llama of this size with seeded random weights, made on the device."""
        if self.rehearse:
            size = {"small": "tiny", "8B": "tiny 8B"}[size]
        layers, hidden, inner, heads, groups, vocabulary = SIZES[size]
        tokenizer = make_tokenizer(min(vocabulary, 4096))
        ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        config = AutoConfig.for_model(
            "llama",
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            max_position_embeddings=131072 if size == "8B" else 2048,
            tie_word_embeddings=False,
            # Logits far enough apart that an argmax is no tie.
            initializer_range=0.02 if size == "8B" else 0.15 if self.rehearse else 0.05,
            **{f"{name}_token_id": value for name, value in ids.items()},
        )
        torch.manual_seed(0)
        with self.device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention.NAME
            )
        model.generation_config = GenerationConfig(eos_token_id=ids["eos"], pad_token_id=ids["pad"])
        target = Target(model.to(self.device), tokenizer, size, f"{size:>16}")
        target.readout.usable = target.vocab_size  # though the tokenizer may have fewer
        return target

    def prompts(self) -> list[Tensor]:
        """Of unequal length, each said twice, so that there is something to look up; the longest
        grows out of one view of the cache into the next."""
        lengths = (9, 1, 5, 28) if self.rehearse else (30, 1, 7, 245, 12, 60, 3, 100)
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(3, 380, (n,), generator=generator).repeat(2) for n in lengths]


def make_head(target: Target, name: str, **options: Any) -> DraftHead:
    """A head of the family with seeded weights."""
    torch.manual_seed(2)
    kind = family(name)
    counts = torch.randint(0, 50, (target.vocab_size,))
    head = kind.create(kind.Options(**options), target, counts)
    return head.to(target.dtype).eval()


@torch.no_grad()
def good_head(target: Target, spoilt: float) -> DraftHead:
    """All of the target's own layers as a draft model: right about everything, but for the noise
    on its output layer, `spoilt` times as large as the weights."""
    head = make_head(target, "draft", layers=target.num_layers, steps=4)
    weight = head.lm_head.weight
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(weight.shape, generator=generator).to(weight)
    weight += spoilt * weight.float().std().to(weight.dtype) * noise
    return head


def make_tokenizer(size: int):
    """A byte-level BPE tokenizer, trained on the spot and filled up to `size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.add_tokens([f"<{number}>" for number in range(size - len(tokenizer))])
    return tokenizer

"""Fixtures: a tiny seeded target with a real tokenizer, made once per test run; no network."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: its threads spin otherwise
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import socket
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # tiny tensors; xdist brings the parallelism

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and nobody minds.",
    "How many apples are left when two of seven are eaten?",
    "def add(a, b):\n    return a + b\n",
    "Summarise the following text in one sentence, please.",
    "Grüße aus Köln! Ça va? 你好 🙂",
    "user assistant system question answer number letter word",
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Every connection that leaves this machine fails."""
    real = socket.socket.connect

    def connect(self, address):
        host = address[0] if isinstance(address, tuple) else "local"
        if host not in ("127.0.0.1", "::1", "localhost", "local"):
            raise OSError(f"network is blocked in tests: {address}")
        return real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


def make_tokenizer():
    """A byte-level BPE tokenizer of 384 entries with chat tokens and a template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tiny(folder: Path, tokenizer, *, seed: int = 0, **changes) -> Path:
    """A seeded 4-layer Llama (head_dim ≠ H / heads, grouped kv heads) saved with its tokenizer."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 392,  # padded: 8 rows beyond the tokenizer
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.15,  # peaked enough that argmaxes are not ties
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | changes
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory, tokenizer) -> Path:
    """Folder of the tiny target."""
    return save_tiny(tmp_path_factory.mktemp("target") / "tiny", tokenizer)


@pytest.fixture(scope="session")
def tiny(tiny_path):
    """The tiny target, loaded (weights not packed)."""
    from spectrain.core.target import Target

    return Target.load(str(tiny_path), pack_weights=False)

"""What several tests make: a tiny target, a random head, random rows."""

from __future__ import annotations

from pathlib import Path

import torch

from spectrain.core.batch import Batch
from spectrain.heads.eagle3 import Eagle3Head, Eagle3Options

# A small configuration that every supported architecture takes.
SIZES = {
    "vocab_size": 392,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 2,
}
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


def gemma(folder: Path, tokenizer):
    """A loaded Gemma 2 with weights so large that its soft cap matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from spectrain.core.target import Target

    torch.manual_seed(0)
    sizes = SIZES | {"initializer_range": 1.0, "final_logit_softcapping": 4.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target.load(str(folder), pack_weights=False)


def make_head(target, *, steps=4, draft_vocab=120, seed=0, wild=True, **options) -> Eagle3Head:
    """A head with random weights large enough that every path matters."""
    torch.manual_seed(seed)
    counts = torch.randint(0, 50, (target.vocab_size,))
    options = Eagle3Options(steps=steps, draft_vocab_size=draft_vocab, **options)
    head = Eagle3Head.create(options, target, counts)
    if wild:
        for parameter in head.parameters():
            with torch.no_grad():
                if parameter.dim() == 2:
                    parameter.normal_(std=0.15)
                else:
                    parameter.uniform_(0.5, 1.5)
    return head.eval()


@torch.no_grad()
def make_batch(target, head, tokens, reply) -> Batch:
    features = target.forward(tokens, aux_layers=head.needs.aux_layers)
    argmax = target.logits(features.last).argmax(-1)
    return Batch(tokens, reply, features.aux, features.last, argmax)


def random_rows(generator, rows=2):
    """Rows with two replies each, at random places."""
    length = int(torch.randint(12, 40, (), generator=generator))
    tokens = torch.randint(3, 380, (rows, length), generator=generator)
    reply = torch.zeros(rows, length, dtype=torch.int64)
    for row in range(rows):
        cuts = torch.randperm(length - 1, generator=generator)[:4].sort().values + 1
        reply[row, cuts[0] : cuts[1]] = 1
        reply[row, cuts[2] : cuts[3]] = 2
    return tokens, reply

"""Tokenizers of every kind that chat models have, trained on a few sentences in a second.

All of them know the special tokens of all styles (chat_styles.py), so that each style can be tried
with each kind.
"""

from __future__ import annotations

import json
import re

from chat_styles import SPECIAL
from tiny_models import SENTENCES
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

TEXTS = [*SENTENCES, "[INST] [/INST] <<SYS>> <</SYS>>", "user\n\nassistant\n\nmodel\n\nsystem\n"]
# In the manner of Llama 3 and Qwen: a space goes with the word behind it, line breaks with the
# punctuation before them.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level():
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre.Sequence(
        [
            pre.Split(Regex(SPLIT), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return _trained(core, trainers.BpeTrainer, initial_alphabet=pre.ByteLevel.alphabet())


def metaspace():
    """SentencePiece as in newer Mistral: ▁ before the first word of a text only."""
    return _sentencepiece(pre.Metaspace(prepend_scheme="first", split=False), None)


def legacy_metaspace():
    """SentencePiece as in Llama 2: ▁ before every stretch between special tokens."""
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return _sentencepiece(None, normalizers.Sequence(marks))


def unigram():
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    return _trained(core, trainers.UnigramTrainer, unk_token="<unk>")


def wordpiece():
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre.Whitespace()
    core.decoder = decoders.WordPiece()
    return _trained(core, trainers.WordPieceTrainer)


class SlowTokenizer(PreTrainedTokenizer):
    """A python tokenizer: words, or else characters."""

    def __init__(self, **more) -> None:
        words = {part for text in TEXTS for part in re.findall(r"\w+|\W", text)}
        entries = [*SPECIAL, *sorted(words | set("".join(TEXTS)))]
        self._vocab = {entry: number for number, entry in enumerate(entries)}
        self._entries = entries
        super().__init__(**more)

    @property
    def vocab_size(self) -> int:
        return len(self._vocab)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocab, **self.added_tokens_encoder)

    def _tokenize(self, text: str, **more) -> list[str]:
        parts = re.findall(r"\w+|\W", text)
        return [t for part in parts for t in ([part] if part in self._vocab else part)]

    def _convert_token_to_id(self, token: str) -> int:
        return self._vocab.get(token, self._vocab["<unk>"])

    def _convert_id_to_token(self, index: int) -> str:
        return self._entries[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def slow():
    tokenizer = SlowTokenizer(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_tokens(_special(), special_tokens=True)
    return tokenizer


KINDS = {
    kind.__name__: kind
    for kind in (byte_level, metaspace, legacy_metaspace, unigram, wordpiece, slow)
}
LOSSLESS = ("byte_level", "metaspace")  # any text decodes to itself, but for one leading space


def _sentencepiece(pre_tokenizer, normalizer):
    """BPE of pieces that begin with ▁ or hold none, other characters as bytes."""
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.pre_tokenizer = pre.Metaspace(prepend_scheme="always")
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*SPECIAL, *names], show_progress=False
    )
    core.train_from_iterator(TEXTS * 4, trainer)
    state = json.loads(core.to_str())
    # As special tokens, which the trainer made of them, they would be found in any text.
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in names]
    core = Tokenizer.from_str(json.dumps(state))
    core.pre_tokenizer, core.normalizer = pre_tokenizer, normalizer
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrapped(core)


def _trained(core, trainer, **more):
    core.train_from_iterator(
        TEXTS * 4,
        trainer(vocab_size=420, special_tokens=list(SPECIAL), show_progress=False, **more),
    )
    return _wrapped(core)


def _wrapped(core):
    core.add_special_tokens(_special())
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _special() -> list[AddedToken]:
    swallow = ("<|user|>", "<|assistant|>")
    return [
        AddedToken(name, special=True, normalized=False, rstrip=name in swallow) for name in SPECIAL
    ]

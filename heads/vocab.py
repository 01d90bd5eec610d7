"""The draft vocabulary: which D of the target's V tokens a head can guess.

d2t [D] int64 holds OFFSETS (target id = i + d2t[i]), t2d [V] bool says which target tokens are in.
The map belongs to the head: it is saved with it and kept on warm start and resume.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from spectrain.core.errors import SpectrainError

DEFAULT_SIZE = 32000


def choose(size: int | None, target: Any, counts: Tensor) -> Tensor:
    """Ids [D] of the draft vocabulary for a core.target.Target: the `size` most frequent tokens,
    those of `always_in` among them; None: 32000, or all there are."""
    size = size_of(size or min(DEFAULT_SIZE, target.readout.usable), target)
    return choose_tokens(counts, size, always_in(target, size), target.readout.usable)


def size_of(size: int | None, target: Any) -> int:
    """D for a core.target.Target; None: all that it can say. Raises SpectrainError."""
    usable = target.readout.usable
    _require_size(size or usable, usable)
    return size or usable


def always_in(target: Any, size: int) -> list[int]:
    """Tokens of a core.target.Target that a draft vocabulary of `size` tokens holds whatever the
    text it is chosen by: special and stop tokens, and single bytes, of which any text can be made.

    Bytes only where they are at most a quarter of it: in less than some 1024 tokens they would
    take the room of what is said.
    """
    ids = {*target.tokenizer.all_special_ids, *target.stop_ids}
    if 4 * len(found := byte_tokens(target.tokenizer)) <= size:
        ids |= found
    return sorted(i for i in ids if i < target.readout.usable)


def byte_tokens(tokenizer: Any) -> set[int]:
    """Ids of the tokens that stand for one byte each; empty for a tokenizer without any."""
    vocabulary = tokenizer.get_vocab()
    kinds = {
        ("Ġ", " "): ByteLevel.alphabet(),
        ("<0x41>", "A"): [f"<0x{byte:02X}>" for byte in range(256)],  # of byte fallback
    }
    for (token, text), names in kinds.items():
        # The names may be ordinary text to another tokenizer: it is asked.
        if token in vocabulary and tokenizer.convert_tokens_to_string([token]) == text:
            return {vocabulary[name] for name in names if name in vocabulary}
    return set()


def choose_tokens(counts: Tensor, size: int, always: list[int], usable: int) -> Tensor:
    """The `size` tokens to keep, as ascending target ids [D].

    counts [V]: how often each token is supervised. always: ids that are kept whatever their count
    (without stop tokens a draft never ends). usable: ids ≥ usable are padding rows of the target's
    lm_head and never drafted. Ties go to the smaller id.
    """
    _require_size(size, usable)
    pinned = sorted({i for i in always if 0 <= i < usable})
    if len(pinned) > size:
        raise SpectrainError(
            f"draft_vocab_size {size} has no room for the {len(pinned)} special tokens",
            fix="choose a larger draft_vocab_size",
        )
    score = counts[:usable].to(torch.int64).clone()
    score[pinned] = torch.iinfo(torch.int64).max
    return torch.sort(score, descending=True, stable=True).indices[:size].sort().values


def _require_size(size: int, usable: int) -> None:
    if not 1 <= size <= usable:
        raise SpectrainError(
            f"draft_vocab_size {size} is not between 1 and {usable}",
            fix="choose a size up to the target's vocabulary",
        )


def maps(ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Target ids [D] ascending → (d2t [D] offsets, t2d [V] bool)."""
    d2t = ids - torch.arange(len(ids))
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return d2t, t2d


def check_maps(d2t: Tensor, t2d: Tensor, where: str) -> None:
    """Refuse a map whose two halves do not say the same (an absolute map, a permuted head)."""
    ids = torch.arange(len(d2t)) + d2t.cpu()
    inside = bool(((ids >= 0) & (ids < len(t2d))).all())
    if not inside or not torch.equal(ids, t2d.cpu().nonzero().flatten()):
        raise SpectrainError(
            "d2t and t2d do not describe the same draft vocabulary "
            "(d2t has to hold offsets: target id = i + d2t[i])",
            where=where,
            fix="the checkpoint is damaged or was converted wrongly",
        )

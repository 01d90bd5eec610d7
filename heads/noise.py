"""Noise on features that depends on the step and on the conversation, and on nothing else.

However a batch is cut, padded, packed or shared between processes, a conversation (a document of a
row) meets the same noise in a step; so micro-batches change memory and speed only.

B batch, T length, D documents, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.core.batch import Batch

_FACTOR = 6364136223846793005  # odd: multiplying by it loses nothing modulo 2^64


@dataclass
class _Documents:
    """number [B, T] of the document at each place · position [B, T] in it · begin [D] flat place of
    its first token · lengths [D] tokens up to the end of its last reply; what follows is read by no
    anchor."""

    number: Tensor
    position: Tensor
    begin: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, batch: Batch) -> _Documents:
        position = batch.positions
        first = (position == 0).flatten()
        number, begin = first.cumsum(0) - 1, first.nonzero().squeeze(1)
        ends = ((batch.reply > 0) * (position + 1)).flatten()
        lengths = torch.zeros_like(begin).scatter_reduce(0, number, ends, "amax")
        return cls(number.view_as(position), position, begin, lengths)


def document_lengths(batch: Batch) -> Tensor:
    """Tokens up to the end of the last reply of the document at each place, [B, T]."""
    documents = _Documents.of(batch)
    return documents.lengths[documents.number]


def document_noise(batch: Batch, like: Tensor) -> Tensor:
    """Uniform in [−1, 1), [B, T, W] as `like`, 0 behind a document's last reply.

    Drawn from torch's seed, which the training loop sets anew for each step, and the document's
    tokens.
    """
    documents = _Documents.of(batch)
    number, position, lengths = documents.number, documents.position, documents.lengths
    factors = torch.full_like(batch.tokens[0], _FACTOR).cumprod(0)  # wraps around, as it should
    hashed = (batch.tokens + 1) * (position < lengths[number]) * factors[position]
    keys = torch.zeros_like(lengths).index_add(0, number.flatten(), hashed.flatten())
    noise = torch.zeros_like(like)
    flat = noise.flatten(0, 1)
    generator = torch.Generator(like.device)
    some = lengths > 0
    for key, begin, length in torch.stack([keys, documents.begin, lengths], dim=1)[some].tolist():
        generator.manual_seed((key ^ torch.initial_seed()) & (2**63 - 1))
        drawn = torch.rand(length, like.shape[2], generator=generator, device=like.device)
        flat[begin : begin + length] = (2 * drawn - 1).to(like.dtype)
    return noise

"""Noise on a row's features that depends on the step and on the row, and on nothing else.

However a batch is cut, padded or shared between processes, a row meets the same noise in a step; so
micro-batches change memory and speed only.

B batch, T length, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.core.batch import Batch

_FACTOR = 6364136223846793005  # odd: multiplying by it loses nothing modulo 2^64


def row_lengths(batch: Batch) -> Tensor:
    """Tokens up to the end of each row's last reply, [B]; what follows is read by no anchor."""
    place = torch.arange(1, batch.reply.shape[1] + 1, device=batch.reply.device)
    return ((batch.reply > 0) * place).amax(1)


def row_noise(batch: Batch, like: Tensor) -> Tensor:
    """Uniform in [−1, 1), [B, T, W] as `like`, 0 behind a row's last reply.

    Drawn from torch's seed, which the training loop sets anew for each step, and the row's tokens.
    """
    lengths = row_lengths(batch)
    inside = torch.arange(like.shape[1], device=like.device) < lengths[:, None]
    factors = torch.full_like(batch.tokens[0], _FACTOR).cumprod(0)  # wraps around, as it should
    keys = ((batch.tokens + 1) * inside * factors).sum(1)
    noise = torch.zeros_like(like)
    generator = torch.Generator(like.device)
    for row, (key, length) in enumerate(torch.stack([keys, lengths], dim=1).tolist()):
        generator.manual_seed((key ^ torch.initial_seed()) & (2**63 - 1))
        drawn = torch.rand(length, like.shape[2], generator=generator, device=like.device)
        noise[row, :length] = (2 * drawn - 1).to(like.dtype)
    return noise

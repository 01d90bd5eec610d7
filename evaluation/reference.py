"""What the engine's sampling is compared with: the library's own warpers, nothing of ours.

n rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spectrain.generator.sampling import Sampling


def library_warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [n, V] → probabilities [n, V] on the CPU, in the order of `generate`."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    nothing = torch.empty(len(logits), 0, dtype=torch.int64)
    return warpers(nothing, logits.float().cpu()).softmax(-1)

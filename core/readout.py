"""What a head shares with its target: the embedding, the output layer and the soft cap.

H hidden size, V rows of lm_head, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spectrain.core.packing import PackedLinear, can_pack
from spectrain.core.quantise import QuantisedLinear, fits


class Readout:
    """Embedding and output layer of a target; frozen, never part of a head's own parameters."""

    def __init__(
        self, embedding: nn.Module, lm_head: nn.Linear, softcap: float | None, usable: int
    ) -> None:
        self.embedding = embedding
        self.weight = lm_head.weight  # [V, H]
        self.bias = lm_head.bias
        self.softcap = softcap
        self.vocab_size = lm_head.weight.shape[0]
        self.usable = min(usable, self.vocab_size)  # rows beyond the tokenizer are padding
        self._lm_head: nn.Module = lm_head

    @classmethod
    def of(cls, model: nn.Module, config, tokenizer) -> Readout:
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(
            model.get_input_embeddings(), model.get_output_embeddings(), softcap, len(tokenizer)
        )

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] → [..., H]"""
        return self.embedding(ids)

    def logits(self, last: Tensor) -> Tensor:
        """last [..., H] → [..., V]"""
        return self.cap(self._lm_head(last))

    def cap(self, logits: Tensor) -> Tensor:
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap

    def rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output rows of some tokens, ids [D] → weight [D, H], bias [D] or None."""
        return self.weight[ids], None if self.bias is None else self.bias[ids]

    def pack(self) -> None:
        """Lay the output layer out for the CPU's kernels; the plain weight stays for `rows`."""
        linear = self._lm_head
        if can_pack() and isinstance(linear, nn.Linear) and linear.weight.dtype == torch.float32:
            self._lm_head = PackedLinear(linear)

    def quantise(self) -> None:
        """Keep the output layer as int8 for `logits`; the plain weight, which an embedding may
        share, stays as it is for `rows`."""
        if fits(self._lm_head):
            self._lm_head = QuantisedLinear(self._lm_head)

"""What the target's logits depend on besides the model: applied per token position, not per step.

B rows, V vocabulary, M tokens of a block: node 0 is the root, the token the target chose last; the
rest was drafted (generator/tree.py). Of each row is kept what precedes the root::

    seen [B, V]   the tokens of the prompt and of the reply before the root
    new  [B]      new tokens before the root: the root is new token number `new`, from 0; the logits
                  at a node of depth d choose number new + 1 + d

Like transformers' RepetitionPenalty-, MinNewTokensLength- and SuppressTokensLogitsProcessor, in the
order of `generate`, but at all nodes of a tree at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError


class Processors:
    """State of `rows` rows; all but `take` change it in place and without a look at its values."""

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        device: torch.device | str,
        stop_ids: Sequence[int] = (),
        repetition_penalty: float = 1.0,
        min_new_tokens: int = 0,
        suppress: Sequence[int] = (),
    ) -> None:
        """repetition_penalty: 1 is none, above 1 makes seen tokens rarer (CTRL, arXiv 1909.05858,
        section 4.1); min_new_tokens: no stop id before so many; suppress: ids never chosen."""
        if not 0 < repetition_penalty < float("inf"):
            raise SpectrainError(
                f"repetition_penalty {repetition_penalty} is not a number > 0", fix="1 turns it off"
            )
        if min_new_tokens < 0:
            raise SpectrainError(f"min_new_tokens {min_new_tokens} is negative")
        for token in suppress:
            if not 0 <= token < vocab_size:
                raise SpectrainError(
                    f"{token} is no token of 0 … {vocab_size - 1}", where="suppress"
                )
        never = set(suppress)
        if len(never | (set(stop_ids) if min_new_tokens else set())) >= vocab_size:
            raise SpectrainError("no token is left to choose", where="suppress")
        self.vocab_size, self.penalty = vocab_size, repetition_penalty
        self.min_new_tokens = min_new_tokens
        self._never = _mask(never, vocab_size, device)
        self._stops = _mask(stop_ids, vocab_size, device)
        # One column more takes what is no token of the row: padding, rejected drafts.
        self._seen = torch.zeros(rows, vocab_size + 1, dtype=torch.bool, device=device)
        self.new = torch.zeros(rows, dtype=torch.long, device=device)

    @staticmethod
    def needed(
        repetition_penalty: float = 1.0, min_new_tokens: int = 0, suppress: Sequence[int] = ()
    ) -> bool:
        """Whether these settings change anything; if not, make none and spend nothing."""
        return repetition_penalty != 1 or min_new_tokens != 0 or len(suppress) > 0

    @property
    def seen(self) -> Tensor:
        return self._seen[:, : self.vocab_size]

    def admit(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Rows [A] begin anew with prompts [A, n], padded on the right, of counts [A] tokens.

        The root of such a row will be its new token number 0, which `first` helps to choose.
        """
        fresh = torch.zeros_like(self._seen[:1]).repeat(len(rows), 1)
        self._seen.index_copy_(0, rows, self._add(fresh, tokens, counts))
        self.new.index_fill_(0, rows, 0)

    def commit(self, tokens: Tensor, kept: Tensor) -> None:
        """The first kept [B] of tokens [B, w] are now before the root: the old root and the
        accepted drafts, in order (0: the row stays)."""
        self._add(self._seen, tokens, kept)
        self.new += kept

    def take(self, rows: Tensor) -> None:
        """Only rows [A] go on, in this order."""
        self._seen, self.new = self._seen[rows], self.new[rows]

    def first(self, rows: Tensor, logits: Tensor) -> Tensor:
        """Logits [A, V] at the ends of the prompts of `rows` [A], for their new token number 0."""
        logits = logits.float()
        logits = torch.where(self.seen[rows], self._penalised(logits), logits)
        return self._forbid(logits, torch.zeros_like(rows))

    def apply(
        self,
        logits: Tensor,
        tokens: Tensor,
        depths: Tensor | None = None,
        ancestors: Tensor | None = None,
    ) -> Tensor:
        """logits [B, M, V] at the nodes with tokens [B, M] → [B, M, V], float32.

        ancestors [B, M, M] or [M, M] bool: a node's path from the root, itself included (None: a
        chain); depths [B, M] or [M], by default read from it. A node has seen all that is before
        the root and its own path.
        """
        size = tokens.shape[1]
        if ancestors is None:
            ancestors = torch.ones(size, size, dtype=torch.bool, device=tokens.device).tril()
        if depths is None:
            depths = ancestors.sum(-1) - 1
        logits = logits.float()
        if self.penalty != 1:
            # Of the path only its own tokens are looked at. A token may stand in the block twice:
            # each of its places gets the same value, so their order does not matter.
            equal = tokens[:, :, None] == tokens[:, None]
            on_path = ancestors.float() @ equal.float() > 0  # [B, M, M] node, place of a token
            index = tokens[:, None].expand(-1, size, -1)
            known = on_path | self.seen.gather(1, tokens)[:, None]
            of_block = logits.gather(-1, index)
            of_block = torch.where(known, self._penalised(of_block), of_block)
            logits = torch.where(self.seen[:, None], self._penalised(logits), logits)
            logits = logits.scatter(-1, index, of_block)
        return self._forbid(logits, self.new[:, None] + 1 + depths)

    def _penalised(self, logits: Tensor) -> Tensor:
        return torch.where(logits < 0, logits * self.penalty, logits / self.penalty)

    def _forbid(self, logits: Tensor, number: Tensor) -> Tensor:
        """logits [..., V] that choose new token number [...]"""
        early = (number < self.min_new_tokens)[..., None]
        return logits.masked_fill(early & self._stops | self._never, float("-inf"))

    def _add(self, seen: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """Mark the first counts [B] of tokens [B, n] in seen [B, V+1], in place."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        # Ids beyond lm_head's rows can stand in a prompt, but are never chosen.
        index = tokens.clamp(max=self.vocab_size)
        index = torch.where(place < counts[:, None], index, self.vocab_size)
        return seen.scatter_(1, index, True)


def _mask(ids: Sequence[int] | set[int], size: int, device: torch.device | str) -> Tensor:
    """bool [size]; ids beyond it are nobody's to choose."""
    mask = torch.zeros(size, dtype=torch.bool)
    mask[[token for token in ids if token < size]] = True
    return mask.to(device)

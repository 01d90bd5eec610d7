"""Replies of the loaded target itself, for training (a `data.questions.Backend`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from spectrain.core.target import Target
from spectrain.data.questions import Reply, Unit
from spectrain.generator.completion import Completion
from spectrain.generator.decode import complete


class OwnTarget:
    """Answers a unit as one batch of plain decoding; the same unit gets the same replies.

    What is drawn for a reply depends on its question alone; which others it shares a batch with
    can matter by rounding only.
    """

    def __init__(self, target: Target, max_new_tokens: int, top_p: float) -> None:
        self.target, self.max_new_tokens, self.top_p = target, max_new_tokens, top_p
        stops = ",".join(map(str, target.stop_ids))
        self.identity = f"{target.fingerprint}/{target.dtype}/{stops}/{max_new_tokens}/{top_p}"

    def answer(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, list[Reply]]]:
        for unit in units:
            done = complete(
                self.target,
                [torch.tensor(question.ids) for question in unit.questions],
                self.max_new_tokens,
                temperature=unit.temperature,
                top_p=self.top_p,
                numbers=[question.seed for question in unit.questions],
            )
            yield unit, [Reply(self._text(one), one.finish, one.tokens) for one in done]

    def _text(self, done: Completion) -> str:
        # Special tokens inside a reply (a block of thought) are for the template to judge.
        tokens = done.tokens[: len(done.tokens) - (done.finish == "stop")]
        return self.target.tokenizer.decode(tokens)

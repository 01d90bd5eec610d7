"""Whether two tokenizers agree on every id: what a draft model and its target have to share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spectrain.core.errors import SpectrainError

# Padding is left out: it is never drafted, and fine-tunes of one model often disagree about it.
_ROLES = ("bos_token_id", "eos_token_id", "unk_token_id")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and the ids that end a reply of its model."""

    tokenizer: Any
    stop_ids: tuple[int, ...]

    @classmethod
    def of(cls, target: Any) -> Vocabulary:
        """That of a core.target.Target."""
        return cls(target.tokenizer, target.stop_ids)

    def require_same(self, target: Vocabulary, where: str) -> None:
        """Raise SpectrainError unless the target's vocabulary is this one, a draft's."""
        difference = self.first_difference(target)
        if difference is not None:
            raise SpectrainError(
                f"the draft's tokenizer is not the target's: {difference}",
                where=where,
                fix="use a draft with the target's tokenizer",
            )

    def first_difference(self, target: Vocabulary) -> str | None:
        """The first entry in which they differ, or None.

        Compared are the tokens id by id, the roles of special tokens, and the stop ids.
        """
        own, theirs = (
            {index: token for token, index in one.tokenizer.get_vocab().items()}
            for one in (self, target)
        )
        different = [i for i in own.keys() | theirs.keys() if own.get(i) != theirs.get(i)]
        if different:
            i = min(different)
            return f"id {i}: the draft has {_shown(own, i)}, the target {_shown(theirs, i)}"
        for role in _ROLES:
            one, two = getattr(self.tokenizer, role), getattr(target.tokenizer, role)
            if one != two:
                return f"{role}: the draft has {one}, the target {two}"
        one, two = sorted(self.stop_ids), sorted(target.stop_ids)
        return None if one == two else f"stop ids: the draft has {one}, the target {two}"


def _shown(vocabulary: dict[int, str], index: int) -> str:
    return repr(vocabulary[index]) if index in vocabulary else "nothing"

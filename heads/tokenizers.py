"""Whether two tokenizers agree on every id: what a draft model and its target have to share.

Drafts are spoken in ids, so the ids are all that counts. A base model and its chat version may end
their replies with different tokens and still draft for each other: the target decides what stays.
"""

from __future__ import annotations

from typing import Any

from spectrain.core.errors import SpectrainError


def require_same(draft: Any, target: Any, where: str) -> None:
    """Raise SpectrainError unless the tokenizers of draft and target have the same ids."""
    difference = first_difference(draft, target)
    if difference is not None:
        raise SpectrainError(
            f"the draft's tokenizer is not the target's: {difference}",
            where=where,
            fix="use a draft with the target's tokenizer",
        )


def first_difference(draft: Any, target: Any) -> str | None:
    """The first id for which the two tokenizers have different tokens, or None."""
    own, theirs = (
        {index: token for token, index in one.get_vocab().items()} for one in (draft, target)
    )
    different = [i for i in own.keys() | theirs.keys() if own.get(i) != theirs.get(i)]
    if not different:
        return None
    i = min(different)
    return f"id {i}: the draft has {_shown(own, i)}, the target {_shown(theirs, i)}"


def _shown(vocabulary: dict[int, str], index: int) -> str:
    return repr(vocabulary[index]) if index in vocabulary else "nothing"

"""Whether two tokenizers agree on every id: what a draft model and its target have to share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Padding is left out: it is never drafted, and fine-tunes of one model often disagree about it.
_ROLES = ("bos_token_id", "eos_token_id", "unk_token_id")


def first_difference(
    draft: Any, target: Any, draft_stops: Sequence[int], target_stops: Sequence[int]
) -> str | None:
    """The first entry in which the tokenizers of a draft model and its target differ, or None.

    Compared are vocabularies (id by id), roles of special tokens, and the ids that end a reply.
    """
    own, theirs = (
        {index: token for token, index in tokenizer.get_vocab().items()}
        for tokenizer in (draft, target)
    )
    different = [i for i in own.keys() | theirs.keys() if own.get(i) != theirs.get(i)]
    if different:
        first = min(different)
        return f"id {first}: the draft has {_shown(own, first)}, the target {_shown(theirs, first)}"
    for role in _ROLES:
        one, two = getattr(draft, role), getattr(target, role)
        if one != two:
            return f"{role}: the draft has {one}, the target {two}"
    one, two = sorted(draft_stops), sorted(target_stops)
    return None if one == two else f"stop ids: the draft has {one}, the target {two}"


def _shown(vocabulary: dict[int, str], index: int) -> str:
    return repr(vocabulary[index]) if index in vocabulary else "nothing"

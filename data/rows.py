"""From conversations to the rows of a store: which prompts to ask, and what becomes of each."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple

from spectrain.core.target import Target
from spectrain.data.conversations import Conversation, split_of
from spectrain.data.replies import Answer, Question
from spectrain.data.shard import Row
from spectrain.data.tokenise import (
    Refused,
    Turn,
    given_rows,
    prompt_ids,
    text_row,
    turn_rows,
)


def source_hash(conversations: list[Conversation]) -> str:
    """16 hex digits over the content and the facts of all conversations."""
    digest = hashlib.sha256()
    for conversation in conversations:
        facts = astuple(conversation)
        # A conversation hashes as it did before there were texts, so that its stores go on.
        facts = facts[:-1] if conversation.text is None else facts
        digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def questions_for(
    conversations: list[Conversation],
    tokenizer,
    *,
    longest: int,
    heldout: float,
    temperatures: Iterable[float],
    heldout_temperatures: Iterable[float],
    fates: Counter[str],
) -> list[Question]:
    """What to ask the target: every train prompt at each of `temperatures`, every held-out one at
    each of its own. Prompts of more than `longest` tokens, or refused by the template, go to
    `fates`."""
    questions = []
    for place, conversation in enumerate(conversations):
        if conversation.answered:
            continue
        try:
            ids = prompt_ids(tokenizer, conversation, longest)
        except Refused as refused:
            fates[refused.reason] += 1
            continue
        train = split_of(conversation.prompt_id, heldout) == "train"
        for wanted in temperatures if train else heldout_temperatures:
            questions.append(Question(place, ids, float(wanted)))
    return questions


def build_rows(
    conversations: list[Conversation],
    questions: list[Question],
    answers: list[Answer],
    target: Target,
    *,
    heldout: float,
    max_length: int,
    drop_length_stopped: bool,
    fates: Counter[str],
) -> list[Row]:
    """Every row that has something to learn, ordered by content hash and temperature; the others
    go to `fates` by reason."""
    prompts = {question.place: question.ids for question in questions}
    work: list[tuple[Conversation, list[int], Answer | None]] = [
        (conversations[answer.place], prompts[answer.place], answer) for answer in answers
    ]
    work += [(conversation, [], None) for conversation in conversations if conversation.answered]
    rows = []
    for conversation, prompt, answer in work:
        split = split_of(conversation.prompt_id, heldout)
        if conversation.text is not None:
            made = text_row(target.tokenizer, conversation, split=split, max_length=max_length)
        elif answer is None:
            made = given_rows(
                target.tokenizer, target.stop_ids, conversation, split=split, max_length=max_length
            )
        else:
            made = turn_rows(
                conversation,
                [Turn(prompt, answer.tokens, answer.finish)],
                split=split,
                temperature=answer.temperature,
                max_length=max_length,
            )
        fates.update(made[1])
        for row in made[0]:
            if drop_length_stopped and row.finish == "length":
                fates["length-stopped"] += 1
            else:
                rows.append(row)
    return sorted(
        rows, key=lambda row: (row.id, -1 if row.temperature is None else row.temperature)
    )


def count_rows(kept: list[dict], fates: Counter[str]) -> dict:
    """Rows and tokens of the facts `kept` by split, and what happened to the rest, by reason."""
    counts: dict = {"rows": {}, "supervised_tokens": {}, "tokens": {}}
    for split in ("train", "heldout"):
        rows = [row for row in kept if row["split"] == split]
        counts["rows"][split] = len(rows)
        counts["tokens"][split] = sum(row["length"] for row in rows)
        counts["supervised_tokens"][split] = sum(row["supervised"] for row in rows)
    counts["truncated"] = sum(row["truncated"] for row in kept)
    counts["length_stopped"] = sum(row["finish"] == "length" for row in kept)
    counts["dropped"] = dict(sorted(fates.items()))
    return counts

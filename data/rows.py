"""From conversations to the rows of a store: what to ask the target, and what becomes of it.

A talk is a conversation at one temperature. It is answered turn by turn, one round of questions for
each turn, since the history of a turn is made of the replies before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from spectrain.core.target import Target
from spectrain.data.conversations import Conversation, split_of
from spectrain.data.fates import Fates
from spectrain.data.finishes import WHOLE
from spectrain.data.loops import loops
from spectrain.data.questions import Question, Reply
from spectrain.data.replies import question_key
from spectrain.data.shard import Row
from spectrain.data.spool import Spool
from spectrain.data.tokenise import (
    Refused,
    Turn,
    given_rows,
    given_turns,
    prompt_ids,
    text_row,
    turn_rows,
)


@dataclass(frozen=True)
class RowRules:
    """How rows are made. temperatures, heldout_temperatures: of the replies that are asked for;
    heldout: share of the prompts that are held out; longest: tokens of a prompt that is asked;
    seed: of what is drawn."""

    temperatures: tuple[float, ...]
    heldout_temperatures: tuple[float, ...]
    heldout: float
    longest: int
    max_length: int
    drop_length_stopped: bool
    drop_loops: bool
    seed: int

    def split(self, conversation: Conversation) -> str:
        """The side of a conversation, by its prompt alone."""
        return split_of(conversation.prompt_id, self.heldout)

    def asked_at(self, conversation: Conversation) -> tuple[float, ...]:
        """Temperatures of the replies that a conversation still wants."""
        if conversation.answered:
            return ()
        train = self.split(conversation) == "train"
        return self.temperatures if train else self.heldout_temperatures


def source_hash(conversations: Iterable[Conversation]) -> str:
    """16 hex digits over the content and the facts of all conversations."""
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(json.dumps(vars(conversation), sort_keys=True).encode())
    return digest.hexdigest()[:16]


def ask_round(
    spool: Spool, turn: int, tokenizer, rules: RowRules, identity: str, fates: Fates
) -> int:
    """Note the questions of a round in the spool: turn 0 of every talk, or turn 1, 2, … of those
    that go on. Returns how many have their replies already. Prompts that are too long or refused by
    the template go to `fates` in the first round, and end their talk in later ones.

    identity: of who answers, see `questions.Backend`.
    """
    known = 0
    with spool.writing():
        for place, conversation in spool.conversations():
            for temperature in rules.asked_at(conversation):
                talk = spool.replies(conversation.id, temperature) if turn else []
                if len(talk) < turn or (talk and not _goes_on(talk[-1][1])):
                    continue
                messages = conversation.prompt([_message(reply) for _, reply in talk])
                if messages is None:
                    continue
                asked = replace(conversation, messages=messages)
                try:
                    ids = prompt_ids(tokenizer, asked, rules.longest)
                except Refused as refused:
                    if not turn:
                        fates.drop(refused.reason, place)
                        break  # for the other temperatures as well
                    fates.drop(f"later-turn-{refused.reason}", place)
                    continue
                key = question_key(identity, rules.seed, temperature, ids)
                known += not spool.ask(conversation.id, temperature, ids, key)
    return known


def questions_of(spool: Spool) -> Iterator[Question]:
    """The questions of the round that nobody has answered, in the order of asking."""
    for place, name, temperature, ids, key in spool.questions():
        conversation = spool.conversation(name)
        talk = spool.replies(name, temperature)
        messages = conversation.prompt([_message(reply) for _, reply in talk])
        assert messages is not None, "it was asked"
        yield Question(ids, temperature, messages, conversation.tools, place, key)


def rows_of(
    conversation: Conversation, place: str, spool: Spool, target: Target, rules: RowRules, fates
) -> list[Row]:
    """Every row of a conversation that has something to learn, ordered by id and temperature; the
    others go to `fates` by reason."""
    split = rules.split(conversation)
    made: list[Row] = []
    refused: list[str] = []
    if conversation.text is not None:
        work = [_text_rows(target, conversation, split, rules)]
    elif conversation.answered:
        work = [_given(target, conversation, split, rules)]
    else:
        talks = ((t, spool.replies(conversation.id, t)) for t in rules.asked_at(conversation))
        work = [
            _talk(target, conversation, talk, temperature, split, rules)
            for temperature, talk in talks
            if talk
        ]
    for rows, reasons in work:
        made += rows
        refused += reasons
    kept = []
    for row in made:
        if rules.drop_length_stopped and row.finish == "length":
            refused.append("length-stopped")
        elif rules.drop_loops and row.loops:
            refused.append("loops")
        else:
            kept.append(row)
    for reason in refused:
        fates.drop(reason, place)
    return sorted(kept, key=lambda row: (row.id, row.temperature or 0))


def count_rows(counts: dict, kept: Iterable[dict]) -> None:
    """Add the facts of a shard's rows to `counts` (from `no_rows`)."""
    for row in kept:
        split = row["split"]
        counts["rows"][split] += 1
        counts["tokens"][split] += row["length"]
        counts["supervised_tokens"][split] += row["supervised"]
        counts["truncated"] += row["truncated"]
        counts["length_stopped"] += row["finish"] == "length"
        counts["loops"] += row["loops"]


def no_rows() -> dict:
    """Counts of nothing: rows and tokens by split, and what there is to say of the rows."""
    by_split = ("rows", "supervised_tokens", "tokens")
    counts: dict = {key: {"train": 0, "heldout": 0} for key in by_split}
    return counts | {"truncated": 0, "length_stopped": 0, "loops": 0}


def _goes_on(reply: Reply) -> bool:
    """Whether a next turn can follow: nobody answers half a reply."""
    return reply.finish == "stop" and bool(reply.text.strip())


def _message(reply: Reply) -> dict:
    message = {"role": "assistant", "content": reply.text}
    return message | ({"reasoning_content": reply.reasoning} if reply.reasoning else {})


def _text_rows(target, conversation, split, rules) -> tuple[list[Row], list[str]]:
    return text_row(target.tokenizer, conversation, split=split, max_length=rules.max_length)


def _given(target, conversation, split, rules) -> tuple[list[Row], list[str]]:
    return given_rows(
        target.tokenizer,
        target.stop_ids,
        conversation,
        split=split,
        max_length=rules.max_length,
    )


def _talk(
    target: Target,
    conversation: Conversation,
    talk: list[tuple[list[int], Reply]],
    temperature: float,
    split: str,
    rules: RowRules,
) -> tuple[list[Row], list[str]]:
    """Rows of the turns that were answered at one temperature, and the reasons against others:
    those of `turn_rows` and `given_rows`; finish-… and, of the last turn of several, later-turn-…
    for a reply that is not to be learnt; turns-not-asked where a reply ended the talk early."""
    last = talk[-1][1]
    ended = ["turns-not-asked"] * (len(talk) < conversation.turns and not _goes_on(last))
    broken = f"finish-{last.finish}" if last.finish not in WHOLE else None
    if broken and len(talk) == 1:
        return [], [broken, *ended]
    if len(talk) > 1 and (broken or not last.text.strip()):
        ended.insert(0, f"later-turn-{broken or 'empty-reply'}")
        talk = talk[:-1]  # the turns before it are whole
        last = talk[-1][1]
    if all(_told(reply, target.stop_ids) for _, reply in talk):
        turns = [Turn(prompt, reply.tokens, reply.finish) for prompt, reply in talk]
    else:
        replies = [_message(reply) for _, reply in talk]
        messages = conversation.prompt(replies[:-1])
        said = replace(conversation, messages=(*messages, replies[-1]), finish=last.finish)
        try:
            turns = given_turns(target.tokenizer, target.stop_ids, said)
        except Refused as refused:
            return [], [refused.reason, *ended]
        turns = turns[-len(talk) :]  # those before are given: context, not the target's own
    rows, reasons = turn_rows(
        conversation, turns, split=split, temperature=temperature, max_length=rules.max_length
    )
    return [replace(row, loops=_loops(row)) for row in rows], reasons + ended


def _told(reply: Reply, stop_ids: tuple[int, ...]) -> bool:
    """Whether the tokens of a reply are known as they were produced: a server may leave out the
    end-of-turn token, or stop at a text."""
    if not reply.tokens:
        return False
    return reply.finish != "stop" or reply.tokens[-1] in stop_ids


def _loops(row: Row) -> bool:
    """Whether a reply of the row goes round in circles."""
    numbers = range(1, int(row.reply.max()) + 1)
    return any(loops(row.tokens[row.reply == number].tolist()) for number in numbers)

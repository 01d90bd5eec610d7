"""From a conversation to tokens and the mask of its replies.

What the target read and what it wrote are told by its chat template (data/render.py); supervised is
what it wrote, up to and including its end-of-turn token.

    <|im_start|>user↵hi<|im_end|>↵<|im_start|>assistant↵ hello<|im_end|> ↵ …
    0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 0 0

One row holds a whole conversation, as long as each prompt begins with all that came before. Where a
template shows older turns otherwise (without their thinking, say), the target did not read what it
had written: a new row begins. A wrong or empty mask is never returned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spectrain.core.batch import counted
from spectrain.core.errors import SpectrainError
from spectrain.data.conversations import Conversation
from spectrain.data.encode import Reader, encode
from spectrain.data.render import Refused, TurnText, prompt_text, turn_texts
from spectrain.data.shard import Row


def require_template(tokenizer) -> None:
    """Raise SpectrainError unless the tokenizer has a chat template."""
    if not tokenizer.chat_template:
        raise SpectrainError(
            "the target's tokenizer has no chat template",
            where="--target",
            fix="use a chat model, or save a chat_template with its tokenizer",
        )


def rendering(tokenizer) -> dict:
    """What turns text into ids, JSON-ready: vocabulary, merges, normaliser, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        vocabulary = sorted(tokenizer.get_vocab().items())
        return {"vocabulary": vocabulary, "chat_template": tokenizer.chat_template}
    state = json.loads(backend.to_str())
    # Left behind by the last call, and set again by the next.
    del state["padding"], state["truncation"]
    return {"backend": state, "chat_template": tokenizer.chat_template}


def rendering_hash(tokenizer) -> str:
    """16 hex digits over `rendering`."""
    state = json.dumps(rendering(tokenizer), sort_keys=True)
    return hashlib.sha256(state.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Turn:
    """An assistant turn in ids: what the target was asked with, and what it replied.

    finish: why the reply ended; its end-of-turn token is there iff that is "stop" or unknown (None)
    """

    prompt: list[int]
    reply: list[int]
    finish: str | None


def prompt_ids(tokenizer, conversation: Conversation, longest: int) -> list[int]:
    """The ids that the target is asked to continue, `longest` tokens at most.

    Raises Refused: template-rejects, prefix-mismatch, no-generation-prompt, tools-not-rendered,
    empty-prompt, too-long-prompt.
    """
    ids = encode(tokenizer, prompt_text(tokenizer, conversation))
    if not ids:
        raise Refused("empty-prompt")
    if len(ids) > longest:
        raise Refused("too-long-prompt")
    return ids


def given_rows(
    tokenizer,
    stop_ids: tuple[int, ...],
    conversation: Conversation,
    *,
    split: str,
    max_length: int,
) -> tuple[list[Row], list[str]]:
    """The rows of a conversation with its given replies, all of them supervised, and the reasons of
    those that were refused; see `turn_rows`. What cannot be told of one turn refuses all of them.

    Reasons: those of `turn_texts` and `turn_rows`; empty-prompt, no-end-of-turn, boundary-merge,
    stop-token-in-reply.
    """
    try:
        turns = given_turns(tokenizer, stop_ids, conversation)
    except Refused as refused:
        return [], [refused.reason]
    return turn_rows(
        conversation,
        turns,
        split=split,
        temperature=conversation.temperature,
        max_length=max_length,
    )


def turn_rows(
    conversation: Conversation,
    turns: Sequence[Turn],
    *,
    split: str,
    temperature: float | None,
    max_length: int,
) -> tuple[list[Row], list[str]]:
    """The rows of turns whose ids are used as they are, and the reasons of those that were refused.

    A turn goes on in the row before it if its prompt begins with all the ids of that row: then
    they are what the target read and wrote. Else a new row begins with its prompt, in which the
    earlier replies are context. A row is cut off ("length") if one of its replies is.

    Reasons: empty-reply for a turn; reply-too-short, truncated-away for a row.
    """
    stretches, reasons = _stretches(turns)
    rows: list[Row] = []
    for ids, mask, finish in stretches:
        name = conversation.id if not rows else f"{conversation.id}-{len(rows) + 1}"
        try:
            rows.append(_row(name, conversation, ids, mask, split, temperature, finish, max_length))
        except Refused as refused:
            reasons.append(refused.reason)
    return rows, reasons


def text_row(
    tokenizer, conversation: Conversation, *, split: str, max_length: int
) -> tuple[list[Row], list[str]]:
    """The row of a plain text: all of it is supervised but the first token, which nothing predicts;
    or the reason against it: reply-too-short, truncated-away."""
    ids = _with_special_tokens(tokenizer, conversation.text)
    mask = [0] * min(1, len(ids)) + [1] * (len(ids) - 1)
    try:
        row = _row(conversation.id, conversation, ids, mask, split, None, None, max_length)
    except Refused as refused:
        return [], [refused.reason]
    return [row], []


def _stretches(
    turns: Sequence[Turn],
) -> tuple[list[tuple[list[int], list[int], str | None]], list[str]]:
    """Ids, mask and finish of each row to be, and the reasons against turns."""
    stretches: list[tuple[list[int], list[int], str | None]] = []
    reasons: list[str] = []
    for turn in turns:
        if len(turn.reply) <= (turn.finish in ("stop", None)):
            reasons.append("empty-reply")
            continue
        ids, mask, finish = stretches.pop() if stretches else ([], [], None)
        if turn.prompt[: len(ids)] != ids:
            stretches.append((ids, mask, finish))
            ids, mask, finish = [], [], None
        number = max(mask, default=0) + 1
        mask = mask + [0] * (len(turn.prompt) - len(ids)) + [number] * len(turn.reply)
        finish = "length" if finish == "length" else turn.finish
        stretches.append((turn.prompt + turn.reply, mask, finish))
    return stretches, reasons


def _row(name, conversation, ids, mask, split, temperature, finish, max_length: int) -> Row:
    """Cut at `max_length` and checked: an anchor must be left, else there is nothing to learn."""
    reply = torch.tensor(mask[:max_length], dtype=torch.int16)
    if not counted(reply, 0).any():
        short = not counted(torch.tensor(mask), 0).any()
        raise Refused("reply-too-short" if short else "truncated-away")
    return Row(
        id=name,
        split=split,
        tokens=torch.tensor(ids[:max_length], dtype=torch.int32),
        reply=reply,
        domain=conversation.domain,
        temperature=temperature,
        finish=finish,
        truncated=len(ids) > max_length,
    )


# ── ids ──────────────────────────────────────────────────────────────────────


def _with_special_tokens(tokenizer, text: str) -> list[int]:
    """Ids of a text with what the tokenizer puts around one, each once: a text that brings its own
    beginning or end keeps that."""
    bare = encode(tokenizer, text)
    whole = tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            before, after = whole[:start], whole[start + len(bare) :]
            if bare[: len(before)] == before:
                before = []
            if bare[len(bare) - len(after) :] == after:
                after = []
            return [*before, *bare, *after]
    return whole


def given_turns(tokenizer, stop_ids: tuple[int, ...], conversation: Conversation) -> list[Turn]:
    """The given replies as the target read and wrote them, one turn each. Raises Refused."""
    turns = []
    reader = Reader(tokenizer)
    for text in turn_texts(tokenizer, conversation):
        prompt = reader.ids(text.prompt)
        if not prompt:
            raise Refused("empty-prompt")
        reply = _reply_ids(reader, text, prompt)
        turns.append(Turn(prompt, reply[: _reply_length(tokenizer, reply, stop_ids)], None))
    last = turns.pop()
    # Of a reply that was cut off by its length, the template's end-of-turn token is not the
    # target's.
    reply = last.reply[:-1] if conversation.finish == "length" else last.reply
    return [*turns, Turn(last.prompt, reply, conversation.finish)]


def _reply_ids(reader: Reader, text: TurnText, prompt: list[int]) -> list[int]:
    """Ids of a reply as the target would write them, having read `prompt`.

    Most tokenizers keep the two apart by themselves. Some merge characters across the boundary,
    which the target cannot: then the reply is read alone, or, by a tokenizer that marks the
    beginning of a text, behind a character that it keeps apart.
    """
    tokenizer = reader.tokenizer
    whole = reader.ids(text.prompt + text.reply)
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    for lead in ("", "a", "."):
        before, both = encode(tokenizer, lead), encode(tokenizer, lead + text.reply)
        reply = both[len(before) :]
        if before + reply == both and tokenizer.decode(prompt + reply) == tokenizer.decode(whole):
            return reply
    raise Refused("boundary-merge")


def _reply_length(tokenizer, reply: list[int], stop_ids: tuple[int, ...]) -> int:
    """Tokens of the reply up to and including its end-of-turn token."""
    stops = [place for place, token in enumerate(reply) if token in stop_ids]
    if not stops:
        raise Refused("no-end-of-turn")
    if stops[0] == 0:
        raise Refused("empty-reply")
    if tokenizer.decode(reply[stops[0] + 1 :]).strip():
        raise Refused("stop-token-in-reply")
    return stops[0] + 1

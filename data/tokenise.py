"""From a conversation to tokens and the mask of its replies, with the target's own chat template.

The mask is found by rendering, not by markers in the template: the text of messages[:i] with the
generation prompt must be a prefix of the text of messages[:i+1]; what follows, up to and including
the end-of-turn token, is reply i. A template that rewrites history breaks this, and then the row is
refused with a reason: a wrong or empty mask is never returned.

    <|im_start|>user↵hi<|im_end|>↵<|im_start|>assistant↵ hello<|im_end|> ↵ …
    0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 0 0
"""

from __future__ import annotations

import json
from itertools import chain

import jinja2
import torch

from spectrain.core.batch import counted
from spectrain.core.errors import SpectrainError
from spectrain.data.conversations import Conversation
from spectrain.data.shard import Row

# What a template may raise over the messages it is given.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError)


class Refused(Exception):
    """The row is dropped; `reason` is what it is counted under."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


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


def prompt_ids(tokenizer, conversation: Conversation, longest: int) -> list[int]:
    """The ids that the target is asked to continue, `longest` tokens at most.

    Raises Refused: template-rejects, no-generation-prompt, empty-prompt, too-long-prompt.
    """
    messages = list(conversation.messages)
    prompt = _render(tokenizer, messages, conversation.tools, generation=True)
    if prompt == _render(tokenizer, messages, conversation.tools):
        # Fine where the reply follows the user turn directly, wrong where a header is missing.
        word = "reply"
        answer = [*messages, {"role": "assistant", "content": word}]
        rest = _after(_render(tokenizer, answer, conversation.tools), prompt)
        _require_bare(rest, word)
    ids = _encode(tokenizer, prompt)
    if not ids:
        raise Refused("empty-prompt")
    if len(ids) > longest:
        raise Refused("too-long-prompt")
    return ids


def answered_row(
    conversation: Conversation,
    prompt: list[int],
    reply: list[int],
    *,
    split: str,
    temperature: float | None,
    finish: str,
    max_length: int,
) -> Row:
    """The row of a reply that the target itself produced: its ids are used as they are.

    `reply` ends with the end-of-turn token iff `finish` is "stop". Raises Refused: empty-reply,
    reply-too-short, truncated-away.
    """
    if len(reply) <= (finish == "stop"):
        raise Refused("empty-reply")
    mask = [0] * len(prompt) + [1] * len(reply)
    return _row(conversation, prompt + reply, mask, split, temperature, finish, max_length)


def given_row(
    tokenizer,
    stop_ids: tuple[int, ...],
    conversation: Conversation,
    *,
    split: str,
    max_length: int,
) -> Row:
    """The row of a conversation with its given replies, all of them supervised.

    Raises Refused: template-rejects, prefix-mismatch, no-generation-prompt, empty-reply,
    no-end-of-turn, stop-token-in-reply, boundary-merge, empty-prompt, reply-too-short,
    truncated-away.
    """
    pieces = _pieces(tokenizer, conversation)
    encoded = _encode_pieces(tokenizer, pieces)
    if not encoded[0]:
        raise Refused("empty-prompt")
    ids: list[int] = []
    mask: list[int] = []
    for turn, (context, reply) in enumerate(zip(encoded[::2], encoded[1::2], strict=True), 1):
        end = _reply_length(tokenizer, reply, stop_ids)
        ids += context + reply
        mask += [0] * len(context) + [turn] * end + [0] * (len(reply) - end)
    # Nothing after the last reply is ever predicted; of a reply that was cut off by its length, the
    # template's end-of-turn token is not the target's.
    stop = len(ids) - mask[::-1].index(turn)
    stop -= conversation.finish == "length"
    return _row(
        conversation,
        ids[:stop],
        mask[:stop],
        split,
        conversation.temperature,
        conversation.finish,
        max_length,
    )


def text_row(tokenizer, conversation: Conversation, *, split: str, max_length: int) -> Row:
    """The row of a plain text: all of it is supervised but the first token, which nothing predicts.

    Raises Refused: reply-too-short, truncated-away.
    """
    ids = _with_special_tokens(tokenizer, conversation.text)
    mask = [0] * min(1, len(ids)) + [1] * (len(ids) - 1)
    return _row(conversation, ids, mask, split, None, None, max_length)


def _row(conversation, ids, mask, split, temperature, finish, max_length: int) -> Row:
    """Cut at `max_length` and checked: an anchor must be left, else there is nothing to learn."""
    whole = torch.tensor(mask, dtype=torch.int16)
    reply = whole[:max_length].clone()
    if not counted(whole, 0).any():
        raise Refused("reply-too-short")
    if not counted(reply, 0).any():
        raise Refused("truncated-away")
    return Row(
        id=conversation.id,
        split=split,
        tokens=torch.tensor(ids[:max_length], dtype=torch.int32),
        reply=reply,
        domain=conversation.domain,
        temperature=temperature,
        finish=finish,
        truncated=len(ids) > max_length,
    )


# ── rendering ────────────────────────────────────────────────────────────────


def _render(tokenizer, messages, tools, generation: bool = False) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=generation,
        )
    except _TEMPLATE_ERRORS as error:
        raise Refused("template-rejects") from error


def _after(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise Refused("prefix-mismatch")
    return text[len(prefix) :]


def _pieces(tokenizer, conversation: Conversation) -> list[str]:
    """The rendered text as context, reply, context, reply, …; a reply runs from the end of the
    generation prompt to the end of its message, template's trailing text included."""
    messages = list(conversation.messages)
    whole = _render(tokenizer, messages, conversation.tools)
    pieces: list[str] = []
    done = ""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or not turn:
            continue
        before = _render(tokenizer, messages[:turn], conversation.tools, generation=True)
        after = _render(tokenizer, messages[: turn + 1], conversation.tools)
        _after(whole, after)
        reply = _after(after, before)
        plain = not (message.get("tool_calls") or message.get("reasoning_content"))
        if plain and not message["content"].strip():
            raise Refused("empty-reply")
        if plain and before == _render(tokenizer, messages[:turn], conversation.tools):
            _require_bare(reply, message["content"].strip())
        pieces += [_after(before, done), reply]
        done = after
    return pieces


def _require_bare(rest: str, content: str) -> None:
    """The template knows no generation prompt: then the reply must follow the prompt directly,
    else what the target is asked to continue would lack the header of its turn."""
    if rest.partition(content)[0].strip():
        raise Refused("no-generation-prompt")


# ── ids ──────────────────────────────────────────────────────────────────────


def _encode(tokenizer, text: str) -> list[int]:
    # The template wrote the special tokens; the tokenizer must not add them a second time.
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _with_special_tokens(tokenizer, text: str) -> list[int]:
    """Ids of a text with what the tokenizer puts around one, each once: a text that brings its own
    beginning or end keeps that."""
    bare = _encode(tokenizer, text)
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


def _encode_pieces(tokenizer, pieces: list[str]) -> list[list[int]]:
    """Ids of each piece; those of a reply are what the target would produce after the context.

    Three ways, since tokenizers differ: most keep the pieces apart by themselves; some mark the
    beginning of a text and have to see all of it; some merge characters across the boundary, which
    the target, reading its prompt without the reply, would not.
    """
    text = "".join(pieces)
    whole = _encode(tokenizer, text)
    apart = [_encode(tokenizer, piece) for piece in pieces]
    joined = list(chain(*apart))
    if joined == whole:
        return apart
    cut = _cut(tokenizer, text, pieces)
    if cut is not None and _same_contexts(tokenizer, cut, pieces):
        return cut
    if tokenizer.decode(joined) == tokenizer.decode(whole):
        return apart
    raise Refused("boundary-merge")


def _cut(tokenizer, text: str, pieces: list[str]) -> list[list[int]] | None:
    """The ids of the whole text, cut where the pieces end; None where a token crosses an end."""
    if not tokenizer.is_fast:
        return None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    result: list[list[int]] = []
    place = end = 0
    for piece in pieces:
        end += len(piece)
        first = place
        while place < len(ids) and offsets[place][1] <= end:
            place += 1
        if place < len(ids) and offsets[place][0] < end:
            return None
        result.append(ids[first:place])
    return result


def _same_contexts(tokenizer, cut: list[list[int]], pieces: list[str]) -> bool:
    """Whether the text before each reply, read alone, has the ids it has in the whole."""
    return all(
        list(chain(*cut[:count])) == _encode(tokenizer, "".join(pieces[:count]))
        for count in range(1, len(pieces), 2)
    )


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

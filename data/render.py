"""A conversation as the text that the target's own chat template makes of it, turn by turn.

What a turn is comes from rendering, not from markers in the template: the target was asked with the
text of messages[:i] and the generation prompt, and its reply is what the text of messages[:i+1] has
behind that. A template may show an older turn differently later on; each turn is rendered as the
last one, which is how the target read and wrote it. What cannot be told is refused with a reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jinja2

from spectrain.data.conversations import Conversation
from spectrain.data.dates import dated_template

# What a template may raise over the messages it is given.
_TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)
# A generation prompt that opens a block, which the reply goes on with: "…<think>↵".
_OPENING = re.compile(r"<(\w+)>\s*\Z")


class Refused(Exception):
    """The row is dropped; `reason` is what it is counted under."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True)
class TurnText:
    """prompt: what the target was asked, generation prompt included; reply: what followed, with
    what the template puts behind it (end-of-turn token, line break)."""

    prompt: str
    reply: str


def prompt_text(tokenizer, conversation: Conversation) -> str:
    """What the target is asked to continue.

    Raises Refused: template-rejects, prefix-mismatch, no-generation-prompt, tools-not-rendered,
    special-token-in-text.
    """
    messages, tools = list(conversation.messages), conversation.tools
    _refuse_special(tokenizer, messages)
    prompt = _render(tokenizer, messages, tools, generation=True)
    _require_generation(tokenizer, messages, tools, prompt)
    if tools and prompt == _render(tokenizer, messages, None, generation=True):
        raise Refused("tools-not-rendered")
    return prompt


def keeps_history(tokenizer) -> bool:
    """Whether a reply stands in later prompts as it was written, its thinking included: then a
    conversation is one row."""
    reply = "<think>\nof it\n</think>\n\nAn answer."
    first = [{"role": "user", "content": "A question."}]
    later = [*first, {"role": "assistant", "content": reply}, {"role": "user", "content": "More?"}]
    try:
        before, after = (
            _render(tokenizer, messages, None, generation=True) for messages in (first, later)
        )
    except Refused:
        return True
    return after.startswith(before + reply)


def rendered(tokenizer, messages: list[dict], generation: bool) -> str:
    """The text of messages, with or without the generation prompt. Raises Refused:
    template-rejects."""
    return _render(tokenizer, messages, None, generation)


def turn_texts(tokenizer, conversation: Conversation) -> list[TurnText]:
    """The assistant turns that follow a user turn, each as it was asked for and given.

    Raises Refused: template-rejects, prefix-mismatch, no-generation-prompt, empty-reply,
    reasoning-not-rendered, text-not-rendered, tools-not-rendered, special-token-in-text.
    """
    messages, tools = list(conversation.messages), conversation.tools
    _refuse_special(tokenizer, messages)
    first = [message["role"] for message in messages].index("user")
    texts = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or place < first:
            continue
        before = messages[:place]
        prompt = _render(tokenizer, before, tools, generation=True)
        if tools and not texts and prompt == _render(tokenizer, before, None, generation=True):
            raise Refused("tools-not-rendered")
        whole = _render(tokenizer, messages[: place + 1], tools)
        reply = _reply(prompt, whole, message)
        if not reply.lstrip().startswith((message.get("content") or "").strip() or "\0"):
            _require_generation(tokenizer, before, tools, prompt)
        texts.append(TurnText(prompt, reply))
    return texts


def _refuse_special(tokenizer, messages: list[dict]) -> None:
    """A user who writes "<|im_end|>" would end the turn: the tokenizer cannot tell that text from
    the template's own tokens."""
    special = _special_texts(tokenizer)
    for message in messages:
        if message["role"] != "assistant" and isinstance(message.get("content"), str):
            content = message["content"]
            if any(token in content for token in special):
                raise Refused("special-token-in-text")


def _special_texts(tokenizer) -> list[str]:
    if tokenizer not in _SPECIAL:
        added = tokenizer.added_tokens_decoder.values()
        _SPECIAL[tokenizer] = [token.content for token in added if token.special]
    return _SPECIAL[tokenizer]


_SPECIAL: WeakKeyDictionary = WeakKeyDictionary()


def _render(tokenizer, messages, tools, generation: bool = False) -> str:
    failure: Exception | None = None
    template = dated_template(tokenizer, tools)
    for change in _CHANGES if any(message.get("tool_calls") for message in messages) else (None,):
        try:
            form = _with_arguments(messages, *change) if change else messages
            text = tokenizer.apply_chat_template(
                form,
                chat_template=template,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except _TEMPLATE_ERRORS as error:
            failure = failure or error
            continue
        if not any(call and str(call) in text for call in _arguments(form)):
            return text
    raise Refused("template-rejects") from failure


# Some templates take the arguments of tool calls as a mapping, some as JSON text, whatever the
# source has; one that wants text may print a mapping as Python does.
_CHANGES = ((json.loads, str), (json.dumps, dict))


def _with_arguments(messages: list[dict], change: Callable, kind: type) -> list[dict]:
    """The messages, where arguments of tool calls that are of this kind are changed."""

    def changed(value: Any) -> Any:
        try:
            return change(value) if isinstance(value, kind) else value
        except ValueError:  # text that is no JSON
            return value

    def call_of(call: dict) -> dict:
        function = call["function"]
        return call | {"function": function | {"arguments": changed(function["arguments"])}}

    return [
        message | {"tool_calls": [call_of(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _arguments(messages: list[dict]) -> list[dict]:
    """Those of tool calls that are mappings."""
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    found = [call["function"]["arguments"] for call in calls]
    return [arguments for arguments in found if isinstance(arguments, dict)]


def _require_generation(tokenizer, messages, tools, prompt: str) -> None:
    """A template that knows no generation prompt is fine where the reply follows the prompt
    directly; else what the target is asked to continue would lack the header of its turn."""
    if prompt != _render(tokenizer, messages, tools):
        return
    word = "reply"
    whole = _render(tokenizer, [*messages, {"role": "assistant", "content": word}], tools)
    if not whole.startswith(prompt):
        raise Refused("prefix-mismatch")
    if whole[len(prompt) :].partition(word)[0].strip():
        raise Refused("no-generation-prompt")


def _reply(prompt: str, whole: str, message: dict) -> str:
    """What the target wrote behind `prompt`, where `whole` is the text with `message` as the last;
    nothing of the message is lost."""
    content = message.get("content") or ""
    reasoning = message.get("reasoning_content", "")
    calls = message.get("tool_calls") or []
    if not calls and not reasoning and not content.strip():
        raise Refused("empty-reply")
    opened = _OPENING.search(prompt)
    opening = opened[0] if opened else ""
    goes_on = whole.startswith(prompt)
    base = prompt if goes_on else prompt.removesuffix(opening)
    if not whole.startswith(base):
        raise Refused("prefix-mismatch")
    reply = whole[len(base) :]
    if not _shows(reply, reasoning):
        raise Refused("reasoning-not-rendered")
    if not all(_shows(reply, call["function"]["name"]) for call in calls):
        raise Refused("tools-not-rendered")
    if not _shows(opening * goes_on + reply, content):
        reply = _uncut(reply, content)
    if not goes_on and f"</{opened[1]}>" not in reply:
        raise Refused("prefix-mismatch")  # an answer without the thinking it was asked for
    return _behind(opening, reply) if opening else reply


def _uncut(reply: str, content: str) -> str:
    """The reply of a template that shows only what follows the thinking in a message's text.

    content  <think>↵2 + 2 …↵</think>↵↵It is 4.
    reply    It is 4.<end>
    """
    closings = re.findall(r"</\w+>", content)
    if not closings:
        raise Refused("text-not-rendered")
    for closing in closings:
        answer = content.rpartition(closing)[2]
        for written, shown in ((content, answer), (content.strip(), answer.strip())):
            before, found, after = reply.partition(shown) if shown else ("", "nothing", reply)
            if found and not before.strip():
                return before + written + after
    raise Refused("reasoning-not-rendered")


def _behind(opening: str, reply: str) -> str:
    """`reply` without what the generation prompt has of it already: `opening`, a tag and space."""
    tag = opening.rstrip()
    bare = reply.lstrip()
    if not bare.startswith(tag):
        return reply
    return bare.removeprefix(tag).removeprefix(opening[len(tag) :])


def _shows(text: str, part: str) -> bool:
    """Whether `part` is in `text`, whatever the template did to its white space."""
    return part.strip() in text or "".join(part.split()) in "".join(text.split())

"""Conversations from a JSONL file, checked, without duplicates, in an order of their own.

A line is {"messages": [{"role": …, "content": …}, …]} with optional "tools" (a list, or a JSON
string of one), "domain", "temperature" (what its last reply was sampled at) and "finish_reason".
Where plain texts are welcome a line may be {"text": …} with an optional "domain": a document that
is read as it is, without a template, and never answered.

Rows are known by a hash of their content and ordered by it, never by their place in the file: a
reordered source gives the same data, and a rerun skips the right rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spectrain.data.finishes import WHOLE
from spectrain.data.shapes import canonical

BadRows = Literal["stop", "skip"]
Regenerate = Literal[True, False, "auto", "last"]


@dataclass(frozen=True)
class Conversation:
    """One conversation. It ends with an assistant turn whose replies are kept (`answered`), or with
    a user turn that the target is to answer. Or a plain text: then there are no messages.

    An earlier assistant turn without content (and without calls of tools) is to be answered, too.

    messages: as `parse` gives them
    id: 16 hex digits over the messages and tools; prompt_id: the same without the last reply
    temperature and finish belong to the last reply that is given, None when unknown.
    """

    id: str
    prompt_id: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] | None = None
    domain: str | None = None
    temperature: float | None = None
    finish: str | None = None
    text: str | None = None

    @property
    def answered(self) -> bool:
        """Whether nothing is to be asked: the last turn is a given reply, or it is a plain text."""
        return self.text is not None or self.messages[-1]["role"] == "assistant"

    @property
    def turns(self) -> int:
        """Replies that are to be asked for."""
        return 0 if self.answered else 1 + sum(map(_open, self.messages))

    def prompt(self, replies: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...] | None:
        """The messages that ask for the next reply, those so far filled in; None after the last."""
        if self.answered:
            return None
        filled: list[dict[str, Any]] = []
        left = list(replies)
        for message in self.messages:
            if _open(message):
                if not left:
                    return tuple(filled)
                message = left.pop(0)
            filled.append(message)
        return None if left else tuple(filled)


def split_of(prompt_id: str, heldout: float) -> str:
    """ "heldout" for a fraction `heldout` of all prompts, else "train"; a matter of content alone,
    and of another hash than the order of the rows."""
    digest = hashlib.sha256(f"split:{prompt_id}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < heldout * 2**64 else "train"


def _text(row: dict) -> Conversation:
    name = _hash({"text": row["text"]}, None)
    return Conversation(name, name, (), domain=row.get("domain"), text=row["text"])


def conversation_of(row: dict, regenerate: Regenerate) -> tuple[str, Conversation | None]:
    """("", the conversation to work on) or (the reason against it, None), for a row as `parse`
    gives it.

    regenerate: True has every assistant turn that follows a user's answered anew, in order, and
    "last" the last one; the rest is cut off. (Where tools were called only the last one: their
    results belong to the calls.) False keeps given replies and drops conversations without one;
    "auto" keeps the replies of those that end with one and has the last turn of the others
    answered. A plain text is kept as it is. A given reply that ended neither by itself nor by its
    length (an error, a filter) is none to learn from.
    """
    if "text" in row:
        return "", _text(row)
    messages = row["messages"]
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return "no-user-turn", None
    if any(m["role"] == "user" and not m["content"].strip() for m in messages):
        return "empty-user-turn", None
    keep = roles[-1] == "assistant" if regenerate == "auto" else not regenerate
    if keep and "assistant" not in roles:
        return "no-assistant-turn", None
    # The result of a tool asks for an answer as a user does.
    asking = _last(roles, ("user", "tool"))
    last = _last(roles, ("assistant",)) if keep else asking
    if last < roles.index("user"):
        return "no-assistant-turn", None  # only a greeting before the first user turn
    messages = messages[: last + 1]
    prompt = messages[: _last(roles[: last + 1], ("user", "tool")) + 1]
    if regenerate is True and not row["tools"] and "tool" not in roles:
        first = roles.index("user")
        messages = prompt = [
            {"role": "assistant", "content": None} if place > first and _plain(message) else message
            for place, message in enumerate(messages)
        ]
    given = keep and last == len(roles) - 1
    finish = row.get("finish_reason") if given else None
    if finish not in (None, *WHOLE):
        return f"finish-{finish}", None
    return "", Conversation(
        id=_hash(messages, row["tools"]),
        prompt_id=_hash(prompt, row["tools"]),
        messages=tuple(messages),
        tools=tuple(row["tools"]) if row["tools"] else None,
        domain=row.get("domain"),
        temperature=row.get("temperature") if given else None,
        finish=finish,
    )


def rank_of(conversation: Conversation) -> str:
    """What decides between two equal conversations with unequal facts: not their order."""
    return canonical([conversation.domain, conversation.temperature, conversation.finish])


def _plain(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _open(message: dict[str, Any]) -> bool:
    return _plain(message) and message["content"] is None


def _last(roles: list[str], wanted: tuple[str, ...]) -> int:
    return max(place for place, role in enumerate(roles) if role in wanted)


def _hash(messages: list[dict] | dict, tools: list | None) -> str:
    content = messages if tools is None else {"messages": messages, "tools": tools}
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:16]

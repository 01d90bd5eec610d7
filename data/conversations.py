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
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spectrain.core.errors import SpectrainError
from spectrain.data.shapes import canonical, parse
from spectrain.data.sources import file_lines

BadRows = Literal["stop", "skip"]


@dataclass(frozen=True)
class Conversation:
    """One conversation. It ends with an assistant turn whose replies are kept (`answered`), or with
    a user turn that the target is to answer. Or a plain text: then there are no messages.

    id: 16 hex digits over the messages and tools; prompt_id: the same without the last reply;
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


def read_conversations(
    path: str | Path,
    regenerate: bool | Literal["auto"] = "auto",
    on_bad_row: BadRows = "stop",
    fates: Counter[str] | None = None,
    keep_order: bool = False,
    texts: bool = False,
) -> list[Conversation]:
    """Read a JSONL file of conversations, ordered by content hash (or as in the file), each once.

    regenerate: True cuts every conversation after its last user turn, to be answered anew; False
    keeps given replies and drops conversations without one; "auto" keeps the replies of those that
    end with one and cuts the others.
    fates: counts what happened to the rows that are not returned, by reason.
    texts: take plain texts, too, whatever `regenerate` is; else such a line is a bad row.

    Raises SpectrainError for a missing or empty file, and with file:line for a bad row unless
    `on_bad_row` is "skip".
    """
    fates = Counter() if fates is None else fates
    chosen: dict[str, tuple[str, Conversation]] = {}
    lines = 0
    for where, line in file_lines(Path(path)):
        lines += 1
        try:
            row = parse(line, texts)
        except ValueError as error:
            if on_bad_row == "stop":
                raise SpectrainError(
                    str(error), where=where, fix="repair the line, or --on-bad-row skip"
                ) from None
            fates["bad-row"] += 1
            continue
        reason, conversation = ("", _text(row)) if "text" in row else _shape(row, regenerate)
        if conversation is None:
            fates[reason] += 1
            continue
        # Of two equal conversations with unequal facts the choice must not depend on their order.
        rank = canonical([conversation.domain, conversation.temperature, conversation.finish])
        known = chosen.get(conversation.id)
        if known is not None:
            fates["duplicate"] += 1
        if known is None or rank < known[0]:
            chosen[conversation.id] = (rank, conversation)
    if not lines:
        raise SpectrainError(
            "the file is empty", where=str(path), fix='give a JSONL file of {"messages": […]} rows'
        )
    return [chosen[key][1] for key in (chosen if keep_order else sorted(chosen))]


def split_of(prompt_id: str, heldout: float) -> str:
    """ "heldout" for a fraction `heldout` of all prompts, else "train"; a matter of content alone,
    and of another hash than the order of the rows."""
    digest = hashlib.sha256(f"split:{prompt_id}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < heldout * 2**64 else "train"


def _text(row: dict) -> Conversation:
    name = _hash({"text": row["text"]}, None)
    return Conversation(name, name, (), domain=row.get("domain"), text=row["text"])


def _shape(row: dict, regenerate: bool | str) -> tuple[str, Conversation | None]:
    """("", the conversation to work on) or (the reason against it, None)."""
    roles = [message["role"] for message in row["messages"]]
    if "user" not in roles:
        return "no-user-turn", None
    keep = roles[-1] == "assistant" if regenerate == "auto" else not regenerate
    if keep and "assistant" not in roles:
        return "no-assistant-turn", None
    last = _last(roles, "assistant" if keep else "user")
    if last < roles.index("user"):
        return "no-assistant-turn", None  # only a greeting before the first user turn
    messages = row["messages"][: last + 1]
    prompt = messages[: _last(roles[: last + 1], "user") + 1]
    given = keep and last == len(roles) - 1
    temperature = row.get("temperature") if given else None
    return "", Conversation(
        id=_hash(messages, row["tools"]),
        prompt_id=_hash(prompt, row["tools"]),
        messages=tuple(messages),
        tools=tuple(row["tools"]) if row["tools"] else None,
        domain=row.get("domain"),
        temperature=None if temperature is None else float(temperature),
        finish=row.get("finish_reason") if given else None,
    )


def _last(roles: list[str], role: str) -> int:
    return len(roles) - 1 - roles[::-1].index(role)


def _hash(messages: list[dict] | dict, tools: list | None) -> str:
    content = messages if tools is None else {"messages": messages, "tools": tools}
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:16]

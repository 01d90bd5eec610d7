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
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spectrain.core.errors import SpectrainError
from spectrain.core.files import disk_errors

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
    places: dict[str, list[str]] | None = None,
) -> list[Conversation]:
    """Read a JSONL file of conversations, ordered by content hash (or as in the file), each once.

    regenerate: True cuts every conversation after its last user turn, to be answered anew; False
    keeps given replies and drops conversations without one; "auto" keeps the replies of those that
    end with one and cuts the others.
    fates: counts what happened to the rows that are not returned, by reason.
    texts: take plain texts, too, whatever `regenerate` is; else such a line is a bad row.
    places: gets file:line of every row, by its id if it is returned, else by the reason; of a bad
    row with what is wrong.

    Raises SpectrainError for a missing or empty file, and with file:line for a bad row unless
    `on_bad_row` is "skip".
    """
    fates = Counter() if fates is None else fates
    places = {} if places is None else places
    chosen: dict[str, tuple[str, Conversation]] = {}
    lines = 0
    for where, line in _lines(Path(path)):
        lines += 1
        try:
            row = _parse(line, texts)
        except ValueError as error:
            if on_bad_row == "stop":
                raise SpectrainError(
                    str(error), where=where, fix="repair the line, or --on-bad-row skip"
                ) from None
            fates["bad-row"] += 1
            places.setdefault("bad-row", []).append(f"{where} ({error})")
            continue
        reason, conversation = ("", _text(row)) if "text" in row else _shape(row, regenerate)
        if conversation is None:
            fates[reason] += 1
            places.setdefault(reason, []).append(where)
            continue
        # Of two equal conversations with unequal facts the choice must not depend on their order.
        rank = _canonical([conversation.domain, conversation.temperature, conversation.finish])
        known = chosen.get(conversation.id)
        if known is not None:
            fates["duplicate"] += 1
        places.setdefault(conversation.id if known is None else "duplicate", []).append(where)
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


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(file:line, content) of the lines that are not blank."""
    if not path.exists():
        raise SpectrainError("no such file", where=str(path), fix="check --prompts")
    if path.is_dir():
        raise SpectrainError("a folder, not a JSONL file", where=str(path), fix="check --prompts")
    with disk_errors(path), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", line


def _parse(line: bytes, texts: bool) -> dict:
    """A row whose every part has the type it should have, with either "messages" or (if `texts`)
    "text"; ValueError says what is wrong."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
        _canonical(row).encode()  # fails on halves of surrogate pairs, which no tokenizer takes
    except UnicodeError:
        raise ValueError("not UTF-8 text") from None
    except RecursionError:
        raise ValueError("not valid JSON (nested too deeply)") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # some of its messages end with it
        raise ValueError(f"not valid JSON ({what} at column {error.colno})") from None
    if isinstance(row, dict) and row.get("messages") is None and "text" in row:
        return _parse_text(row, texts)
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        expected = '{"messages": [{"role", "content"}, …]}' + ' or {"text": …}' * texts
        raise ValueError(f"not a conversation: expected {expected}")
    row.pop("text", None)
    if not row["messages"]:
        raise ValueError("the conversation has no messages")
    for number, message in enumerate(row["messages"]):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"message {number} ({message['role']}) has no text as content")
    row["tools"] = _tools(row.get("tools"))
    _require_type(row, "domain", str)
    _require_type(row, "finish_reason", str)
    _require_type(row, "temperature", (int, float))
    if row.get("temperature") is not None and not 0 <= row["temperature"] < math.inf:
        raise ValueError(f"temperature {row['temperature']} is not a number from 0 upwards")
    return row


def _parse_text(row: dict, welcome: bool) -> dict:
    if not welcome:
        raise ValueError('a plain text has nothing to answer: expected {"messages": […]}')
    if not isinstance(row["text"], str):
        raise ValueError(f"text is not a text ({row['text']!r:.40})")
    _require_type(row, "domain", str)
    return row


def _tools(tools: Any) -> list | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError:
            raise ValueError("tools is a string that is not JSON") from None
    if tools is not None and not isinstance(tools, list):
        raise ValueError("tools is not a list")
    return tools or None


def _require_type(row: dict, key: str, kind: type | tuple[type, ...]) -> None:
    value = row.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise ValueError(f"{key} has the wrong type ({value!r})")


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
    return hashlib.sha256(_canonical(content).encode()).hexdigest()[:16]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))

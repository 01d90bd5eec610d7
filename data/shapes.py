"""One row of a source, in any of the shapes people have, checked and brought into one."""

from __future__ import annotations

import json
import math
from typing import Any


def parse(row: bytes | dict, texts: bool) -> dict:
    """A row whose every part has the type it should have, with either "messages" or (if `texts`)
    "text"; ValueError says what is wrong."""
    try:
        if isinstance(row, bytes):
            row = json.loads(row.decode("utf-8-sig"))
        canonical(row).encode()  # fails on halves of surrogate pairs, which no tokenizer takes
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


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))

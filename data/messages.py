"""One message of a row, in any of the forms people have, checked and brought into one.

What comes out has "role", "content" and, where they were given, "reasoning_content", "tool_calls",
"tool_call_id" and "name": what chat templates read. Everything else is dropped, so that notes
beside a message (an id, a date, a rating) do not make two rows of equal ones.
"""

from __future__ import annotations

import json
from typing import Any

# Templates that know "developer" read it as they read "system"; the others do not know it.
ROLES = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "bot", "model", "chatgpt"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation", "ipython"),
}
_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
_REASONING = ("reasoning_content", "reasoning", "thinking")


def parse_message(number: int, given: Any) -> dict[str, Any]:
    """The message at place `number`, its content a text (None only beside tool calls); ValueError
    says what is wrong."""
    if not isinstance(given, dict):
        raise ValueError(f"message {number} is not an object with a role")
    given = {key: value for key, value in given.items() if value is not None}
    role = given.get("role", given.get("from"))
    if not isinstance(role, str):
        raise ValueError(f"message {number} has no role")
    if role.lower() not in _ROLE_OF:
        raise ValueError(
            f"message {number} has the unknown role {role!r:.40} (known: {', '.join(_ROLE_OF)})"
        )
    what = f"message {number} ({role})"
    content, reasoning = _content(what, given), _reasoning(what, given)
    calls = _tool_calls(what, given)
    if content is None and not calls:
        if not reasoning:
            raise ValueError(f"{what} has no text as content")
        content = ""  # cut off while it was thinking
    message: dict[str, Any] = {"role": _ROLE_OF[role.lower()], "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if not isinstance(given.get(key, ""), str):
            raise ValueError(f"{what} has a {key} that is not a text")
        if given.get(key):
            message[key] = given[key]
    return message


def list_of(value: Any, name: str) -> list:
    """A list, or what a JSON string of one (or of null: none) holds; else ValueError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"{name} is a string that is not JSON") from None
        value = [] if value is None else value
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    return value


def _content(what: str, given: dict) -> str | None:
    """The text of a message, its parts joined as templates join them; None where there is none."""
    content = given.get("content", given.get("value"))
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError(f"{what} has a part without a type")
        if part["type"] != "text":
            raise ValueError(f"{what} has a part of type {part['type']}, and only text is read")
    if not parts or not all(isinstance(part.get("text"), str) for part in parts):
        raise ValueError(f"{what} has no text as content")
    return "".join(part["text"] for part in parts)


def _reasoning(what: str, given: dict) -> str:
    """The thoughts before a reply, under whichever of their names they are given."""
    found = {key: given[key] for key in _REASONING if given.get(key)}
    for key, value in found.items():
        if not isinstance(value, str):
            raise ValueError(f"{what} has a {key} that is not a text")
    if len(set(found.values())) > 1:
        raise ValueError(f"{what} has more than one reasoning ({', '.join(found)} differ)")
    return next(iter(found.values()), "")


def _tool_calls(what: str, given: dict) -> list[dict[str, Any]]:
    """The calls as {"type": "function", "function": {"name", "arguments"}}, the "id" kept."""
    calls = given.get("tool_calls") or given.get("function_call") or []
    calls = [calls] if isinstance(calls, dict) else list_of(calls, f"{what}: tool_calls")
    return [_call(what, call) for call in calls]


def _call(what: str, call: Any) -> dict[str, Any]:
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{what} has a tool call without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _read_arguments(arguments)
    elif not isinstance(arguments, dict):
        raise ValueError(f"{what} calls {function['name']} with arguments that are not an object")
    called = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    return {"id": call["id"], **called} if isinstance(call.get("id"), str) else called


def _read_arguments(text: str) -> dict | str:
    """Templates write arguments as JSON, and a string of JSON would be quoted a second time. What
    is not an object stays the text that the model wrote."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text

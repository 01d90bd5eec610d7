"""One row of a source, in any of the shapes people have, checked and brought into one.

    messages, conversations or conversation     a list of messages, see data/messages.py
    prompt, question or instruction             a text or a list of messages; a text under "input"
                                                follows after an empty line, or is all there is
      with response, completion, answer         its reply, a text or a list of messages; without one
      or output                                 the row is a conversation to answer
    text                                        a plain text

The first of these that a row has is read. Beside messages and prompts there may be "system" or
"system_prompt" (a text that goes before the messages), "tools" (a list), "domain", "temperature"
and "finish_reason" (of the last reply, see data/finishes.py). A list may be a JSON string of one.
None is as good as absent. A reply under any other name is refused where it would be the only one.
"""

from __future__ import annotations

import json
import math
from typing import Any

from spectrain.data.finishes import CALLS, finish_of
from spectrain.data.messages import list_of, parse_message

_CHATS = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "question", "instruction")
_REPLIES = ("response", "completion", "answer", "output")
# Where else people keep replies: of several, of another model, to choose from.
_UNREAD = (
    *("responses", "completions", "answers", "outputs", "reply", "replies", "generation"),
    *("generations", "generated", "generated_text", "generated_texts", "output_text", "assistant"),
    *("assistant_response", "model_response", "model_output", "bot", "gpt", "chosen", "target"),
    *("targets", "solution", "solutions", "choices", "candidates", "samples"),
)
_SYSTEMS = ("system", "system_prompt")
_LONGEST_CLAUSE = 400  # characters
_TOO_DEEP = "not valid JSON (nested too deeply)"
_DEEPEST = 100  # lists and objects inside each other; templates go down by recursion
_NOT_TEXT = ("image", "images", "audio", "audios", "video", "videos")


def parse(row: bytes | dict, texts: bool) -> dict[str, Any]:
    """{"messages", "tools", "domain", "temperature", "finish_reason"}, what was not given None; or,
    if `texts`, {"text", "domain"}.

    row: a line of JSON, or a row as the datasets library gives it. There every record has the keys
    of all records, so that None is dropped at any depth; in a line it is only at the row's and the
    messages' own keys, for elsewhere it may be meant.

    Raises ValueError that says in one clause what is wrong, whatever the row is.
    """
    try:
        row = _decoded(row) if isinstance(row, bytes) else _without_none(row)
        parsed = _parsed(row, texts)
        _require_json(parsed)
        return parsed
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(_clause(str(error))) from None


def _parsed(row: Any, texts: bool) -> dict[str, Any]:
    if isinstance(row, dict):
        row = {key: value for key, value in row.items() if value is not None}
        given = _given_messages(row)
    if not isinstance(row, dict) or (given is None and "text" not in row):
        raise ValueError(_expected(row, texts))
    return _plain_text(row, texts) if given is None else _conversation(row, given)


def canonical(value: Any) -> str:
    """The one JSON text of a value; equal values have equal texts."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeError:
        raise ValueError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # some of its messages end with it
        raise ValueError(f"not valid JSON ({what} at column {error.colno})") from None
    except ValueError:
        raise ValueError("not valid JSON (a number of too many digits)") from None


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _require_json(parsed: dict) -> None:
    """What is hashed and rendered must be JSON, and text that a tokenizer takes."""
    try:
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeError:  # halves of surrogate pairs
        raise ValueError("not UTF-8 text") from None
    except (TypeError, ValueError) as error:  # not of JSON; NaN and infinities; endless digits
        raise ValueError(f"holds a value that is not JSON ({error})") from None
    inside = list(parsed.values())
    for _ in range(_DEEPEST):
        inside = [
            item
            for value in inside
            if isinstance(value, (dict, list))
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    if inside:
        raise ValueError(_TOO_DEEP)


def _clause(text: str) -> str:
    """One short line that any terminal and file takes, whatever of the row is in it."""
    line = " ".join(text.split())
    line = line if len(line) <= _LONGEST_CLAUSE else f"{line[: _LONGEST_CLAUSE - 1]}…"
    return line.encode("utf-8", "backslashreplace").decode()


def _expected(row: Any, texts: bool) -> str:
    shapes = ['{"messages": [{"role", "content"}, …]}', '{"conversations": […]}']
    shapes += ['{"prompt": …, "response": …}'] + ['{"text": …}'] * texts
    wanted = f"expected {', '.join(shapes[:-1])} or {shapes[-1]}"
    keys = ", ".join(map(str, row)) if isinstance(row, dict) else ""
    return f"not a conversation: {wanted}" + f" (its keys: {keys:.200})" * bool(keys)


def _plain_text(row: dict, welcome: bool) -> dict[str, Any]:
    if not welcome:
        raise ValueError('a plain text has nothing to answer: expected {"messages": […]}')
    if not isinstance(row["text"], str):
        raise ValueError(f"text is not a text ({row['text']!r:.40})")
    return {"text": row["text"], "domain": _fact(row, "domain", str)}


def _conversation(row: dict, given: list) -> dict[str, Any]:
    for key in _NOT_TEXT:
        if row.get(key):
            raise ValueError(f"the row comes with {key}, and only text is read")
    if not given:
        raise ValueError("the conversation has no messages")
    messages = [parse_message(number, message) for number, message in enumerate(given)]
    if messages[-1]["role"] != "assistant":
        _require_no_reply(row)
    return {
        "messages": _with_system(row, messages),
        "tools": _tools(row),
        "domain": _fact(row, "domain", str),
        "temperature": _temperature(row),
        "finish_reason": _finish(row, messages[-1]),
    }


def _require_no_reply(row: dict) -> None:
    """A conversation without a reply is answered by the target: one that stands elsewhere would be
    lost without a word."""
    chat = next((key for key in _CHATS if key in row), None)
    found = [key for key in (*(_REPLIES if chat else ()), *_UNREAD) if row.get(key)]
    if found:
        raise ValueError(
            f"{found[0]} seems to be a reply and is not read: expected it "
            + (f"as the last of {chat}" if chat else "as a text under response")
            + ", or no such key where the target is to answer"
        )


# ── where the messages are ───────────────────────────────────────────────────


def _given_messages(row: dict) -> list | None:
    """The messages as they are given, None where the row has neither these nor a prompt."""
    for key in _CHATS:
        if key in row:
            return list_of(row[key], key)
    prompt, reply = _only(row, _PROMPTS), _only(row, _REPLIES)
    more = row.get("input", "") if prompt else ""
    if prompt is None:
        if "input" not in row:
            return None
        prompt = "input"
    messages = _turns(row[prompt], "user", prompt)
    if more:
        if not isinstance(row[prompt], str) or not isinstance(more, str):
            raise ValueError(f"{prompt} and input are not both texts")
        messages[0]["content"] += f"\n\n{more}"
    return messages + (_turns(row[reply], "assistant", reply) if reply else [])


def _turns(value: Any, role: str, name: str) -> list:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, (list, dict)):
        raise ValueError(f"{name} is neither a text nor a list of messages")
    return value if isinstance(value, list) else [value]


def _only(row: dict, names: tuple[str, ...]) -> str | None:
    """The one of these names that the row has."""
    found = [name for name in names if name in row]
    if len(found) > 1:
        raise ValueError(f"the row has both {found[0]} and {found[1]}, which mean the same")
    return found[0] if found else None


def _with_system(row: dict, messages: list[dict]) -> list[dict]:
    name = _only(row, _SYSTEMS)
    system = _fact(row, name, str) if name else None
    if not system:
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise ValueError(f"{name} and the system message differ")
    return messages


# ── facts beside them ────────────────────────────────────────────────────────


def _tools(row: dict) -> list | None:
    tools = list_of(row.get("tools") or [], "tools")
    return [_tool(tool) for tool in tools] or None


def _tool(tool: Any) -> dict:
    if isinstance(tool, str):
        try:
            tool = json.loads(tool)
        except (ValueError, RecursionError):
            raise ValueError("tools holds a string that is not JSON") from None
    if not isinstance(tool, dict):
        raise ValueError("tools holds something that is not an object")
    return tool


def _temperature(row: dict) -> float | None:
    given = _fact(row, "temperature", (int, float))
    try:
        temperature = None if given is None else float(given)
    except OverflowError:
        temperature = math.inf
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ValueError(f"temperature {given!r:.40} is not a number from 0 upwards")
    return temperature


def _finish(row: dict, last: dict) -> str | None:
    """Why the last reply ended. One that calls tools ended so: nothing is missing of it."""
    finish = finish_of(_fact(row, "finish_reason", str) or "") or None
    return "stop" if finish in CALLS and last.get("tool_calls") else finish


def _fact(row: dict, key: str, kind: type | tuple[type, ...]) -> Any:
    value = row.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise ValueError(f"{key} has the wrong type ({value!r:.40})")
    return value

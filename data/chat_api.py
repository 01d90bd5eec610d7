"""The OpenAI chat API: what a question looks like there, what answers and errors mean.

Everything here is a matter of dictionaries and exceptions; the connection is in server.py.
"""

from __future__ import annotations

import json
from typing import Any

from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.data.finishes import finish_of
from spectrain.data.questions import Question, Reply

# A server draws by the defaults of the model's generation_config.json (vLLM, SGLang) or by its own
# (llama.cpp) where a request is silent: then the replies would not be the target's.
NEUTRAL = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
# vLLM tells the ids that it read and produced when it is asked to; others ignore this.
TELL_IDS = {"return_token_ids": True}
RESERVED = ("model", "messages", "tools", "temperature", "top_p", "max_tokens", "seed", "stream")
# Of a prompt that is too long for it, as a rule; what is wrong with all requests, the trial shows.
REFUSALS = (400, 413, 422)
GO_ON = "the same command goes on where it stopped"


def messages_of(question: Question) -> list[dict]:
    """The messages with tool calls in the API's form: arguments as JSON text, an id, a type."""
    return [
        message | {"tool_calls": [_call(n, call) for n, call in enumerate(message["tool_calls"])]}
        if message.get("tool_calls")
        else message
        for message in question.messages
    ]


def _call(number: int, call: dict) -> dict:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id") or f"call_{number}",
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": arguments},
    }


def tools_of(question: Question) -> list[dict] | None:
    """The tools in the API's form; a bare function is wrapped."""
    return [
        tool if "function" in tool else {"type": "function", "function": tool}
        for tool in question.tools or ()
    ] or None


def check_prompt(answer: dict, question: Question) -> None:
    """Raise SpectrainError unless the server read the prompt that the target would read.

    By its ids where the server tells them, else by their number.
    """
    ours, theirs = question.ids, answer.get("prompt_token_ids")
    count = len(theirs) if theirs else (answer.get("usage") or {}).get("prompt_tokens")
    if count is None:
        raise SpectrainError(
            "the server does not tell how many tokens it read, so that another chat template "
            "would go unseen",
            fix="check_prompts=false asks it all the same",
        )
    if count != len(ours):
        what = f"the server reads {count} tokens where the target reads {len(ours)}"
    elif theirs and theirs != ours:
        place = next(n for n, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
        what = f"the server reads token {theirs[place]} at {place}, the target {ours[place]}"
    else:
        return
    raise SpectrainError(
        what,
        fix="serve the target itself with its own chat template and tokenizer, and look for a "
        "default system prompt or thinking switch (check_prompts=false if the server only counts "
        "otherwise)",
    )


def reply_of(answer: dict, question: Question) -> Reply:
    """The reply in a whole answer. Its ids are believed where those of the prompt are the target's.

    A reply with tool calls is not the text that the target produced: its finish is "tool_calls",
    and it is for the caller to drop it unless the server told the ids.
    """
    choice = answer["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls")
    known = answer.get("prompt_token_ids") == question.ids
    return Reply(
        text=message.get("content") or "",
        finish="tool_calls" if calls else finish_of(choice.get("finish_reason") or "unknown"),
        tokens=choice.get("token_ids") if known else None,
        reasoning=message.get("reasoning_content") or message.get("reasoning"),
    )


def name_of(question: Question) -> str:
    """What tells people which question it is: its number and how its last message begins."""
    begin = " ".join(str(question.messages[-1].get("content") or "").split()) or "no text"
    return f"question {question.place} ({begin[:40]!r})"


def explain(error: Exception, retries: int, timeout: float) -> SpectrainError:
    """What an exception of the client, or a ValueError over an answer, means to people: RunFailed
    where trying again may do."""
    status = getattr(error, "status_code", None)
    if isinstance(error, ValueError):
        return SpectrainError(
            f"the server's answer is no chat completion ({_line(error)})",
            fix="give the URL of an OpenAI-compatible API; it ends with /v1 as a rule",
        )
    if status is None:
        slow = type(error).__name__ == "APITimeoutError"
        what = f"no answer within {timeout:g} s" if slow else f"no connection ({_cause(error)})"
        return RunFailed(f"{what}, asked {retries + 1} times", fix=f"is it running? {GO_ON}")
    said = f"({status}: {_line(_said(error))})"
    if status in (401, 403):
        return SpectrainError(
            f"the server refuses the key {said}", fix="set OPENAI_API_KEY to one that it takes"
        )
    if status == 404:
        return SpectrainError(
            f"the server does not know this {said}",
            fix="check the URL, which ends with /v1 as a rule, and the model",
        )
    if status in (408, 409, 429) or status >= 500:
        return RunFailed(f"the server fails, asked {retries + 1} times {said}", fix=GO_ON)
    return SpectrainError(
        f"the server refuses the request {said}",
        fix='mend what it names; an unknown field is left out by extra {"field": null}',
    )


def _said(error: Any) -> Any:
    """The message inside an error's body, whose shape differs from server to server."""
    body = error.body
    while isinstance(body, dict):
        body = next((body[key] for key in ("error", "message", "detail") if body.get(key)), None)
    return body or error.message


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return _line(error) or type(error).__name__


def _line(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 200 else f"{text[:199]}…"

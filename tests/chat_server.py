"""A server of the OpenAI chat API on loopback, for tests: real HTTP, answers as the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spectrain.data.questions import Question, Unit
from spectrain.data.server import Server

SOON = {"retry-after-ms": "1"}  # tests do not wait for a client that backs off


def said(text: str, prompt_tokens: int, finish: str = "stop", **message) -> dict:
    """The body of a usual answer."""
    message = {"role": "assistant", "content": text} | message
    return {
        "id": "chat-1",
        "object": "chat.completion",
        "created": 0,
        "model": "tiny",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 3,
            "total_tokens": prompt_tokens + 3,
        },
    }


class ChatServer:
    """`reply`: from a request's body to an answer: its body (a text is sent as it is), or (status,
    body), or bytes (sent under a header that promises more), or None (the connection is cut without
    a word).

    asked, trials: bodies of the requests that came, those for one token apart; headers: of the last
    one · peak: the most that were being answered at a time · url: of the API
    """

    def __init__(self, reply: Callable[[dict], object], models: object = ("tiny",)) -> None:
        self.reply, self.models = reply, models
        self.asked: list[dict] = []
        self.trials: list[dict] = []
        self.headers: Mapping = {}
        self.open = self.peak = 0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def __enter__(self) -> ChatServer:
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.socket.close()  # not server_close, which would wait for hanging answers

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                if server.models is None or self.path != "/v1/models":
                    return self.send({"error": {"message": "Not Found"}}, 404)
                models = [{"id": name, "object": "model"} for name in server.models]
                self.send({"object": "list", "data": models})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path != "/v1/chat/completions":
                    return self.send({"detail": "Not Found"}, 404)
                with server._lock:
                    server.headers = self.headers
                    (server.trials if body["max_tokens"] == 1 else server.asked).append(body)
                    server.open += 1
                    server.peak = max(server.peak, server.open)
                try:
                    answer = server.reply(body)
                finally:
                    with server._lock:
                        server.open -= 1
                with suppress(OSError):  # the client may have hung up
                    status, answer = answer if isinstance(answer, tuple) else (200, answer)
                    self.send(answer, status)

            def send(self, body: object, status: int = 200) -> None:
                cut = body is None or isinstance(body, bytes)
                if not cut:
                    body = (body if isinstance(body, str) else json.dumps(body)).encode()
                if body is not None:
                    self.send_response(status)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(body) + 100 * cut))
                    for name, value in SOON.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body)
                self.close_connection = cut

        return Handler


# ── what tests ask it ────────────────────────────────────────────────────────


def question(place: int, text: str | None = None, temperature: float = 0.7) -> Question:
    """Its prompt has as many tokens as its text has characters."""
    text = text or f"question {place}"
    return Question(
        ids=list(range(len(text))),
        temperature=temperature,
        messages=({"role": "user", "content": text},),
        tools=None,
        place=place,
        key=f"{place:016x}",
    )


def unit(number: int, questions: int = 3) -> Unit:
    places = range(number * 100, number * 100 + questions)
    return Unit(tuple(question(place) for place in places))


def ask_of(body: dict) -> str:
    return body["messages"][-1]["content"]


def echo(body: dict) -> dict:
    return said(f"re: {ask_of(body)}", len(ask_of(body)))


def backend(server: ChatServer, **changes) -> Server:
    settings = {"max_new_tokens": 20, "top_p": 0.9, "seed": 1, "retries": 2, "timeout": 30}
    return Server(server.url, "tiny", target="f", **settings | changes)


def gather(answers, got: list) -> None:
    """Append the keys of the units that are handed over to `got`, which outlives an error."""
    for one, _ in answers:
        got.append(one.key)


def keys(*units: Unit) -> list[str]:
    return [one.key for one in units]


def failing(error: pytest.ExceptionInfo) -> str:
    """The message, which must be one line of bearable length."""
    line = str(error.value)
    assert "\n" not in line
    assert len(line) < 700
    return line

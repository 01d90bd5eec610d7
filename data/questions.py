"""What is asked of a target, and what it says: the words that all backends share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Question:
    """One assistant turn to be made.

    ids: the prompt's tokens; messages and tools: the same prompt as a server takes it; place: the
    caller's own number for it; key: 16 hex digits over everything that shapes the reply.
    """

    ids: list[int]
    temperature: float
    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] | None
    place: int
    key: str

    @property
    def seed(self) -> int:
        """What is drawn for the reply follows from it: 31 bits, which every server takes."""
        return int(self.key, 16) % 2**31


@dataclass(frozen=True)
class Reply:
    """tokens: as produced, the end-of-turn token included iff finish is "stop"; None where a server
    does not tell them. finish: "stop", "length", or what else a server says. reasoning: a server's
    separate reasoning text."""

    text: str
    finish: str
    tokens: list[int] | None
    reasoning: str | None = None


@dataclass(frozen=True)
class Unit:
    """Questions of one temperature that are answered and saved together."""

    questions: tuple[Question, ...]

    @property
    def key(self) -> str:
        """16 hex digits over the keys of its questions."""
        keys = ",".join(question.key for question in self.questions)
        return hashlib.sha256(keys.encode()).hexdigest()[:16]

    @property
    def temperature(self) -> float:
        return self.questions[0].temperature


class Backend(Protocol):
    """Something that answers. `identity`: all that shapes its replies besides the questions."""

    identity: str

    def answer(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, list[Reply]]]:
        """Units as they are finished, in any order, each with one reply for each question."""
        ...

"""What is asked of a target, and what it says: the words that all backends share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Question:
    """One assistant turn to be made.

    ids: the prompt's tokens; messages and tools: the same prompt as a server takes it; place: the
    caller's own number for it.
    """

    ids: list[int]
    temperature: float
    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] | None
    place: int


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
    """Questions of one temperature that are answered and saved together.

    key: 16 hex digits over everything that shapes the replies.
    """

    key: str
    questions: tuple[Question, ...]

    @property
    def temperature(self) -> float:
        return self.questions[0].temperature

    @property
    def seed(self) -> int:
        return int(self.key[:12], 16)


class Backend(Protocol):
    """Something that answers. `identity`: all that shapes its replies besides the questions."""

    identity: str

    def answer(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, list[Reply]]]:
        """Units as they are finished, in any order, each with one reply for each question."""
        ...

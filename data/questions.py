"""What is asked of whoever makes the replies, and what comes back: the types that every backend
(the target itself, a server) speaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Question:
    """One assistant turn to be made.

    ids: the prompt's tokens · messages, tools: the same prompt for a server · place: the caller's
    own number for it
    """

    ids: list[int]
    temperature: float
    messages: tuple[dict, ...]
    tools: tuple | None
    place: int


@dataclass(frozen=True)
class Reply:
    """finish: "stop" or "length"; anything else a server says is passed on.
    tokens: as produced, the end-of-turn token included iff finish is "stop"; None where a server
    does not tell · reasoning: a server's separate reasoning text
    """

    text: str
    finish: str
    tokens: list[int] | None
    reasoning: str | None = None


@dataclass(frozen=True)
class Unit:
    """Questions of one temperature that are answered together and saved together.

    key: hash over everything that shapes the replies
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
    """`identity`: all that shapes its replies besides the questions; goes into the units' keys."""

    identity: str

    def answer(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, list[Reply]]]:
        """Finished units, in any order."""
        ...

"""What a request becomes: its tokens, why it ended, and how many drafts each forward accepted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Completion:
    """One reply, growing until `finish` is set.

    tokens: new ids, the stop token included · finish: "stop" or "length"
    forwards: target forwards after the prefill · runs: accepted drafts per forward → how often
    stopped_by: the stop string that ended it; the text ends before it
    """

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    forwards: int = 0
    runs: Counter[int] = field(default_factory=Counter)
    stopped_by: str = ""

    @property
    def committed(self) -> int:
        """Tokens that `forwards` brought: all but the prefill's own."""
        return max(0, len(self.tokens) - 1)

    def take(self, tokens: Sequence[int], ends: Ends, limit: int) -> int:
        """Add tokens up to what ends the reply or the limit; returns how many were added."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            if token in ends.ids:
                self.finish = "stop"
            elif string := ends.string_in(self.tokens):
                self.finish, self.stopped_by = "stop", string
            elif len(self.tokens) >= limit:
                self.finish = "length"
            if self.finish:
                break
        return len(self.tokens) - before


@dataclass(frozen=True)
class Ends:
    """What ends a reply. decode: token ids → text, needed for strings alone."""

    ids: frozenset[int]
    strings: tuple[str, ...] = ()
    decode: Callable[[list[int]], str] | None = None

    def string_in(self, tokens: list[int]) -> str:
        """The stop string that the last token completed, the earliest in the text; else "".

        A token is a byte or more, so the last tokens, as many as the longest string has bytes and a
        few for a character that they cut, hold it whole.
        """
        if not self.strings:
            return ""
        longest = max(len(string.encode()) for string in self.strings)
        text = self.decode(tokens[-(longest + 4) :])
        found = [(text.find(string), string) for string in self.strings if string in text]
        return min(found)[1] if found else ""


@dataclass
class Clock:
    """Seconds by stage as the host sees them (on a GPU: until the work is queued; of steps that are
    replayed as graphs only the total is known, and draft and verify stay 0).

    draft and verify are the forwards of head and target alone; `total` is the time in steps, the
    prefill left out. Overhead is all the rest of it: sampling, verification rules, cache, tokens,
    bookkeeping.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0
    steps: int = 0

    @property
    def overhead(self) -> float:
        return self.total - self.draft - self.verify

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        setattr(self, stage, getattr(self, stage) + time.perf_counter() - started)

    def add(self, other: Clock) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def clear(self) -> None:
        self.__init__()

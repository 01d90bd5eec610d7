"""The date that chat templates print: by default today's, while data is prepared a fixed one.

Some templates put the date into the prompt with `strftime_now`. Then a prompt asked tomorrow is
another one: its reply and its features would be made again, and a store would depend on when it
was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import date, datetime
from functools import cache
from string import ascii_letters

CLOCK = "strftime_now"
_day: ContextVar[date | None] = ContextVar("day", default=None)


@contextmanager
def dated(day: date) -> Iterator[None]:
    """Inside, templates print this day, at midnight."""
    token = _day.set(day)
    try:
        yield
    finally:
        _day.reset(token)


def date_printed(tokenizer) -> str | None:
    """The fixed date (YYYY-MM-DD) that the chat template may print; None where there is none."""
    day = _day.get()
    return day.isoformat() if day and CLOCK in str(tokenizer.chat_template) else None


def dated_template(tokenizer, tools: list | None) -> str | None:
    """The chat template with the fixed date; None where the tokenizer's own serves.

    The library makes text of every function that is passed to a template, so that the clock is
    replaced inside: a macro of this name goes before the library's.
    """
    day = _day.get()
    if day is None or date_printed(tokenizer) is None:
        return None
    template = tokenizer.get_chat_template(tools=tools)
    return f"{_macro(day)}\n{template}" if CLOCK in template else None


@cache
def _macro(day: date) -> str:
    """`strftime_now` of a day; the line break behind it is not printed."""
    midnight = datetime(day.year, day.month, day.day)
    codes = [f"%{flag}{letter}" for flag in ("", "-") for letter in ascii_letters]
    replaced = "".join(f"|replace({code!r}, {midnight.strftime(code)!r})" for code in codes)
    return (
        f"{{% macro {CLOCK}(format) %}}{{% for part in format.split('%%') %}}"
        f"{{{{ '%' if not loop.first }}}}{{{{ part{replaced} }}}}{{% endfor %}}{{% endmacro %}}"
    )

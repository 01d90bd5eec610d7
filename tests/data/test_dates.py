"""A template that prints the date: the same text whenever data is prepared."""

from __future__ import annotations

from datetime import date, datetime
from string import ascii_letters

import pytest
from chat_styles import CHATML
from chat_tokenizers import KINDS

from spectrain.data.conversations import Conversation
from spectrain.data.dates import date_printed, dated
from spectrain.data.render import prompt_text

ASKED = Conversation("i", "p", ({"role": "user", "content": "hi"},))
DAY = date(2027, 3, 4)
# As Llama 3.1 has it: its own date if the caller gives none and there is no clock.
LLAMA = (
    "{% if date_string is not defined %}{% if strftime_now is defined %}"
    '{% set date_string = strftime_now("%d %b %Y") %}'
    '{% else %}{% set date_string = "26 Jul 2024" %}{% endif %}{% endif %}'
    "{{ 'Today: ' + date_string + '\\n' }}" + CHATML
)


@pytest.fixture(scope="module")
def tokenizer():
    return KINDS["byte_level"]()


def test_every_code_is_printed_as_the_clock_would(tokenizer):
    """The plain reference: Python's own strftime, at midnight."""
    codes = [f"%{flag}{letter}" for flag in ("", "-") for letter in ascii_letters]
    form = " ".join([*codes, "%%d", "100%"])
    tokenizer.chat_template = f"{{{{ strftime_now({form!r}) }}}}|{CHATML}"
    with dated(DAY):
        told = prompt_text(tokenizer, ASKED).split("|")[0]
    assert told == datetime(2027, 3, 4).strftime(form)


def test_the_date_is_fixed_inside_and_real_outside(tokenizer):
    tokenizer.chat_template = LLAMA
    before, today, after = date.today(), prompt_text(tokenizer, ASKED), date.today()
    with dated(DAY):
        fixed = prompt_text(tokenizer, ASKED)
        assert date_printed(tokenizer) == "2027-03-04"
    assert fixed.startswith("Today: 04 Mar 2027\n<|im_start|>user")
    assert today in [fixed.replace("04 Mar 2027", f"{d:%d %b %Y}") for d in (before, after)]
    assert date_printed(tokenizer) is None


@pytest.mark.parametrize("start", ["", "\n", "\n\n", "  \n", "x"])
def test_nothing_else_of_the_text_changes(tokenizer, start):
    """The template's first white space is printed, or not, as it is without a fixed date."""
    for more in ("", "{{ '' if strftime_now is defined else 'no clock' }}"):
        tokenizer.chat_template = start + CHATML + more
        plain = prompt_text(tokenizer, ASKED)
        with dated(DAY):
            assert prompt_text(tokenizer, ASKED) == plain


def test_a_template_without_a_date_has_none(tokenizer):
    tokenizer.chat_template = CHATML
    with dated(DAY):
        assert date_printed(tokenizer) is None

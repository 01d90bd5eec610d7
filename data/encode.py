"""Texts to ids with the target's tokenizer; texts that begin alike are not read twice."""

from __future__ import annotations

from weakref import WeakKeyDictionary


def encode(tokenizer, text: str) -> list[int]:
    """Ids of a rendered text: the template wrote the special tokens, the tokenizer adds none."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


class Reader:
    """Encodes texts each of which begins, as a rule, with the one before: the turns of a
    conversation. The ids are those of `encode`.

    A fast tokenizer first cuts a text at its added tokens and reads each part by itself, so that
    ids up to such a token (a mark) hold whatever follows it.
    """

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self._marks = _marks_of(tokenizer)
        self._text, self._ids = "", []  # of the last text, up to and including its last mark

    def ids(self, text: str) -> list[int]:
        """Ids of `text`."""
        if self._text and text.startswith(self._text):
            mark = self._marks.text(self._ids[-1])
            fresh = encode(self.tokenizer, mark + text[len(self._text) :])
            ids = self._ids + fresh[1:]
        else:
            ids = encode(self.tokenizer, text)
        for place in range(len(ids) - 1, -1, -1):
            mark = self._marks.text(ids[place])
            # The token for what is unknown may be an added one, and then no part of the text.
            if mark and ids.count(ids[place]) == text.count(mark):
                self._text = text[: text.rindex(mark) + len(mark)]
                self._ids = ids[: place + 1]
                break
        return ids


class _Marks:
    """The added tokens at which a tokenizer cuts every text, whatever stands beside them."""

    def __init__(self, tokenizer) -> None:
        self._known: dict[int, str | None] = {}
        # A slow tokenizer may do with its parts what it likes.
        self._added = tokenizer.added_tokens_decoder if tokenizer.is_fast else {}

    def text(self, token: int) -> str | None:
        """The text of a mark; None for any other token."""
        if token not in self._added:
            return None
        if token not in self._known:
            self._known[token] = self._checked(token)
        return self._known[token]

    def _checked(self, token: int) -> str | None:
        added = self._added[token]
        if added.normalized or added.single_word:  # what follows may change those
            return None
        own = added.content
        if any(own in other.content[:-1] for other in self._added.values()):
            return None  # a longer one may take its place
        if any(own.endswith(own[:length]) for length in range(1, len(own))):
            return None  # "aa": which of "aaa" it is cannot be told
        return own


_MARKS: WeakKeyDictionary = WeakKeyDictionary()


def _marks_of(tokenizer) -> _Marks:
    if tokenizer not in _MARKS:
        _MARKS[tokenizer] = _Marks(tokenizer)
    return _MARKS[tokenizer]

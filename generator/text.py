"""The text of a reply while its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spectrain.generator.completion import Completion

_UNFINISHED = "\ufffd"  # what a tokenizer shows for a character that is cut


def text_of(done: Completion, decode: Callable[[list[int]], str], stop_ids: Sequence[int]) -> str:
    """The text of a reply without what ended it: the stop token, or the stop string and after."""
    tokens = done.tokens
    if tokens and done.finish == "stop" and tokens[-1] in stop_ids:
        tokens = tokens[:-1]
    text = decode(tokens)
    place = text.find(done.stopped_by) if done.stopped_by else -1
    return text[:place] if place >= 0 else text


class Growing:
    """Tells what has newly become certain of the text of a growing reply: a character that is not
    whole yet, and what may be the beginning of a stop string, are held back."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop_ids: Sequence[int],
        strings: Sequence[str] = (),
    ) -> None:
        self._decode, self._stops, self._strings = decode, stop_ids, strings
        self._told = 0

    def more(self, done: Completion) -> str:
        """The part of the text that has not been told."""
        text = text_of(done, self._decode, self._stops)
        end = len(text) if done.finish else self._certain(text)
        part, self._told = text[self._told : end], max(self._told, end)
        return part

    def _certain(self, text: str) -> int:
        end = len(text.rstrip(_UNFINISHED))
        for string in self._strings:
            for size in range(min(len(string), end), 0, -1):
                if text[:end].endswith(string[:size]):
                    end -= size
                    break
        return end

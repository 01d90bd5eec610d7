"""Replies that are never asked for twice: kept by question, in files of units.

A unit is a group of questions of similar length that are answered together; its file appears whole
or not at all. A killed run, repeated, asks for the units that have no file. They have the same
questions as before, since questions come in a fixed order and all units but the last of a
temperature have the same size; so the replies are the same to the last bit. With further
conversations only theirs are asked for, in units of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json, write_json
from spectrain.data.finishes import REFUSED
from spectrain.data.questions import Backend, Question, Reply, Unit


def question_key(identity: str, seed: int, temperature: float, ids: list[int]) -> str:
    """16 hex digits over all that shapes a reply: who answers and how, the draw, the prompt."""
    shaped_by = json.dumps([identity, seed, temperature, ids])
    return hashlib.sha256(shaped_by.encode()).hexdigest()[:16]


def plan_units(questions: Iterable[Question], size: int) -> Iterator[Unit]:
    """Units of `size` questions, cut from questions ordered by temperature and length."""
    part: list[Question] = []
    for question in questions:
        if part and (len(part) == size or part[0].temperature != question.temperature):
            yield Unit(tuple(part))
            part = []
        part.append(question)
    if part:
        yield Unit(tuple(part))


class ReplyFolder:
    """The files of answered units: the keys of the questions and their replies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ask(self, backend: Backend, units: Iterable[Unit]) -> Iterator[tuple[Unit, list[Reply]]]:
        """Have units answered; each is on the disk before it is told of. Raises RunFailed on a full
        disk."""
        for unit, replies in backend.answer(units):
            assert len(replies) == len(unit.questions), "one reply for each question"
            said = zip(unit.questions, replies, strict=True)
            write_json(
                self._file(unit.key),
                {"replies": {question.key: asdict(reply) for question, reply in said}},
            )
            yield unit, replies

    def read(self, units: Iterable[str] | None = None) -> Iterator[tuple[str, Reply]]:
        """(key of a question, its reply) of these units (by key), or all that there are; a file
        that is damaged counts for nothing. Questions that were refused are told of their own unit
        alone: another run asks them again, perhaps of a server with more room."""
        files = sorted(self.folder.glob("unit-*.json")) if units is None else map(self._file, units)
        for file in files:
            try:
                found = read_json(file)["replies"]
                replies = [(key, Reply(**reply)) for key, reply in found.items()]
                if units is None:
                    replies = [(key, reply) for key, reply in replies if reply.finish != REFUSED]
            except (SpectrainError, KeyError, TypeError, AttributeError):
                continue
            yield from replies

    def _file(self, key: str) -> Path:
        return self.folder / f"unit-{key}.json"

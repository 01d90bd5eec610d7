"""Replies in units of fixed composition that are never asked for twice.

A unit is a group of questions of similar length that are answered together. Its key is a hash of
all that shapes the replies (backend, prompts, temperature, seed), its file appears whole or not at
all, and its sampling seed follows from its key: a killed run, repeated, gives the same replies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json, write_json
from spectrain.data.questions import Backend, Question, Reply, Unit


def plan_units(
    questions: Iterable[Question], size: int, identity: str, seed: int
) -> Iterator[Unit]:
    """Units of `size` questions, cut from questions ordered by temperature and length; which
    question falls into which unit depends on the set of questions alone."""
    part: list[Question] = []
    for question in questions:
        if part and (len(part) == size or part[0].temperature != question.temperature):
            yield Unit(_key(part, identity, seed), tuple(part))
            part = []
        part.append(question)
    if part:
        yield Unit(_key(part, identity, seed), tuple(part))


class ReplyFolder:
    """The files of answered units."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, unit: Unit) -> bool:
        """Whether the unit is answered."""
        return self.load(unit) is not None

    def load(self, unit: Unit) -> list[Reply] | None:
        """The replies of an answered unit, in the order of its questions; None when it has to be
        asked (again): no file, or not a whole one."""
        file = self._file(unit.key)
        if not file.is_file():
            return None
        try:
            content = read_json(file)
            replies = [Reply(**reply) for reply in content["replies"]]
            whole = content["key"] == unit.key and len(replies) == len(unit.questions)
        except (SpectrainError, KeyError, TypeError):
            return None
        return replies if whole else None

    def ask(self, backend: Backend, units: Iterable[Unit]) -> Iterator[tuple[Unit, list[Reply]]]:
        """Have units answered; each is on the disk before it is told of. Raises RunFailed on a full
        disk."""
        for unit, replies in backend.answer(units):
            assert len(replies) == len(unit.questions), "one reply for each question"
            write_json(
                self._file(unit.key),
                {
                    "key": unit.key,
                    "temperature": unit.temperature,
                    "replies": [asdict(reply) for reply in replies],
                },
            )
            yield unit, replies

    def prune(self, keys: set[str]) -> None:
        """Remove the files of all other units."""
        for file in self.folder.glob("unit-*.json"):
            if file.stem.removeprefix("unit-") not in keys:
                file.unlink()

    def _file(self, key: str) -> Path:
        return self.folder / f"unit-{key}.json"


def _key(questions: list[Question], identity: str, seed: int) -> str:
    shaped_by = [
        identity,
        seed,
        questions[0].temperature,
        [question.ids for question in questions],
    ]
    return hashlib.sha256(json.dumps(shaped_by).encode()).hexdigest()[:16]

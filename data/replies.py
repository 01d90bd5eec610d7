"""Answers of the target to prompts, in units of fixed composition that are never asked for twice.

A unit is a group of prompts of similar length that are answered together. Its key is a hash of all
that shapes the answers (target, prompts, sampling, seed), its file appears whole or not at all, and
its sampling seed follows from its key: a killed run, repeated, gives the same answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json, write_json
from spectrain.core.progress import progress


@dataclass(frozen=True)
class Question:
    """A prompt to answer: `place` is the caller's own number for it, `ids` the prompt's tokens."""

    place: int
    ids: list[int]
    temperature: float


@dataclass(frozen=True)
class Answer:
    """tokens: the ids the target produced, its end-of-turn token included iff finish is "stop"."""

    place: int
    temperature: float
    tokens: list[int]
    finish: str


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; `target` is the fingerprint of the model and its dtype."""

    target: str
    max_new_tokens: int
    top_p: float
    seed: int


@dataclass(frozen=True)
class Unit:
    """Questions of one temperature that are answered together."""

    key: str
    questions: tuple[Question, ...]

    @property
    def temperature(self) -> float:
        return self.questions[0].temperature

    @property
    def seed(self) -> int:
        return int(self.key[:12], 16)


# (prompts, temperature, seed) → replies, each with `tokens` and `finish`
Complete = Callable[[list[torch.Tensor], float, int], list]


def plan_units(questions: Iterable[Question], rows: int, sampling: Sampling) -> list[Unit]:
    """Units of `rows` questions, grouped by temperature and by length of the prompt; which question
    falls into which unit depends on the set of questions alone."""
    groups: dict[float, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.temperature, []).append(question)
    units = []
    for temperature in sorted(groups):
        ordered = sorted(
            groups[temperature], key=lambda question: (len(question.ids), question.ids)
        )
        for start in range(0, len(ordered), rows):
            part = tuple(ordered[start : start + rows])
            units.append(Unit(_key(part, sampling), part))
    return units


def answer(
    folder: Path, units: list[Unit], complete: Complete, decode: Callable
) -> tuple[list[Answer], int]:
    """Answer every unit that has no file in `folder` yet; files of other units are removed.

    decode: ids → text, for the people who read the files. Returns all answers, and how many tokens
    were produced now. Raises RunFailed on a full disk.
    """
    _prune(folder, {unit.key for unit in units})
    found = {unit.key: _load(folder, unit) for unit in units}
    total = sum(len(unit.questions) for unit in units)
    done = sum(len(replies) for replies in found.values() if replies is not None)
    fresh = 0
    if done < total:
        with progress(total, "answer", "replies", done=done) as bar:
            for unit in units:
                if found[unit.key] is None:
                    found[unit.key] = _ask(folder, unit, complete, decode)
                    fresh += sum(len(reply["tokens"]) for reply in found[unit.key])
                    bar.update(len(unit.questions))
    answers = [
        Answer(question.place, unit.temperature, reply["tokens"], reply["finish"])
        for unit in units
        for question, reply in zip(unit.questions, found[unit.key], strict=True)
    ]
    return answers, fresh


def _ask(folder: Path, unit: Unit, complete: Complete, decode: Callable) -> list[dict]:
    prompts = [torch.tensor(question.ids) for question in unit.questions]
    replies = [
        {"tokens": list(reply.tokens), "finish": reply.finish, "text": decode(reply.tokens)}
        for reply in complete(prompts, unit.temperature, unit.seed)
    ]
    assert len(replies) == len(prompts), "one reply for each prompt"
    write_json(
        _file(folder, unit.key),
        {"key": unit.key, "temperature": unit.temperature, "replies": replies},
    )
    return replies


def _load(folder: Path, unit: Unit) -> list[dict] | None:
    """The replies of a finished unit; None when it has to be asked (again)."""
    file = _file(folder, unit.key)
    if not file.is_file():
        return None
    try:
        content = read_json(file)
        replies = content["replies"]
        whole = content["key"] == unit.key and len(replies) == len(unit.questions)
    except (SpectrainError, KeyError, TypeError):
        return None
    return replies if whole else None


def _prune(folder: Path, keys: set[str]) -> None:
    for file in folder.glob("unit-*.json"):
        if file.stem.removeprefix("unit-") not in keys:
            file.unlink()


def _file(folder: Path, key: str) -> Path:
    return folder / f"unit-{key}.json"


def _key(questions: tuple[Question, ...], sampling: Sampling) -> str:
    shaped_by = [
        sampling.target,
        sampling.max_new_tokens,
        sampling.top_p,
        sampling.seed,
        questions[0].temperature,
        [question.ids for question in questions],
    ]
    return hashlib.sha256(json.dumps(shaped_by).encode()).hexdigest()[:16]

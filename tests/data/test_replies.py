"""Units of questions and the files of their replies: each question once, its own reply back."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrain.data.questions import Question, Reply, Unit
from spectrain.data.replies import ReplyFolder, plan_units, question_key


def question(number: int, temperature: float = 0.0) -> Question:
    ids = [number, number + 1]
    key = question_key("the target", 0, temperature, ids)
    return Question(ids, temperature, (), None, number, key)


def reply_to(asked: Question) -> Reply:
    return Reply(f"to {asked.place}", "stop", [asked.place, 2], asked.key[:3])


class Answering:
    """Answers, and notes what was asked; the units come back in another order."""

    identity = "the target"

    def __init__(self) -> None:
        self.asked: list[Unit] = []

    def answer(self, units):
        self.asked += units
        for unit in reversed(self.asked):
            yield unit, [reply_to(asked) for asked in unit.questions]


ASKED = [question(number, temperature) for temperature in (0.0, 0.7, 1.0) for number in range(7)]


@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 6))
def test_units_are_cut_from_questions_of_one_temperature(counts, size):
    """In their order, none lost; all of the size but the last of each temperature, so that units
    before it do not change with what comes behind; a unit can be told one temperature."""
    asked = [question(n, float(t)) for t, count in enumerate(counts) for n in range(count)]
    units = list(plan_units(asked, size))
    assert [one for unit in units for one in unit.questions] == asked
    assert all({one.temperature for one in unit.questions} == {unit.temperature} for unit in units)
    assert all(1 <= len(unit.questions) <= size for unit in units)
    for unit, following in pairwise(units):
        assert len(unit.questions) == size or unit.temperature != following.temperature


def test_the_key_of_a_unit_is_that_of_all_its_questions_in_their_order():
    """Two units that begin alike must not share a file: the second would find itself answered."""
    one, two, three = (question(number) for number in range(3))
    units = [(one,), (two,), (one, two), (one, three), (two, one), (one, two, three)]
    assert len({Unit(unit).key for unit in units}) == len(units)
    assert Unit((one, two)).key == Unit((question(0), question(1))).key


def test_a_question_s_key_changes_with_all_that_shapes_its_reply():
    shaped = [("a", 0, 0.0, [1]), ("b", 0, 0.0, [1]), ("a", 1, 0.0, [1]), ("a", 0, 1.0, [1])]
    shaped += [("a", 0, 0.0, [2]), ("a", 0, 0.0, [1, 1]), ("a", 0, 0.0, [])]
    assert len({question_key(*each) for each in shaped}) == len(shaped)


def test_every_reply_is_found_by_its_question(tmp_path):
    folder = ReplyFolder(tmp_path)
    units = list(plan_units(ASKED, 3))
    told = []
    for unit, replies in folder.ask(Answering(), units):
        assert (tmp_path / f"unit-{unit.key}.json").is_file()  # before it is told of
        told.append((unit, replies))
    assert [unit for unit, _ in told] == units[::-1]
    assert len(list(tmp_path.iterdir())) == len(units) == 9
    assert dict(folder.read()) == {asked.key: reply_to(asked) for asked in ASKED}
    some = dict(folder.read(unit.key for unit in units[2:4]))
    assert some == {one.key: reply_to(one) for unit in units[2:4] for one in unit.questions}


def test_a_backend_that_leaves_out_a_reply_writes_nothing(tmp_path):
    class Short(Answering):
        def answer(self, units):
            return ((unit, replies[1:]) for unit, replies in super().answer(units))

    with pytest.raises(AssertionError, match="one reply for each question"):
        list(ReplyFolder(tmp_path).ask(Short(), plan_units(ASKED, 3)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "{}",
        lambda text: json.dumps({"replies": [1]}),
        lambda text: text.replace('"finish"', '"finnish"'),
    ],
)
def test_a_damaged_file_counts_for_nothing_and_the_others_for_all(tmp_path, damage):
    """Its questions are asked again; not one of its replies is taken, whole or not."""
    folder = ReplyFolder(tmp_path)
    units = list(plan_units(ASKED, 3))
    list(folder.ask(Answering(), units))
    file = tmp_path / f"unit-{units[4].key}.json"
    file.write_text(damage(file.read_text()))
    lost = {asked.key for asked in units[4].questions}
    assert {key for key, _ in folder.read()} == {asked.key for asked in ASKED} - lost
    assert list(folder.read([units[4].key])) == []


def test_a_folder_or_file_that_is_not_there_is_empty(tmp_path):
    assert list(ReplyFolder(tmp_path / "absent").read()) == []
    assert list(ReplyFolder(tmp_path).read(["0" * 16])) == []

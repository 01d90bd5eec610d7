"""Replies that end in the middle of a talk: what is learnt, and what is counted instead."""

from dataclasses import dataclass

import pytest
from preparing import talk, write

from spectrain.data.questions import Reply
from spectrain.data.store import FeatureStore
from spectrain.recipes import prepare

WHOLE = ("the lazy dog", "stop")


@dataclass
class Scripted:
    """A backend whose reply to turn n of a talk is script[n], (text, finish), without ids."""

    script: list[tuple[str, str]]
    identity: str = "scripted"

    def answer(self, units):
        for unit in units:
            turns = [sum(m["role"] == "user" for m in q.messages) - 1 for q in unit.questions]
            yield unit, [Reply(*self.script[turn], None) for turn in turns]


@pytest.mark.parametrize(
    ("script", "learnt", "dropped"),
    [
        ([WHOLE, WHOLE, WHOLE], 3, {}),
        ([WHOLE, WHOLE, ("and", "content_filter")], 2, {"later-turn-finish-content_filter": 2}),
        ([WHOLE, WHOLE, ("and", "tool_calls")], 2, {"later-turn-finish-tool_calls": 2}),
        ([WHOLE, WHOLE, ("the lazy", "length")], 3, {}),
        ([WHOLE, WHOLE, (" ", "stop")], 2, {"later-turn-empty-reply": 2}),
        # Nobody answers what was not said to the end.
        (
            [WHOLE, ("and", "unknown")],
            1,
            {"later-turn-finish-unknown": 2, "turns-not-asked": 2},
        ),
        ([WHOLE, ("the lazy", "length")], 2, {"turns-not-asked": 2}),
        ([("the lazy", "length")], 1, {"turns-not-asked": 2}),
    ],
)
def test_every_turn_of_a_talk_is_learnt_or_counted(
    config, tmp_path, monkeypatch, script, learnt, dropped
):
    """Two talks of three turns. Each reason once for each talk."""
    monkeypatch.setattr(prepare, "_backend", lambda config, target: Scripted(script))
    talks = [talk(f"hello {n}", "", "and then?", "", "why?") for n in range(2)]
    settings = {
        "prompts": write(tmp_path / "talks.jsonl", talks),
        "regenerate": True,
        "heldout": 0.0,
    }
    report = prepare.run(config(**settings))
    assert report["counts"]["dropped"] == dropped
    store = FeatureStore.open(config().store)
    assert [int(store.text(row)[1].max()) for row in store.rows("train")] == [learnt] * 2


def test_a_first_reply_that_is_broken_off_leaves_nothing(config, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_backend", lambda config, target: Fragile([WHOLE] * 3))
    talks = [talk(f"hello {n}", "", "and then?", "", "why?") for n in range(2)]
    prompts = write(tmp_path / "talks.jsonl", talks)
    report = prepare.run(config(prompts=prompts, regenerate=True, heldout=0.0))
    assert report["counts"]["rows"]["train"] == 1
    assert report["counts"]["dropped"] == {"finish-error": 1, "turns-not-asked": 1}


class Fragile(Scripted):
    """Fails at the first turn of one talk."""

    def answer(self, units):
        for unit, replies in super().answer(units):
            yield (
                unit,
                [
                    Reply("", "error", None)
                    if question.messages[-1]["content"] == "hello 0"
                    else reply
                    for question, reply in zip(unit.questions, replies, strict=True)
                ],
            )

"""The spool: order and choice depend on content alone, and nothing of it is held in memory."""

import random
import sqlite3

import pytest
import torch
from fake_rows import random_row

from spectrain.core.errors import RunFailed
from spectrain.data.conversations import Conversation, conversation_of
from spectrain.data.questions import Reply
from spectrain.data.shapes import parse
from spectrain.data.spool import NAME, Spool


def talk(number: int, **facts) -> Conversation:
    row = {"messages": [{"role": "user", "content": f"question {number}"}], **facts}
    return conversation_of(parse(row, texts=False), "auto")[1]


def fill(spool: Spool, work: list[tuple[Conversation, int]]) -> list[bool]:
    with spool.writing():
        return [
            spool.add(conversation, source, f"f:{n}")
            for n, (conversation, source) in enumerate(work)
        ]


def content(spool: Spool) -> list[Conversation]:
    return [conversation for _, conversation in spool.conversations()]


def test_what_is_kept_does_not_depend_on_the_order(tmp_path):
    """Conversations in three shuffles, each with duplicates of other facts and other sources."""
    work = [(talk(n, domain=d), s) for n in range(30) for d, s in (("a", 1), ("b", 0), (None, 2))]
    found = []
    for seed in range(3):
        random.Random(seed).shuffle(work)
        (folder := tmp_path / str(seed)).mkdir()
        with Spool(folder) as spool:
            assert sum(fill(spool, work)) == 30
            found.append((content(spool), spool.sizes(3)))
        assert not (folder / NAME).exists()
    assert found[0] == found[1] == found[2]
    ids = [conversation.id for conversation in found[0][0]]
    assert ids == sorted(ids)
    assert {c.domain for c in found[0][0]} == {"a"}  # '["a",…' sorts before '["b"' and '[null'


def test_choice_by_source_and_by_limit(tmp_path):
    """The first of each source, or of all, in order of content hash."""
    work = [(talk(n), n % 2) for n in range(40)]
    by_id = sorted((c.id, s) for c, s in work)
    for quotas, limit in (([3, 7], None), ([0, 20], None), (None, 9), (None, None)):
        with Spool(tmp_path) as spool:
            fill(spool, work)
            assert spool.sizes(2) == [20, 20]
            spool.choose(quotas, limit)
            if quotas is None:
                expected = [name for name, _ in by_id][:limit]
            else:
                parts = [[name for name, s in by_id if s == i][:q] for i, q in enumerate(quotas)]
                expected = sorted(name for part in parts for name in part)
            assert [c.id for c in content(spool)] == expected
            assert len(spool) == len(expected)


def test_a_talk_grows_by_turns(tmp_path):
    """Replies come back in the order of their rounds, each with the prompt that it answers; the
    cooler talk's are known before they are asked for."""
    conversation = talk(0)
    with Spool(tmp_path) as spool:
        fill(spool, [(conversation, 0)])
        spool.know((f"cool {turn}", Reply(f"0.0 {turn}", "stop", [turn])) for turn in range(3))
        for turn in range(3):
            assert spool.ask(conversation.id, 0.5, [7] * (turn + 1), f"warm {turn}")
            assert not spool.ask(conversation.id, 0.0, [70000 + turn], f"cool {turn}")
            assert (spool.asked(), spool.prompt_tokens()) == (1, turn + 1)
            ((_, name, temperature, ids, key),) = spool.questions()
            assert (name, temperature, ids) == (conversation.id, 0.5, [7] * (turn + 1))
            assert spool.answered(turn) == 1
            spool.know([(key, Reply(f"0.5 {turn}", "stop", [turn]))])
            spool.end_round()
            assert (spool.asked(), spool.answered(turn)) == (0, 2)
        assert [p for p, _ in spool.replies(conversation.id, 0.5)] == [[7], [7, 7], [7, 7, 7]]
        assert [p for p, _ in spool.replies(conversation.id, 0.0)] == [[70000], [70001], [70002]]
        for temperature in (0.0, 0.5):
            texts = [reply.text for _, reply in spool.replies(conversation.id, temperature)]
            assert texts == [f"{temperature} {turn}" for turn in range(3)]
        assert spool.replies(conversation.id, 1.0) == []


def test_questions_are_ordered_by_temperature_and_length(tmp_path):
    """Whatever the order of asking; ids beyond one byte sort as numbers do; a question that two
    conversations have is asked once and answers both."""
    asked = [(1.0, [5, 5]), (0.0, [300]), (0.0, [4]), (1.0, [9]), (0.0, [1, 2, 3]), (0.0, [4])]
    with Spool(tmp_path) as spool:
        for number, (temperature, ids) in enumerate(asked):
            spool.ask(f"{number}", temperature, ids, f"{temperature}{ids}")
        found = [(temperature, ids) for _, _, temperature, ids, _ in spool.questions()]
        assert spool.asked() == 5
        spool.know((key, Reply(key, "stop", None)) for *_, key in list(spool.questions()))
        spool.end_round()
        assert [spool.replies(n, 0.0)[0][1].text for n in "25"] == ["0.0[4]"] * 2
    assert found == [(0.0, [4]), (0.0, [300]), (0.0, [1, 2, 3]), (1.0, [9]), (1.0, [5, 5])]


def test_rows_come_back_as_they_were(tmp_path):
    rows = [random_row(seed, 5 + seed)[0] for seed in range(6)]
    with Spool(tmp_path) as spool:
        assert spool.shards() == 0
        for number, row in enumerate(rows):
            spool.add_row(number // 4, row)
        assert spool.shards() == 2
        other = Spool(tmp_path, new=False)  # as another process of a launch sees it
        for shard, expected in ((0, rows[:4]), (1, rows[4:])):
            for found, row in zip(other.rows(shard), expected, strict=True):
                assert torch.equal(found.tokens, row.tokens)
                assert torch.equal(found.reply, row.reply)
                assert (found.id, found.split, found.domain) == (row.id, row.split, row.domain)


def test_a_full_disk_is_one_line(tmp_path):
    """SQLite's own limit of pages stands for the disk's."""
    with Spool(tmp_path) as spool:
        spool._base.execute("PRAGMA max_page_count = 30")
        with pytest.raises(RunFailed, match="disk full"):
            fill(spool, [(talk(number), 0) for number in range(2000)])


def test_other_errors_of_the_database_are_ours(tmp_path):
    with Spool(tmp_path) as spool, pytest.raises(sqlite3.OperationalError), spool.writing():
        spool._base.execute("SELECT nothing FROM nowhere")

"""What a preparation knows before the store exists, on disk: any number of rows in little memory.

conversations   each once, by content hash; of equal ones with unequal facts always the same one
known           all replies that there are, by the key of their question
replies         what the target said, by conversation, temperature and turn
questions       the prompts of one round that nobody has answered yet
rows            tokens and masks, in the order of the store, cut into shards

A spool is made anew by every run: what is expensive (replies, shards) is kept elsewhere. One
process writes; the others of a launch read what it wrote before they were told to.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from spectrain.core.errors import RunFailed
from spectrain.data.conversations import Conversation, rank_of
from spectrain.data.questions import Reply
from spectrain.data.shard import Row, RowInfo

NAME = ".spool.sqlite"
_TABLES = """
CREATE TABLE conversations (
    id TEXT PRIMARY KEY, rank TEXT, source INTEGER, place TEXT, chosen INTEGER DEFAULT 1,
    content TEXT);
CREATE TABLE replies (
    id TEXT, temperature REAL, turn INTEGER, prompt BLOB, reply TEXT,
    PRIMARY KEY (id, temperature, turn));
CREATE TABLE questions (
    place INTEGER PRIMARY KEY, id TEXT, temperature REAL, length INTEGER, prompt BLOB, key TEXT);
CREATE TABLE known (key TEXT PRIMARY KEY, reply TEXT);
CREATE TABLE rows (
    number INTEGER PRIMARY KEY, shard INTEGER, facts TEXT, tokens BLOB, reply BLOB);
CREATE INDEX rows_of_shard ON rows (shard);
"""
_CACHE = 64 << 10  # KiB of pages in memory
_PATIENCE = 30 * 86400.0  # seconds: the writer may hold the file while it writes a million rows


class Spool:
    """The spool in `folder`; `new` makes an empty one. Use `with`: the file goes with the writer.

    Raises RunFailed on a full disk.
    """

    def __init__(self, folder: Path, new: bool = True) -> None:
        self.file, self._new = folder / NAME, new
        if new:
            self.file.unlink(missing_ok=True)
        with self._disk():
            # Nothing survives a kill: no journal, no waiting for the disk.
            self._base = sqlite3.connect(self.file, timeout=_PATIENCE, isolation_level=None)
            self._base.execute("PRAGMA journal_mode = OFF")
            self._base.execute("PRAGMA synchronous = OFF")
            self._base.execute(f"PRAGMA cache_size = -{_CACHE}")
            if new:
                self._base.executescript(_TABLES)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()
        if self._new:
            self.file.unlink(missing_ok=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Everything inside becomes visible to other processes together, and is written fast."""
        with self._disk():
            self._base.execute("BEGIN")
            yield
            self._base.execute("COMMIT")  # after an error there is nothing worth keeping

    # ── conversations ────────────────────────────────────────────────────────

    def add(self, conversation: Conversation, source: int, place: str) -> bool:
        """Add a conversation found at `place` ("file:line") of a source; False: a duplicate.

        Of two equal ones with unequal facts the choice does not depend on their order.
        """
        values = (conversation.id, rank_of(conversation), source, place, _dump(conversation))
        before = self._base.total_changes
        self._base.execute(
            "INSERT INTO conversations (id, rank, source, place, content) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO NOTHING",
            values,
        )
        if self._base.total_changes > before:
            return True
        self._base.execute(
            "UPDATE conversations SET rank = ?2, source = ?3, place = ?4, content = ?5 "
            "WHERE id = ?1 AND (?2, ?3) < (rank, source)",
            values,
        )
        return False

    def sizes(self, sources: int, chosen: bool = False) -> list[int]:
        """Conversations of each source, all or the chosen ones."""
        found = dict(
            self._base.execute(
                "SELECT source, count(*) FROM conversations WHERE chosen >= ? GROUP BY source",
                (int(chosen),),
            )
        )
        return [found.get(source, 0) for source in range(sources)]

    def choose(self, quotas: list[int] | None, limit: int | None) -> None:
        """Keep the first `quotas[i]` of each source in order of content hash, or (None) the first
        `limit` of all."""
        parts = [("", limit)] if quotas is None else []
        parts += [(f"WHERE source = {i}", quota) for i, quota in enumerate(quotas or [])]
        if all(quota is None for _, quota in parts):
            return
        with self.writing():
            self._base.execute("UPDATE conversations SET chosen = 0")
            for which, quota in parts:
                self._base.execute(
                    "UPDATE conversations SET chosen = 1 WHERE id IN "
                    f"(SELECT id FROM conversations {which} ORDER BY id LIMIT ?)",
                    (quota,),
                )

    def __len__(self) -> int:
        """Chosen conversations."""
        return self._base.execute("SELECT count(*) FROM conversations WHERE chosen").fetchone()[0]

    def conversations(self) -> Iterator[tuple[str, Conversation]]:
        """(place, conversation) of the chosen ones in order of content hash."""
        for place, content in self._select(
            "SELECT place, content FROM conversations WHERE chosen ORDER BY id"
        ):
            yield place, _load(content)

    def conversation(self, name: str) -> Conversation:
        """The one with this id."""
        ((content,),) = self._base.execute(
            "SELECT content FROM conversations WHERE id = ?", (name,)
        )
        return _load(content)

    # ── questions and replies ────────────────────────────────────────────────

    def know(self, replies: Iterable[tuple[str, Reply]]) -> None:
        """Note replies by the keys of their questions."""
        with self.writing():
            self._base.executemany(
                "INSERT OR IGNORE INTO known VALUES (?, ?)",
                ((key, json.dumps(vars(reply))) for key, reply in replies),
            )

    def ask(self, name: str, temperature: float, prompt: list[int], key: str) -> bool:
        """Note the next question of a conversation, or its reply where that is known already;
        whether it is to be asked."""
        known = self._base.execute("SELECT reply FROM known WHERE key = ?", (key,)).fetchone()
        if known is None:
            self._base.execute(
                "INSERT INTO questions (id, temperature, length, prompt, key) "
                "VALUES (?, ?, ?, ?, ?)",
                (name, temperature, len(prompt), _bytes(prompt), key),
            )
        else:
            self._base.execute(
                "INSERT INTO replies SELECT ?1, ?2, "
                "(SELECT count(*) FROM replies WHERE id = ?1 AND temperature = ?2), ?3, ?4",
                (name, temperature, _bytes(prompt), *known),
            )
        return known is None

    def end_round(self) -> None:
        """Every question of the round gets its reply, which is known by now."""
        with self.writing():
            self._base.execute(
                "INSERT INTO replies SELECT id, temperature, "
                "(SELECT count(*) FROM replies AS earlier WHERE earlier.id = questions.id "
                "AND earlier.temperature = questions.temperature), prompt, reply "
                "FROM questions JOIN known USING (key)"
            )
            missing = self._base.execute(
                "SELECT count(*) FROM questions WHERE key NOT IN (SELECT key FROM known)"
            ).fetchone()[0]
            assert not missing, "every question has just been answered"
            self._base.execute("DELETE FROM questions")

    def answered(self, turn: int) -> int:
        """Replies to the questions of a turn, counted from 0."""
        found = self._base.execute("SELECT count(*) FROM replies WHERE turn = ?", (turn,))
        return found.fetchone()[0]

    def asked(self) -> int:
        """Different questions of this round."""
        return self._base.execute("SELECT count(DISTINCT key) FROM questions").fetchone()[0]

    def prompt_tokens(self) -> int:
        """Tokens of the prompts of this round."""
        return self._base.execute("SELECT coalesce(sum(length), 0) FROM questions").fetchone()[0]

    def questions(self) -> Iterator[tuple[int, str, float, list[int], str]]:
        """(place, conversation, temperature, prompt's ids, key), by temperature and length; the
        order depends on the set of questions alone. Of equal questions only the first."""
        for place, name, temperature, prompt, key in self._select(
            "SELECT min(place), id, temperature, prompt, key FROM questions GROUP BY key "
            "ORDER BY temperature, length, prompt"
        ):
            yield place, name, temperature, _ids(prompt), key

    def replies(self, name: str, temperature: float) -> list[tuple[list[int], Reply]]:
        """(prompt's ids, reply) of each turn answered so far."""
        found = self._base.execute(
            "SELECT prompt, reply FROM replies WHERE id = ? AND temperature = ? ORDER BY turn",
            (name, temperature),
        )
        return [(_ids(prompt), Reply(**json.loads(reply))) for prompt, reply in found]

    # ── rows ─────────────────────────────────────────────────────────────────

    def add_row(self, shard: int, row: Row) -> None:
        """Append a row to a shard."""
        facts = json.dumps(RowInfo.of(row, 0).as_facts())
        self._base.execute(
            "INSERT INTO rows (shard, facts, tokens, reply) VALUES (?, ?, ?, ?)",
            (shard, facts, row.tokens.numpy().tobytes(), row.reply.numpy().tobytes()),
        )

    def shards(self) -> int:
        """Number of shards."""
        return self._base.execute("SELECT coalesce(max(shard) + 1, 0) FROM rows").fetchone()[0]

    def rows(self, shard: int) -> list[Row]:
        """The rows of a shard, in their order."""
        found = self._base.execute(
            "SELECT facts, tokens, reply FROM rows WHERE shard = ? ORDER BY number", (shard,)
        )
        return [
            Row.of_facts(json.loads(facts), _tensor(tokens, np.int32), _tensor(reply, np.int16))
            for facts, tokens, reply in found
        ]

    # ── below ────────────────────────────────────────────────────────────────

    def _select(self, query: str) -> Iterator[tuple]:
        # A cursor of its own: others may be used while this one is read.
        with self._disk():
            for row in self._base.cursor().execute(query):  # noqa: UP028  (may be left half way)
                yield row

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if "full" not in str(error) and "disk I/O" not in str(error):
                raise
            raise RunFailed(
                "disk full",
                where=str(self.file),
                fix="free some space and run the same command again",
            ) from error


def _dump(conversation: Conversation) -> str:
    return json.dumps(vars(conversation), ensure_ascii=False)


def _load(content: str) -> Conversation:
    fields = json.loads(content)
    fields["messages"] = tuple(fields["messages"])
    fields["tools"] = tuple(fields["tools"]) if fields["tools"] else None
    return Conversation(**fields)


def _bytes(ids: list[int]) -> bytes:
    return np.array(ids, dtype=">i4").tobytes()  # big-endian: sorts as the numbers do


def _ids(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype=">i4").tolist()


def _tensor(data: bytes, kind: type) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=kind).copy())

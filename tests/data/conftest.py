"""Fixtures of the data room: files of conversations, and a small store."""

from __future__ import annotations

import json

import pytest
from fake_rows import SETTINGS, random_row

from spectrain.data.writer import StoreWriter


@pytest.fixture
def jsonl(tmp_path):
    """Write rows (or raw bytes) as a JSONL file; returns its path."""

    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


@pytest.fixture
def pairs():
    """Six rows of unequal length with states; the third and sixth are held out."""
    lengths = (6, 11, 4, 9, 30, 5)
    return [
        random_row(seed, length, "heldout" if seed % 3 == 2 else "train")
        for seed, length in enumerate(lengths)
    ]


@pytest.fixture
def store_path(tmp_path, pairs):
    """A complete store of `pairs` in two shards."""
    path = tmp_path / "store"
    with StoreWriter.claim(path, SETTINGS, {"target": "a target"}) as writer:
        writer.write_shard(0, "first", pairs[:4])
        writer.write_shard(1, "second", pairs[4:])
        writer.finish(2)
    return path

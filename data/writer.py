"""The feature store, write side: shards appear whole or not at all, and a rerun goes on.

Nothing that differs between two runs of the same work (times, paths, process ids) is written, so
that an interrupted and repeated preparation equals an uninterrupted one byte for byte.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.core.files import (
    atomic_write,
    disk_errors,
    read_json,
    require_free,
    sha256_file,
    write_json,
)
from spectrain.data.manifest import FORMAT, MANIFEST, fingerprint_of, read_manifest, shard_name
from spectrain.data.shard import DTYPES, Row, RowInfo, States, lay_out
from spectrain.data.spool import NAME as SPOOL

LOCK = ".lock"
REPLIES = "replies"
# These first: with another target, or without features, what follows from it differs as well.
TOLD_FIRST = ("target.fingerprint", "target.dtype", "features")
TOLD_LAST = "backend"  # made of other settings


class StoreWriter:
    """Writes one store. The first process of a launch uses `begin` in a folder that it holds
    (`only_process`), or `claim` for both; the others `join`."""

    def __init__(self, path: Path, settings: dict, about: dict) -> None:
        self.path, self.settings, self.about = path, settings, about
        self.fingerprint = fingerprint_of(settings)
        self.dtype: torch.dtype = DTYPES[settings["dtype"]]
        manifest = read_manifest(path) or {"complete": False, "shards": []}
        self.complete: bool = manifest["complete"]  # by an earlier run
        self._known = {shard["facts"]: shard["facts_sha256"] for shard in manifest["shards"]}

    @classmethod
    def begin(
        cls, path: Path, settings: dict, about: dict | None = None, overwrite: bool = False
    ) -> StoreWriter:
        """Begin or continue the store in a folder that this process holds (`only_process`).

        settings: JSON values, everything that shapes the content; "dtype" and "target" (with its
        "fingerprint") among them. about: what people want to read beside it and nothing compares,
        "target" (its name) among it.

        Raises SpectrainError when the folder holds a store made with other settings, unless
        `overwrite`.
        """
        settings = json.loads(json.dumps(settings))  # as the manifest will give it back
        with disk_errors(path):
            _clear(path, settings, overwrite)
        writer = cls(path, settings, about or {})
        if not writer.complete:
            writer._write_manifest(complete=False, shards=[], counts={})
        return writer

    @classmethod
    def join(cls, path: Path) -> StoreWriter:
        """Help with the store that another process of this launch has begun."""
        manifest = read_manifest(path)
        assert manifest is not None, "joined after it was begun"
        return cls(path, manifest["settings"], manifest["about"])

    @classmethod
    @contextmanager
    def claim(
        cls,
        path: str | Path,
        settings: dict,
        about: dict | None = None,
        overwrite: bool = False,
    ) -> Iterator[StoreWriter]:
        """Hold a folder and begin or continue a store in it: `only_process` and `begin`."""
        with only_process(Path(path)):
            yield cls.begin(Path(path), settings, about, overwrite)

    def shard(self, number: int, key: str) -> dict | None:
        """The facts of a finished shard; None when it has to be captured (again): it is absent,
        damaged, or not made from the rows that `key` stands for."""
        facts_file, tensors_file = self._files(number)
        if not facts_file.is_file() or not tensors_file.is_file():
            return None
        known = self._known.get(facts_file.name)
        if known is not None and sha256_file(facts_file) != known:
            return None
        facts = read_json(facts_file)
        if facts["key"] != key or facts.get("own_sha256") != _own_hash(facts):
            return None
        return facts if sha256_file(tensors_file) == facts["sha256"] else None

    def write_shard(
        self,
        number: int,
        key: str,
        rows: list[tuple[Row, States | None]],
        dropped: dict[str, int] | None = None,
    ) -> dict:
        """Write a shard and return its facts. `rows` may be empty, when all were dropped; `dropped`
        counts those by reason; states are None in a store of tokens alone. Raises RunFailed on a
        full disk; nothing is left half written."""
        data = _serialise(lay_out(rows, self.dtype)) if rows else _serialise({})
        facts_file, tensors_file = self._files(number)
        facts = {
            "key": key,
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
            "dropped": dropped or {},
            "rows": [RowInfo.of(row, 0).as_facts() for row, _ in rows],
        }
        facts["own_sha256"] = _own_hash(facts)
        atomic_write(tensors_file, data)
        # Written last: a shard is finished when its facts exist and agree.
        write_json(facts_file, facts, compact=True)
        return facts

    def facts(self, number: int) -> dict:
        """The facts of a shard that is finished."""
        return read_json(self._files(number)[0])

    def finish(self, shards: int, counts: dict | None = None) -> dict:
        """Mark the store complete with its first `shards` shards; returns the manifest."""
        records = []
        for number in range(shards):
            facts_file, tensors_file = self._files(number)
            facts = self.facts(number)
            records.append(
                {
                    "file": tensors_file.name,
                    "sha256": facts["sha256"],
                    "bytes": facts["bytes"],
                    "facts": facts_file.name,
                    "facts_sha256": sha256_file(facts_file),
                    "rows": len(facts["rows"]),
                }
            )
        for stale in set(self.path.glob("shard-*")) - {
            f for n in range(shards) for f in self._files(n)
        }:
            stale.unlink()
        self._write_manifest(complete=True, shards=records, counts=counts or {})
        return read_manifest(self.path)

    def require_space(self, size: int) -> None:
        """Raise RunFailed unless `size` bytes are free where the store lies."""
        require_free(self.path, size)

    def _write_manifest(self, *, complete: bool, shards: list[dict], counts: dict) -> None:
        manifest = {
            "format": FORMAT,
            "complete": complete,
            "fingerprint": self.fingerprint,
            "about": self.about,
            "settings": self.settings,
            "counts": counts,
            "shards": shards,
        }
        write_json(self.path / MANIFEST, manifest)

    def _files(self, number: int) -> tuple[Path, Path]:
        stem = self.path / shard_name(number)
        return stem.with_suffix(".json"), stem.with_suffix(".safetensors")


def _own_hash(facts: dict) -> str:
    """Of all facts but itself: before a store is finished no manifest tells if they are whole."""
    others = {name: value for name, value in facts.items() if name != "own_sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _serialise(tensors: dict[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})


@contextmanager
def only_process(path: Path) -> Iterator[None]:
    """Make the folder and hold it; the kernel lets go of it even when the process is killed.

    Raises SpectrainError when another process prepares it, or when it holds something else than a
    store, which stays untouched. A folder that was made for nothing is removed.
    """
    made = not path.exists()
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        _require_store(path)
        with open(path / LOCK, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SpectrainError(
                    "another process is preparing this store",
                    where=str(path),
                    fix="wait for it or choose another --store",
                ) from None
            _require_store(path)  # again: until now another process may have written here
            _sweep(path)
            try:
                yield
            except BaseException:
                if made and [found.name for found in path.iterdir()] == [LOCK]:
                    shutil.rmtree(path)
                raise


def _require_store(path: Path) -> None:
    """Refuse a folder that holds anything but a store or what a killed run left of one."""
    own = (path / LOCK, path / SPOOL, *_leftovers(path))
    if set(path.iterdir()) - set(own) and not (path / MANIFEST).is_file():
        raise SpectrainError(
            "the folder is not empty and holds no feature store",
            where=str(path),
            fix="choose an empty or new folder for --store",
        )


def _leftovers(path: Path) -> list[Path]:
    """Files that were being written (`core.files.atomic_write`)."""
    return [found for folder in (path, path / REPLIES) for found in folder.glob(".*.tmp")]


def _sweep(path: Path) -> None:
    """Remove what a killed run left."""
    for found in [*_leftovers(path), path / SPOOL]:
        if found.is_dir():
            shutil.rmtree(found)
        else:
            found.unlink(missing_ok=True)


def _clear(path: Path, settings: dict, overwrite: bool) -> None:
    """Refuse a store of other settings, or make room for a new one."""
    if overwrite:
        # Replies stay: they are keyed by what shaped them, and cost most to make.
        # The manifest goes last: without it a half cleared folder would not be known as a store.
        for found in [*path.glob("shard-*"), path / MANIFEST]:
            found.unlink(missing_ok=True)
    elif (manifest := read_manifest(path)) is not None:
        _require_same(manifest["settings"], settings, path)


def _require_same(old: dict, new: dict, path: Path) -> None:
    before, now = _flat(old), _flat(new)
    order = {key: place - len(TOLD_FIRST) for place, key in enumerate(TOLD_FIRST)} | {TOLD_LAST: 1}
    for key in sorted(set(before) | set(now), key=lambda key: (order.get(key, 0), key)):
        if before.get(key) != now.get(key):
            raise SpectrainError(
                f"the store was prepared with {key} = {before.get(key)!r}, "
                f"now it is {now.get(key)!r}",
                where=str(path),
                fix="choose another --store, or --overwrite it",
            )


def _flat(settings: dict, prefix: str = "") -> dict:
    """{"a": {"b": 1}} → {"a.b": 1}"""
    result = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result

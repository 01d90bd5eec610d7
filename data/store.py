"""The feature store, read side: a folder with a manifest, shards, and a checksum for every file.

    manifest.json              settings, their fingerprint, counts, shards with checksums
    shard-00000.safetensors    tensors, see data/shard.py
    shard-00000.json           facts: one record per row, and the checksum of the tensors
    replies/                   answers of the target, kept so that a rerun need not ask again

A store is complete or it is refused. Shards are mapped, not read: only the rows asked for are
touched (and each shard once in full, when its checksum is verified before its first use).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spectrain.core.batch import Batch, predicting
from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json, sha256_file
from spectrain.data.shard import DTYPES, RowInfo

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "heldout")
REBUILD = "prepare it again with --overwrite"
MEND = "run the same `spectrain prepare` again, it makes the damaged part anew"


def shard_name(number: int) -> str:
    """Stem of the files of a shard."""
    return f"shard-{number:05d}"


def fingerprint_of(settings: dict) -> str:
    """16 hex digits that change with any setting that shaped the store."""
    canonical = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


class FeatureStore:
    """A complete store. `manifest` is its dict; `path` its folder."""

    def __init__(self, path: Path, manifest: dict, facts: list[list[dict]]) -> None:
        self.path, self.manifest = path, manifest
        self._rows: list[RowInfo] = []
        self._first: list[int] = []  # index of the first row of each shard
        for shard in facts:
            self._first.append(len(self._rows))
            for record in shard:
                self._rows.append(RowInfo(**record, index=len(self._rows)))
        self._mapped: dict[int, dict[str, Tensor]] = {}

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> FeatureStore:
        """Open a store; `verify` checks every shard now and not at its first use.

        Raises SpectrainError when it is absent, incomplete, of another format, or damaged.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if manifest is None:
            raise SpectrainError(
                "no feature store here", where=str(path), fix="run `spectrain prepare` first"
            )
        if not manifest["complete"]:
            raise SpectrainError(
                "the store is incomplete: its preparation was interrupted",
                where=str(path),
                fix="run the same `spectrain prepare` again, it goes on where it was",
            )
        facts = [_read_facts(path, shard) for shard in manifest["shards"]]
        store = cls(path, manifest, facts)
        if verify:
            for number in range(len(manifest["shards"])):
                store._shard(number)
        return store

    def rows(self, split: str) -> list[RowInfo]:
        """The rows of "train" or "heldout", in the order of their content hash."""
        assert split in SPLITS, split
        return [row for row in self._rows if row.split == split]

    def require_target(self, fingerprint: str) -> None:
        """Refuse features that another target made."""
        made_by = self.manifest["settings"]["target"]["fingerprint"]
        if made_by != fingerprint:
            name = self.manifest["about"].get("target", "another target")
            raise SpectrainError(
                f"the store holds features of {name} ({made_by}), not of this target "
                f"({fingerprint})",
                where=str(self.path),
                fix="give the target it was prepared with, or prepare another --store",
            )

    @property
    def last_everywhere(self) -> bool:
        """Whether the last state is kept at every position, not before reply tokens alone."""
        return self.manifest["settings"].get("last_states") == "everywhere"

    def require_features(self, aux_layers: tuple[int, ...], last_everywhere: bool) -> None:
        """Raise SpectrainError unless the store holds what a head reads: the outputs of these
        layers (none: always), and the last state at every position if asked for."""
        held = list(self.manifest["settings"].get("aux_layers") or ())
        if aux_layers and list(aux_layers) != held:
            raise SpectrainError(
                f"the store holds outputs of layers {held}, the head reads {list(aux_layers)}",
                where=str(self.path),
                fix="prepare a store with the head's layers, or choose the head's to match",
            )
        if last_everywhere and not self.last_everywhere:
            raise SpectrainError(
                "the store holds the last state before reply tokens only, the head reads it "
                "at every position",
                where=str(self.path),
                fix="prepare a store with --set last_states=everywhere",
            )

    def batch(self, rows: list[RowInfo], with_aux: bool = True) -> Batch:
        """Rows padded on the right to the longest, see `packed`."""
        return self.packed([[row] for row in rows], with_aux)

    def packed(self, bins: list[list[RowInfo]], with_aux: bool = True) -> Batch:
        """One row for each bin: its conversations one behind the other, padded on the right to the
        longest row; features in the store's dtype. Without `with_aux` the auxiliary states, most of
        the bytes, are not touched."""
        assert bins, "a batch needs rows"
        size, longest = len(bins), max(sum(row.length for row in rows) for rows in bins)
        tokens = torch.zeros(size, longest, dtype=torch.int64)
        reply = torch.zeros_like(tokens)
        argmax = torch.full_like(tokens, -1)
        starts = torch.arange(longest).repeat(size, 1)
        aux: Tensor | None = None
        last: Tensor | None = None
        for place, begin, row in _laid_out(bins):
            shard, start, stop, first, end = self._locate(row)
            own = slice(begin, begin + stop - start)
            said = shard["reply"][start:stop].long()
            where = begin + predicting(said).nonzero().squeeze(1)
            if begin:  # nobody predicts the first token of a document
                said[0] = 0
            tokens[place, own] = shard["tokens"][start:stop].long()
            reply[place, own] = torch.where(said > 0, said + reply[place].max(), 0)
            argmax[place, where] = shard["argmax"][first:end].long()
            starts[place, own] = begin
            everywhere = self.last_everywhere
            kept = shard["last"][start:stop] if everywhere else shard["last"][first:end]
            if last is None:
                last = kept.new_zeros(size, longest, kept.shape[-1])
            last[place, own if everywhere else where] = kept
            if with_aux and "aux" in shard:
                if aux is None:
                    aux = shard["aux"].new_zeros(size, longest, shard["aux"].shape[-1])
                aux[place, own] = shard["aux"][start:stop]
        several = any(len(rows) > 1 for rows in bins)
        return Batch(tokens, reply, aux, last, argmax, starts=starts if several else None)

    def text(self, row: RowInfo) -> tuple[Tensor, Tensor]:
        """The tokens of a row and the numbers of its replies, both int64 [T]."""
        shard, start, stop, _, _ = self._locate(row)
        return shard["tokens"][start:stop].long(), shard["reply"][start:stop].long()

    def prompt(self, row: RowInfo) -> Tensor:
        """The tokens of a row before its first reply: int64 [n]."""
        tokens, reply = self.text(row)
        return tokens[: int((reply > 0).int().argmax())]

    def bytes_per_token(self, aux_layers: tuple[int, ...], last_everywhere: bool) -> float:
        """Bytes of features per token of the store that a head with these needs reads: auxiliary
        states of every token, the last state of every one or of those before reply tokens."""
        counts = self.manifest["counts"]
        tokens, supervised = (sum(counts[key].values()) for key in ("tokens", "supervised_tokens"))
        state = self.hidden_size * DTYPES[self.manifest["settings"]["dtype"]].itemsize
        kept = 1.0 if last_everywhere else supervised / tokens
        return state * (len(aux_layers) + kept)

    @property
    def hidden_size(self) -> int:
        """H of the target, as stored."""
        return self._shard(0)["last"].shape[-1]

    def teacher(self, row: RowInfo) -> tuple[Tensor, Tensor, Tensor]:
        """(argmax int64 [p], its log-probability float32 [p], log-normaliser float32 [p]) of the
        predicting positions of a row, in order of position."""
        shard, _, _, first, end = self._locate(row)
        part = slice(first, end)
        return shard["argmax"][part].long(), shard["logprob"][part], shard["lognorm"][part]

    def token_counts(self, split: str, vocab_size: int) -> Tensor:
        """How often each token was produced in a reply of the split: int64 [vocab_size]."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for row in self.rows(split):
            shard, start, stop, _, _ = self._locate(row)
            supervised = shard["tokens"][start:stop][shard["reply"][start:stop] > 0]
            counts += torch.bincount(supervised.long(), minlength=vocab_size)
        return counts

    def _locate(self, row: RowInfo) -> tuple[dict[str, Tensor], int, int, int, int]:
        """The shard of a row, its range of tokens and its range of predicting positions."""
        number = bisect_right(self._first, row.index) - 1
        shard = self._shard(number)
        place = row.index - self._first[number]
        start, stop = shard["offsets"][place : place + 2].tolist()
        first, end = shard["predicting"][place : place + 2].tolist()
        return shard, start, stop, first, end

    def _shard(self, number: int) -> dict[str, Tensor]:
        """The mapped tensors of a shard, verified when it is used for the first time."""
        if number not in self._mapped:
            record = self.manifest["shards"][number]
            file = self.path / record["file"]
            _require_intact(file, record["sha256"], record["bytes"])
            try:
                with safe_open(file, framework="pt") as opened:
                    self._mapped[number] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise SpectrainError(
                    f"cannot be read ({error})", where=str(file), fix=MEND
                ) from error
        return self._mapped[number]


def _laid_out(bins: list[list[RowInfo]]) -> Iterator[tuple[int, int, RowInfo]]:
    """(row of the batch, place where the conversation begins in it, conversation)"""
    for place, rows in enumerate(bins):
        begin = 0
        for row in rows:
            yield place, begin, row
            begin += row.length


def read_manifest(path: Path) -> dict | None:
    """The manifest of a folder, None where there is none; SpectrainError when it cannot be used."""
    file = path / MANIFEST
    if not file.is_file():
        return None
    manifest = read_json(file)
    if not isinstance(manifest, dict) or not {"format", "complete", "settings"} <= set(manifest):
        raise SpectrainError("not the manifest of a feature store", where=str(file), fix=REBUILD)
    if manifest["format"] != FORMAT:
        raise SpectrainError(
            f"store format {manifest['format']}, this version reads format {FORMAT}",
            where=str(file),
            fix=REBUILD,
        )
    return manifest


def _read_facts(path: Path, shard: dict) -> list[dict]:
    file = path / shard["facts"]
    _require_intact(file, shard["facts_sha256"], None)
    return read_json(file)["rows"]


def _require_intact(file: Path, sha256: str, size: int | None) -> None:
    if not file.is_file():
        raise SpectrainError("missing from the store", where=str(file), fix=MEND)
    if size is not None and file.stat().st_size != size:
        raise SpectrainError(
            f"truncated: {file.stat().st_size} bytes of {size}", where=str(file), fix=MEND
        )
    if sha256_file(file) != sha256:
        raise SpectrainError(
            "damaged: its checksum is not the one in the manifest", where=str(file), fix=MEND
        )

"""The feature store, read side.

A store is complete or it is refused (data/manifest.py: its files). Shards are mapped, not read:
only the rows asked for are touched (and each shard once in full, when its checksum is verified
before its first use).
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from spectrain.core.batch import Batch, predicting
from spectrain.core.errors import SpectrainError
from spectrain.data.int8 import WIDE, from_int8
from spectrain.data.manifest import read_facts, read_manifest, read_tensors
from spectrain.data.shard import DTYPES, RowInfo, state_bytes

SPLITS = ("train", "heldout")
SHARED = ("split", "domain", "finish")


class FeatureStore:
    """A complete store. `manifest` is its dict; `path` its folder."""

    def __init__(self, path: Path, manifest: dict, facts: Iterable[list[dict]]) -> None:
        self.path, self.manifest = path, manifest
        self._rows: list[RowInfo] = []
        self._first: list[int] = []  # index of the first row of each shard
        for shard in facts:
            self._first.append(len(self._rows))
            for record in shard:
                self._rows.append(_row(record, len(self._rows)))
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
        facts = (read_facts(path, shard) for shard in manifest["shards"])
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

    @property
    def features(self) -> bool:
        """Whether batches have features and the target's choices, not tokens and replies alone."""
        return self.manifest["settings"].get("features", "stored") == "stored"

    @property
    def rounded(self) -> bool:
        """Whether what is stored differs from what the target said: kept in a smaller type."""
        settings = self.manifest["settings"]
        said = settings["target"].get("dtype", "").removeprefix("torch.")
        return self.features and settings["dtype"] not in ("float32", said)

    def require_features(self, aux_layers: tuple[int, ...], last_everywhere: bool) -> None:
        """Raise SpectrainError unless the store holds what a head reads: the outputs of these
        layers (none: always), and the last state at every position if asked for."""
        if not self.features:
            raise SpectrainError(
                "the store holds tokens alone, no features of the target",
                where=str(self.path),
                fix="have them computed in training (online=true, the default here), or prepare "
                "another --store with --set features=stored",
            )
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
        longest row; features in the store's dtype, those of an int8 store in bfloat16. Without
        `with_aux` the auxiliary states, most of the bytes, are not touched. A store without
        features gives tokens and replies."""
        return self._packed(bins, with_aux, self.features)

    def _packed(self, bins: list[list[RowInfo]], with_aux: bool, with_features: bool) -> Batch:
        assert bins, "a batch needs rows"
        size, longest = len(bins), max(sum(row.length for row in rows) for rows in bins)
        several = any(len(rows) > 1 for rows in bins)
        tokens = torch.zeros(size, longest, dtype=torch.int64)
        reply = torch.zeros_like(tokens)
        argmax = torch.full_like(tokens, -1)
        starts = torch.arange(longest).repeat(size, 1) if several else None
        names = ("aux", "last") if with_aux else ("last",)
        found: dict[str, Tensor] = {}
        for place, begin, row in _laid_out(bins):
            shard, start, stop, first, end = self._locate(row)
            own = slice(begin, begin + stop - start)
            tokens[place, own] = shard["tokens"][start:stop]
            said = reply[place, own].copy_(shard["reply"][start:stop])
            where = predicting(said).nonzero().squeeze(1).add_(begin)
            if begin:
                said[0] = 0  # nobody predicts the first token of a document
                said.add_(reply[place, :begin].max() * (said > 0))
            if starts is not None:
                starts[place, own] = begin
            if not with_features:
                continue
            argmax[place].index_copy_(0, where, shard["argmax"][first:end].long())
            for name in names:
                if (kept := shard.get(name)) is None:
                    continue
                if name not in found:
                    dtype = WIDE if kept.dtype == torch.int8 else kept.dtype
                    found[name] = kept.new_zeros(size, longest, kept.shape[1], dtype=dtype)
                parts = [(own, slice(start, stop))]
                if name == "last" and not self.last_everywhere:
                    parts = _stretches(where, first)
                for to, source in parts:
                    _read(shard, name, source, found[name][place, to])
        return Batch(tokens, reply, found.get("aux"), found.get("last"), argmax, starts=starts)

    def prompt(self, row: RowInfo) -> Tensor:
        """The tokens of a row before its first reply: int64 [n]."""
        shard, start, stop, _, _ = self._locate(row)
        first = int((shard["reply"][start:stop] > 0).int().argmax())
        return shard["tokens"][start : start + first].long()

    def bytes_per_token(self, aux_layers: tuple[int, ...], last_everywhere: bool) -> float:
        """Bytes of features per token of the store that a head with these needs reads: auxiliary
        states of every token, the last state of every one or of those before reply tokens."""
        if not self.features:
            return 0.0
        counts = self.manifest["counts"]
        tokens, supervised = (sum(counts[key].values()) for key in ("tokens", "supervised_tokens"))
        state = state_bytes(self.hidden_size, DTYPES[self.manifest["settings"]["dtype"]])
        kept = 1.0 if last_everywhere else supervised / tokens
        return state * (len(aux_layers) + kept)

    @property
    def hidden_size(self) -> int:
        """H of the target, as stored."""
        self.require_features((), False)
        return self._shard(0)["last"].shape[-1]

    def teacher(self, row: RowInfo) -> tuple[Tensor, Tensor, Tensor]:
        """(argmax int64 [p], its log-probability float32 [p], log-normaliser float32 [p]) of the
        predicting positions of a row, in order of position."""
        self.require_features((), False)
        shard, _, _, first, end = self._locate(row)
        part = slice(first, end)
        return shard["argmax"][part].long(), shard["logprob"][part], shard["lognorm"][part]

    def teacher_top(self, row: RowInfo) -> tuple[Tensor, Tensor]:
        """(ids int64 [p, k], their log-probabilities float32 [p, k]) of the target's likeliest next
        tokens at the predicting positions of a row, likeliest first."""
        shard, _, _, first, end = self._locate(row)
        if "top_ids" not in shard:
            raise SpectrainError(
                "the store holds no log-probabilities but the largest",
                where=str(self.path),
                fix="prepare a store with --set teacher_top=8",
            )
        return shard["top_ids"][first:end].long(), shard["top_logprob"][first:end].float()

    def token_counts(self, split: str, vocab_size: int) -> Tensor:
        """How often each token was produced in a reply of the split: int64 [vocab_size]."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for row in self.rows(split):
            counts += torch.bincount(self.reply_tokens(row), minlength=vocab_size)
        return counts

    def argmax_counts(self, split: str, vocab_size: int) -> Tensor:
        """How often each token is the target's own choice where a reply is predicted, likewise."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for row in self.rows(split):
            counts += torch.bincount(self.teacher(row)[0], minlength=vocab_size)
        return counts

    def reply_tokens(self, row: RowInfo) -> Tensor:
        """The tokens of a row that lie in a reply: int64 [n]."""
        shard, start, stop, _, _ = self._locate(row)
        return shard["tokens"][start:stop][shard["reply"][start:stop] > 0].long()

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
            self._mapped[number] = read_tensors(self.path, self.manifest["shards"][number])
        return self._mapped[number]


def _row(record: dict, index: int) -> RowInfo:
    """A record of the facts; words that many rows share are kept once."""
    shared = {key: sys.intern(word) for key in SHARED if (word := record[key]) is not None}
    return RowInfo(**record | shared, index=index)


def _laid_out(bins: list[list[RowInfo]]) -> Iterator[tuple[int, int, RowInfo]]:
    """(row of the batch, place where the conversation begins in it, conversation)"""
    for place, rows in enumerate(bins):
        begin = 0
        for row in rows:
            yield place, begin, row
            begin += row.length


def _stretches(places: Tensor, first: int) -> Iterator[tuple[slice, slice]]:
    """Ascending places [p], whose features lie from `first` on in their shard, cut into stretches
    without a gap: (places, where their features lie)."""
    cuts = (places.diff() > 1).nonzero().squeeze(1).add_(1).tolist()
    for begin, end in pairwise([0, *cuts, len(places)] if len(places) else []):
        to = int(places[begin])
        yield slice(to, to + end - begin), slice(first + begin, first + end)


def _read(shard: dict[str, Tensor], name: str, source: slice, out: Tensor) -> None:
    """The features `name` [n, W] of a shard, as numbers, into `out`."""
    if f"{name}_scale" in shard:
        from_int8(shard[name][source], shard[f"{name}_scale"][source], out)
    else:
        out.copy_(shard[name][source])

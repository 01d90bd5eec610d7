"""What must hold of the rows of a store as a whole; a few bytes are remembered of each.

A row's prompt is what comes before its last reply: what decides the split of its conversation.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from spectrain.data.verify import Shard

BY_SPLIT = ("rows", "tokens", "supervised_tokens")


@dataclass
class Across:
    """Gathers the shards in their order, each once `facts`, `shapes` and `offsets` hold of it.

    counts: what the rows add up to, under the manifest's names
    prompts, conversations: hashes, of rows whose prompt can be told; heldout, later: of the same
    rows, whether they are held out, and whether they are a later one of their conversation
    """

    counts: Counter = field(default_factory=Counter)
    base: str = ""  # the last conversation
    seen: set = field(default_factory=set)  # (id, temperature) of its rows
    disorder: str | None = None
    prompts: array = field(default_factory=lambda: array("Q"))
    conversations: array = field(default_factory=lambda: array("Q"))
    heldout: array = field(default_factory=lambda: array("B"))
    later: array = field(default_factory=lambda: array("B"))

    def add(self, shard: Shard) -> None:
        bounds = shard["offsets"].tolist()
        for place, record in enumerate(shard.facts):
            self._count(record)
            self._order(record)
            row = slice(bounds[place], bounds[place + 1])
            self._prompt(record, shard["tokens"][row], shard["reply"][row])

    def _count(self, record: dict) -> None:
        split = record["split"]
        self.counts[f"rows.{split}"] += 1
        self.counts[f"tokens.{split}"] += record["length"]
        self.counts[f"supervised_tokens.{split}"] += record["supervised"]
        self.counts["truncated"] += record["truncated"]
        self.counts["length_stopped"] += record["finish"] == "length"
        self.counts["loops"] += record.get("loops", False)

    def _order(self, record: dict) -> None:
        base = record["id"].partition("-")[0]
        if base != self.base:
            if base < self.base:
                self.disorder = self.disorder or f"row {record['id']} comes after {self.base}"
            self.base, self.seen = base, set()
        key = (record["id"], record["temperature"])
        if key in self.seen:
            self.disorder = self.disorder or f"row {key[0]} is there twice (temperature {key[1]})"
        self.seen.add(key)

    def _prompt(self, record: dict, tokens: Tensor, reply: Tensor) -> None:
        said = reply.numpy()
        before = int((said == said.max()).argmax())
        if before < 2:
            return  # a text, all of it supervised: there is no prompt
        base, _, number = record["id"].partition("-")
        self.prompts.append(_hash(tokens[:before].numpy().tobytes()))
        self.conversations.append(_hash(base.encode()))
        self.heldout.append(record["split"] == "heldout")
        self.later.append(bool(number))

    def wrong_counts(self, counts: dict) -> str | None:
        """The manifest's counts are those of the rows."""
        told = _flat(counts)
        by_split = {name for name in told if name.partition(".")[0] in BY_SPLIT}
        for name in sorted(by_split | set(self.counts)):
            said, found = told.get(name, 0), self.counts[name]
            if said != found:
                return f"{name}: the manifest says {said:,}, the rows say {found:,}"
        return None

    def wrong_order(self) -> str | None:
        """Rows are in the order of their conversations' hashes, an id once at a temperature."""
        return self.disorder

    def shared_prompts(self) -> str | None:
        """No prompt is in both splits. Conversations of several rows are left out: their earlier
        rows begin as those of other conversations do, in either split."""
        prompts, of = np.array(self.prompts), np.array(self.conversations)
        heldout, later = np.array(self.heldout, bool), np.array(self.later, bool)
        single = ~np.isin(of, of[later])
        train = prompts[single & ~heldout]
        both = np.intersect1d(train, prompts[single & heldout])
        return f"{len(both):,} prompts are in train and in heldout" if len(both) else None

    @property
    def told(self) -> int:
        """Rows whose prompt can be told."""
        return len(self.prompts)


def _flat(counts: dict) -> dict[str, int]:
    flat = {}
    for name, value in counts.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": number for key, number in value.items()}
        else:
            flat[name] = value
    return flat


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")

"""One shard of a feature store: rows laid end to end in one safetensors file, facts beside it.

R rows, N tokens and P predicting positions of all rows together, A aux width, H hidden size.

=========== ============== ================================================================
A store of tokens alone has the first three and `predicting`: the target is asked for the rest when
a batch is made (data/online.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from spectrain.core.batch import predicting
from spectrain.data.int8 import WIDE, group_of, to_int8

FEATURES = ("aux", "last")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}


@dataclass(frozen=True)
class Row:
    """A tokenised conversation.

    tokens int32 [T], reply int16 [T] as in the table above; id: content hash; temperature: what the
    reply was sampled at (None: not known); finish: "stop", "length" or None; truncated: cut at the
    maximum length.
    """

    id: str
    split: str
    tokens: Tensor
    reply: Tensor
    domain: str | None = None
    temperature: float | None = None
    finish: str | None = None
    truncated: bool = False

    @property
    def supervised(self) -> int:
        """Tokens inside a reply."""
        return int((self.reply > 0).sum())


@dataclass(frozen=True, slots=True)  # there may be millions
class RowInfo:
    """What the store knows about a row without touching its tensors; lengths in tokens."""

    id: str
    split: str
    domain: str | None
    temperature: float | None
    finish: str | None
    truncated: bool
    length: int
    supervised: int
    index: int

    @classmethod
    def of(cls, row: Row, index: int) -> RowInfo:
        return cls(
            id=row.id,
            split=row.split,
            domain=row.domain,
            temperature=row.temperature,
            finish=row.finish,
            truncated=row.truncated,
            length=len(row.tokens),
            supervised=row.supervised,
            index=index,
        )

    def as_facts(self) -> dict:
        """For the facts file of a shard; the index is given by the order of the shards."""
        facts = asdict(self)
        del facts["index"]
        return facts


@dataclass(frozen=True)
class States:
    """What the target says about one row: aux [T, A] or None; last [p, H] on predicting rows, or
    [T, H] everywhere; on predicting rows argmax int32 [p], logprob float32 [p], lognorm float32
    [p], top_ids int32 and top_logprob float16 [p, k] or None."""

    aux: Tensor | None
    last: Tensor
    argmax: Tensor
    logprob: Tensor
    lognorm: Tensor
    top_ids: Tensor | None = None
    top_logprob: Tensor | None = None


def lay_out(rows: list[tuple[Row, States | None]], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a shard, in the order of `rows` (one or more); features in `dtype`, or none
    where there are no states."""
    if rows[0][1] is None:
        return _laid_out_rows([row for row, _ in rows])
    for row, states in rows:
        expected = int(predicting(row.reply).sum())
        assert len(states.argmax) == expected, "one choice per predicting row"
        assert len(states.last) in (expected, len(row.tokens)), "one state per row that is kept"
        assert states.aux is None or len(states.aux) == len(row.tokens), "one aux state per token"
    tensors = _laid_out_rows([row for row, _ in rows]) | {
        "argmax": torch.cat([states.argmax for _, states in rows]).to(torch.int32),
        "logprob": torch.cat([states.logprob for _, states in rows]).float(),
        "lognorm": torch.cat([states.lognorm for _, states in rows]).float(),
    }
    group = group_of(rows[0][1].last.shape[-1])
    for name in ("last", "aux", "top_ids", "top_logprob"):
        parts = [getattr(states, name) for _, states in rows]
        if parts[0] is None:
            continue
        tensors[name] = torch.cat(parts)
        if name in FEATURES and dtype == torch.int8:
            tensors[name], tensors[f"{name}_scale"] = to_int8(tensors[name], group)
        elif name in FEATURES:
            tensors[name] = tensors[name].to(dtype)
    return tensors


def state_bytes(hidden: int, dtype: torch.dtype) -> int:
    """Bytes of one state of `hidden` numbers as it is stored."""
    scales = hidden // group_of(hidden) * WIDE.itemsize if dtype == torch.int8 else 0
    return hidden * dtype.itemsize + scales


def bytes_needed(
    rows: list[Row],
    hidden: int,
    aux_width: int,
    dtype: torch.dtype,
    last_everywhere: bool = False,
    top_k: int = 0,
) -> int:
    """Bytes on disk that these rows will take, headers and facts estimated generously."""
    tokens = sum(len(row.tokens) for row in rows)
    supervised = sum(row.supervised for row in rows)
    state, layers = state_bytes(hidden, dtype), aux_width // max(hidden, 1)
    return (
        tokens * (layers * state + 4 + 2)
        + (tokens if last_everywhere else supervised) * state
        + supervised * (12 + 6 * top_k)
        + len(rows) * 300
        + 4096
    )


def plan_shards(rows: list[Row], tokens: int) -> list[list[Row]]:
    """Cut `rows`, in their order, into shards of at most `tokens` tokens each (or one row)."""
    shards: list[list[Row]] = []
    filled = 0
    for row in rows:
        if not shards or filled + len(row.tokens) > tokens:
            shards.append([])
            filled = 0
        shards[-1].append(row)
        filled += len(row.tokens)
    return shards


def key_of(rows: list[Row]) -> str:
    """16 hex digits over all that is known of the rows before the target has read them."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(RowInfo.of(row, 0).as_facts()).encode())
        digest.update(row.tokens.numpy().tobytes() + row.reply.numpy().tobytes())
    return digest.hexdigest()[:16]


def _laid_out_rows(rows: list[Row]) -> dict[str, Tensor]:
    """What is known of rows before the target has read them."""
    return {
        "tokens": torch.cat([row.tokens for row in rows]).to(torch.int32),
        "reply": torch.cat([row.reply for row in rows]).to(torch.int16),
        "offsets": _offsets([len(row.tokens) for row in rows]),
        "predicting": _offsets([int(predicting(row.reply).sum()) for row in rows]),
    }


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)

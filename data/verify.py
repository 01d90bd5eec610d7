"""What must hold of a shard for it to be what `prepare` writes: one function for each invariant.

A check reads the tensors of one shard (data/shard.py: R rows, N tokens, P predicting positions) and
the facts beside them, and returns what is wrong, naming the first row it is wrong in, or None. All
work is done in parts, so that a check needs little memory beside the mapped shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields

import torch
from torch import Tensor

from spectrain.data.int8 import LARGEST, WIDE, group_of
from spectrain.data.shard import DTYPES, FEATURES, RowInfo

SPLITS = ("train", "heldout")
_PART = 1024  # rows of features looked at together
# Log-probabilities are differences of float32 logits, whose rounding may show as a little above 0.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Expected:
    """What the manifest says of every shard, and the target, where there is one.

    dtype: of the features; layers: how many are kept; everywhere: the last state at all positions;
    features: whether there are any; top: log-probabilities kept; vocabulary: V, hidden: H, or None
    """

    dtype: torch.dtype
    layers: int
    everywhere: bool
    features: bool = True
    top: int = 0
    vocabulary: int | None = None
    hidden: int | None = None

    @classmethod
    def of(
        cls, settings: dict, vocabulary: int | None = None, hidden: int | None = None
    ) -> Expected:
        return cls(
            dtype=DTYPES[settings["dtype"]],
            layers=len(settings.get("aux_layers") or ()),
            everywhere=settings.get("last_states") == "everywhere",
            features=settings.get("features", "stored") == "stored",
            top=settings.get("teacher_top", 0),
            vocabulary=vocabulary,
            hidden=hidden,
        )


@dataclass(frozen=True)
class Shard:
    """The tensors of a shard by name and a record for each of its rows."""

    tensors: dict[str, Tensor]
    facts: list[dict]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def row_of(self) -> Tensor:
        """The row that each token belongs to, [N]."""
        return torch.arange(len(self.facts)).repeat_interleave(self["offsets"].diff())

    def at(self, places: Tensor, what: str) -> str | None:
        """A complaint about tokens at `places` [n] of the shard, None where there are none."""
        if not len(places):
            return None
        place = int(places[0])
        row = int(torch.searchsorted(self["offsets"], place, right=True)) - 1
        return f"row {self.facts[row]['id']}, token {place - int(self['offsets'][row])}: {what}"

    def of_predicting(self, places: Tensor, what: str) -> str | None:
        """The same of predicting positions."""
        if not len(places):
            return None
        row = int(torch.searchsorted(self["predicting"], int(places[0]), right=True)) - 1
        return f"row {self.facts[row]['id']}: {what}"


def facts(shard: Shard, _: Expected) -> str | None:
    """Every row is described by the fields that it should have, with values that can be."""
    known = {field.name for field in fields(RowInfo)} - {"index"}
    needed = known & {field.name for field in fields(RowInfo) if field.default is MISSING}
    for place, record in enumerate(shard.facts):
        if not isinstance(record, dict) or not needed <= set(record) <= known:
            return f"record {place} has not the fields of a row"
        if record["split"] not in SPLITS:
            return f"row {record['id']}: its split is {record['split']!r}"
        if not 0 < record["supervised"] <= record["length"]:
            return f"row {record['id']}: {record['supervised']} of {record['length']} supervised"
    return None


def shapes(shard: Shard, expected: Expected) -> str | None:
    """The tensors are those of the table in data/shard.py, by name, type and shape."""
    have, wanted = shard.tensors, dict(_wanted(shard, expected))
    for name in sorted(set(have) ^ set(wanted)):
        return f"{name} is {'not expected' if name in have else 'missing'}"
    for name, (dtype, shape) in wanted.items():
        found = have[name]
        if found.dtype != dtype or found.shape != torch.Size(shape):
            return (
                f"{name} is {_word(found.dtype)} {list(found.shape)}, "
                f"expected {_word(dtype)} {list(shape)}"
            )
    return None


def _wanted(shard: Shard, expected: Expected) -> Iterator[tuple[str, tuple]]:
    rows, have = len(shard.facts), shard.tensors
    # What only the tensors themselves know, each told by one and asked of the others.
    tokens = have["tokens"].numel() if "tokens" in have else 0
    yield "tokens", (torch.int32, (tokens,))
    yield "reply", (torch.int16, (tokens,))
    yield "offsets", (torch.int64, (rows + 1,))
    yield "predicting", (torch.int64, (rows + 1,))
    if not expected.features:
        return
    count = have["argmax"].numel() if "argmax" in have else 0
    hidden = expected.hidden or (have["last"].shape[-1] if "last" in have else 0)
    yield "argmax", (torch.int32, (count,))
    yield "logprob", (torch.float32, (count,))
    yield "lognorm", (torch.float32, (count,))
    if expected.top:
        yield "top_ids", (torch.int32, (count, expected.top))
        yield "top_logprob", (torch.float16, (count, expected.top))
    sizes = {"last": (tokens if expected.everywhere else count, hidden)}
    if expected.layers:
        sizes["aux"] = (tokens, expected.layers * hidden)
    for name, (length, width) in sizes.items():
        yield name, (expected.dtype, (length, width))
        if expected.dtype == torch.int8:
            yield f"{name}_scale", (WIDE, (length, width // group_of(hidden)))


def offsets(shard: Shard, expected: Expected) -> str | None:
    """Rows follow each other without a gap, from the first token to the last."""
    ends = {"offsets": len(shard["tokens"])}
    if expected.features:
        ends["predicting"] = len(shard["argmax"])
    for name in ("offsets", "predicting"):
        values = shard[name]
        if values[0] != 0:
            return f"{name} begins with {int(values[0])}, not 0"
        for place in (values.diff() <= 0).nonzero().flatten().tolist():
            return f"row {shard.facts[place]['id']}: {name} does not rise"
        if name in ends and values[-1] != ends[name]:
            return f"{name} ends with {int(values[-1])} of {ends[name]}"
    return None


def lengths(shard: Shard, _: Expected) -> str | None:
    """Lengths and supervised tokens of the rows are those of the facts."""
    supervised = _sums(shard["reply"] > 0, shard["offsets"])
    found = {"length": shard["offsets"].diff().tolist(), "supervised": supervised.tolist()}
    for name, values in found.items():
        for record, value in zip(shard.facts, values, strict=True):
            if record[name] != value:
                return f"row {record['id']}: {name} is {value}, the facts say {record[name]}"
    return None


def replies(shard: Shard, _: Expected) -> str | None:
    """Replies are counted from 1 on in each row, each number is one stretch, the rest is 0."""
    said, begins = shard["reply"].long(), shard["offsets"][:-1]
    before = said.roll(1)
    before[begins] = 0
    opening = (said > 0) & (said != before)  # the first token of a reply
    number = opening.cumsum(0)
    earlier = torch.cat([number.new_zeros(1), number])[begins]  # replies of the rows before
    wrong = (said < 0) | (opening & (said != number - earlier[shard.row_of]))
    return shard.at(wrong.nonzero(), "its reply number does not rise by one")


def predicted(shard: Shard, _: Expected) -> str | None:
    """Each row has a state for every position whose next token lies in a reply."""
    follows = (shard["reply"] > 0).roll(-1)
    follows[shard["offsets"][1:] - 1] = False  # the last token of a row predicts nothing of it
    for record, wanted, found in zip(
        shard.facts,
        _sums(follows, shard["offsets"]).tolist(),
        shard["predicting"].diff().tolist(),
        strict=True,
    ):
        if wanted != found:
            return f"row {record['id']}: {found} predicting positions, its replies have {wanted}"
    return None


def tokens(shard: Shard, expected: Expected) -> str | None:
    """Tokens are in the vocabulary."""
    return shard.at(_outside(shard["tokens"], expected).nonzero(), "it is not in the vocabulary")


def teacher(shard: Shard, expected: Expected) -> str | None:
    """The target's choice is in the vocabulary; its log-probability is at most 0 and that of a
    likeliest token; the normaliser is finite."""
    outside = _outside(shard["argmax"], expected).nonzero()
    lowest = -math.inf if expected.vocabulary is None else -math.log(expected.vocabulary)
    logprob = shard["logprob"]
    wrong = ~((logprob <= _ROUNDING) & (logprob >= lowest - _ROUNDING))
    return (
        shard.of_predicting(outside, "the target's choice is not in the vocabulary")
        or shard.of_predicting(wrong.nonzero(), "no log-probability of a target's choice")
        or shard.of_predicting((~shard["lognorm"].isfinite()).nonzero(), "a normaliser not finite")
    )


def likeliest(shard: Shard, expected: Expected) -> str | None:
    """Further log-probabilities fall, begin with that of the choice and add up to 1 at most; their
    tokens are different ones of the vocabulary."""
    ids, values = shard["top_ids"], shard["top_logprob"].float()
    outside = _outside(ids, expected).any(1) | (ids.sort(1).values.diff(dim=1) == 0).any(1)
    rising = (values.diff(dim=1) > 0).any(1) | ~(values.exp().sum(1) <= 1 + 2e-3)
    gap = (values[:, 0] - shard["logprob"]).abs()
    first = ~(gap <= 2**-10 * shard["logprob"].abs() + 1e-6)
    return (
        shard.of_predicting(outside.nonzero(), "likeliest tokens that cannot be")
        or shard.of_predicting(rising.nonzero(), "log-probabilities that do not fall")
        or shard.of_predicting(first.nonzero(), "the first log-probability is not the choice's")
    )


def features(shard: Shard, expected: Expected) -> str | None:
    """Features are finite; scales of int8 are above 0."""
    names = [name for name in FEATURES if name in shard.tensors]
    for name in names + [f"{name}_scale" for name in names if expected.dtype == torch.int8]:
        whole, start = shard[name], 0
        for part in whole.split(_PART):
            if part.dtype == torch.int8:
                wrong, what = (part < -LARGEST).any(1), "beyond −127"
            elif name.endswith("_scale"):
                wrong, what = ~((part > 0) & part.isfinite()).all(1), "not above 0, or not finite"
            else:
                wrong, what = ~part.isfinite().all(1), "not finite"
            place = start + wrong.nonzero()[:1]
            everywhere = len(whole) == len(shard["tokens"])
            told = shard.at if everywhere else shard.of_predicting
            if complaint := told(place, f"{name} is {what}"):
                return complaint
            start += len(part)
    return None


# In this order, for later ones rely on earlier ones: the first that fails is told.
CHECKS: dict[str, Callable[[Shard, Expected], str | None]] = {
    "facts": facts,
    "shapes": shapes,
    "offsets": offsets,
    "lengths": lengths,
    "replies": replies,
    "predicting": predicted,
    "tokens": tokens,
    "teacher": teacher,
    "likeliest": likeliest,
    "features": features,
}
GROUND = ("facts", "shapes", "offsets")  # nothing can be looked at where these do not hold
OF_FEATURES = ("teacher", "likeliest", "features")


def check_shard(shard: Shard, expected: Expected) -> Iterator[tuple[str, str | None]]:
    """(check, what is wrong or None), up to a failed one that the rest stands on."""
    for name, check in CHECKS.items():
        if (name in OF_FEATURES and not expected.features) or (
            name == "likeliest" and not expected.top
        ):
            continue
        wrong = check(shard, expected)
        yield name, wrong
        if wrong and name in GROUND:
            return


def _outside(ids: Tensor, expected: Expected) -> Tensor:
    wrong = ids < 0
    return wrong if expected.vocabulary is None else wrong | (ids >= expected.vocabulary)


def _sums(marked: Tensor, bounds: Tensor) -> Tensor:
    """How many of `marked` [N] lie in each row, [R]."""
    total = torch.cat([bounds.new_zeros(1), marked.long().cumsum(0)])
    return total[bounds].diff()


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Every invariant of a shard: planted faults, one tensor at a time, are found by the check that is
named after them; a sound shard passes all checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_rows import random_row

from spectrain.core.batch import predicting
from spectrain.data.shard import DTYPES, Row, RowInfo, States, lay_out
from spectrain.data.verify import CHECKS, Expected, Shard, check_shard
from spectrain.data.verify_rows import Across

VOCABULARY = 50


def make_row(seed: int, reply: list[int]) -> tuple[Row, States]:
    """A row with these reply numbers, with further log-probabilities."""
    row, _ = random_row(seed, len(reply))
    row = replace(row, reply=torch.tensor(reply, dtype=torch.int16), temperature=0.0)
    count = int(predicting(row.reply).sum())
    random = torch.Generator().manual_seed(seed)
    logprob = torch.randn(count, VOCABULARY, generator=random).log_softmax(-1)
    values, ids = logprob.topk(3)
    states = States(
        aux=torch.randn(len(reply), 12, generator=random),
        last=torch.randn(count, 4, generator=random),
        argmax=ids[:, 0].int(),
        logprob=values[:, 0],
        lognorm=torch.randn(count, generator=random),
        top_ids=ids.int(),
        top_logprob=values.half(),
    )
    return row, states


ROWS = [
    make_row(1, [0, 0, 0, 1, 1, 1]),
    make_row(2, [0, 1, 1, 0, 0, 2, 2, 2, 0, 3, 3]),  # three replies
    make_row(3, [0, 0, 1, 1, 2, 2, 2]),  # two that touch
    make_row(4, [1, 1, 1, 1]),  # nothing before it
]


def shard_of(dtype: str = "float32", everywhere: bool = False) -> tuple[Shard, Expected]:
    rows = ROWS
    if everywhere:
        rows = [(row, replace(s, last=torch.randn(len(row.tokens), 4))) for row, s in ROWS]
    tensors = {name: t.clone() for name, t in lay_out(rows, DTYPES[dtype]).items()}
    facts = [RowInfo.of(row, 0).as_facts() for row, _ in rows]
    settings = {
        "dtype": dtype,
        "aux_layers": [0, 1, 2],
        "last_states": "everywhere" if everywhere else "replies",
        "teacher_top": 3,
    }
    return Shard(tensors, facts), Expected.of(settings, VOCABULARY, 4)


def failed(shard: Shard, expected: Expected) -> dict[str, str]:
    return {name: wrong for name, wrong in check_shard(shard, expected) if wrong}


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sound_shard_passes_every_check(dtype, everywhere):
    shard, expected = shard_of(dtype, everywhere)
    found = dict(check_shard(shard, expected))
    assert found == dict.fromkeys(CHECKS)
    unknown = replace(expected, vocabulary=None, hidden=None)  # no target at hand
    assert dict(check_shard(shard, unknown)) == dict.fromkeys(CHECKS)


def test_a_shard_of_tokens_alone():
    """Nothing is asked of features that are not there; features that are there are not expected."""
    tensors = lay_out([(row, None) for row, _ in ROWS], torch.float32)
    _, expected = shard_of()
    shard = Shard(tensors, shard_of()[0].facts)
    bare = replace(expected, features=False)
    assert list(dict(check_shard(shard, bare)).values()) == [None] * 7
    assert "is missing" in failed(shard, expected)["shapes"]
    assert "is not expected" in failed(shard_of()[0], bare)["shapes"]


def put(name: str, place, value):
    """Damage: one number of a tensor is another."""

    def change(tensors: dict, facts: list) -> None:
        tensors[name][place] = value

    return change


def fact(place: int, **values):
    """Damage: a row is said to be another."""

    def change(tensors: dict, facts: list) -> None:
        facts[place] |= values

    return change


def tensor(name: str, make):
    """Damage: a tensor is replaced; removed where nothing is made."""

    def change(tensors: dict, facts: list) -> None:
        tensors[name] = make(tensors[name])
        if tensors[name] is None:
            del tensors[name]

    return change


NAN, INF = float("nan"), float("inf")
# what is wrong → (damage, the check that finds it, a part of what it says)
FAULTS = {
    "a field is missing": (lambda t, f: f[1].pop("finish"), "facts", "record 1"),
    "an unknown field": (fact(1, colour="red"), "facts", "record 1"),
    "another split": (fact(2, split="test"), "facts", "0003: its split is 'test'"),
    "nothing supervised": (fact(2, supervised=0), "facts", "0003: 0 of 7"),
    "no argmax": (tensor("argmax", lambda t: None), "shapes", "argmax is missing"),
    "of another type": (tensor("aux", torch.Tensor.half), "shapes", "aux is float16"),
    "a state too few": (tensor("last", lambda t: t[:-1]), "shapes", "last is"),
    "an aux state too few": (tensor("aux", lambda t: t[:-1]), "shapes", "aux is"),
    "two layers": (tensor("aux", lambda t: t[:, :8]), "shapes", "aux is"),
    "a row too many": (lambda t, f: f.append(f[0]), "shapes", "offsets is"),
    "tokens cut off": (tensor("tokens", lambda t: t[:-2]), "shapes", "reply is"),
    "offsets begin late": (put("offsets", 0, 1), "offsets", "begins with 1"),
    "offsets fall": (put("offsets", 2, 3), "offsets", "0002: offsets does not rise"),
    "offsets end early": (put("offsets", -1, 27), "offsets", "ends with 27 of 28"),
    "predicting falls": (put("predicting", 1, 60), "offsets", "0002: predicting does not rise"),
    "predicting ends early": (put("predicting", -1, 17), "offsets", "ends with 17 of 18"),
    "a bound between rows": (put("offsets", 1, 5), "lengths", "0001: length is 5"),
    "length of the facts": (fact(3, length=5), "lengths", "0004: length is 4, the facts say 5"),
    "supervised of the facts": (fact(0, supervised=2), "lengths", "0001: supervised is 3"),
    "begins with reply 2": (put("reply", slice(3, 6), 2), "replies", "0001, token 3"),
    "a number is left out": (put("reply", slice(15, 17), 4), "replies", "0002, token 9"),
    "a number comes again": (put("reply", slice(15, 17), 1), "replies", "0002, token 9"),
    "a negative number": (put("reply", 0, -1), "replies", "0001, token 0"),
    "a hole in a reply": (put("reply", 12, 0), "replies", "0002, token 7"),
    "predicting of another row": (put("predicting", 1, 4), "predicting", "0001: 4 predicting"),
    "a token too large": (put("tokens", 7, VOCABULARY), "tokens", "0002, token 1"),
    "a negative token": (put("tokens", 27, -1), "tokens", "0004, token 3"),
    "a choice too large": (put("argmax", 4, VOCABULARY), "teacher", "0002: the target's choice"),
    "a probability above 1": (put("logprob", 0, 0.5), "teacher", "0001: no log-probability"),
    "too unlikely a choice": (put("logprob", 0, -4.0), "teacher", "0001: no log-probability"),
    "log-probability not a number": (put("logprob", -1, NAN), "teacher", "0004: no log"),
    "normaliser not finite": (put("lognorm", 3, INF), "teacher", "0002: a normaliser"),
    "a likely token too large": (put("top_ids", (0, 1), 50), "likeliest", "0001: likeliest"),
    "a likely token twice": (
        lambda t, f: t["top_ids"][3].fill_(7),
        "likeliest",
        "0002: likeliest tokens that cannot be",
    ),
    "likely ones rise": (put("top_logprob", (1, 2), -0.01), "likeliest", "0001: log-prob"),
    "another first one": (put("top_logprob", (3, 0), -0.2), "likeliest", "0002: the first"),
    "aux not finite": (put("aux", (6, 11), NAN), "features", "0002, token 0: aux is not finite"),
    "last not finite": (put("last", (0, 0), INF), "features", "0001: last is not finite"),
}
# These are seen by a second check as well, and rightly.
ALSO = {
    "a bound between rows": {"replies", "predicting"},
    "a hole in a reply": {"lengths", "predicting"},
    "too unlikely a choice": {"likeliest"},
    "a probability above 1": {"likeliest"},
    "log-probability not a number": {"likeliest"},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_the_check_of_its_name(name):
    damage, check, words = FAULTS[name]
    shard, expected = shard_of()
    damage(shard.tensors, shard.facts)
    found = failed(shard, expected)
    assert words in found[check]
    assert set(found) == {check} | ALSO.get(name, set())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("aux_scale", 0, "0002, token 0: aux_scale is not above 0"),
        ("aux_scale", -1, "aux_scale is not above 0"),
        ("last_scale", NAN, "0002: last_scale is not above 0, or not finite"),
        ("last_scale", INF, "last_scale is not above 0, or not finite"),
        ("aux", -128, "0002, token 0: aux is beyond −127"),
    ],
)
def test_faults_of_int8_features(name, value, words):
    shard, expected = shard_of("int8")
    shard.tensors[name][6 if name.startswith("aux") else 4, 0] = value
    found = failed(shard, expected)
    assert set(found) == {"features"}
    assert words in found["features"]
    del shard.tensors[name]
    assert f"{name} is missing" in failed(shard, expected)["shapes"]


def test_a_fault_far_inside_is_found_in_its_place():
    """Features are looked at in parts: the row that is told is the right one in a later part."""
    rows = [random_row(seed, 90) for seed in range(30)]
    shard = Shard(lay_out(rows, torch.float32), [RowInfo.of(r, 0).as_facts() for r, _ in rows])
    expected = Expected.of({"dtype": "float32", "aux_layers": [0, 1, 2]})
    assert not failed(shard, expected)
    shard.tensors["aux"][90 * 25 + 7, 2] = NAN
    assert f"row {25:016x}, token 7:" in failed(shard, expected)["features"]


# ── rows as a whole ──────────────────────────────────────────────────────────


def across(*rows: tuple[Row, States], parts: int = 2) -> Across:
    """The rows as `parts` shards, gathered."""
    gathered = Across()
    size = -(-len(rows) // parts)
    for begin in range(0, len(rows), size):
        part = list(rows[begin : begin + size])
        facts = [RowInfo.of(row, 0).as_facts() for row, _ in part]
        gathered.add(Shard(lay_out(part, torch.float32), facts))
    return gathered


def like(row: Row, **values) -> tuple[Row, States]:
    """Another row of the same tokens."""
    return replace(row, **values), ROWS[[r.id for r, _ in ROWS].index(row.id)][1]


def test_counts_are_those_of_the_rows():
    counts = {
        "rows": {"train": 4, "heldout": 0},
        "tokens": {"train": 28, "heldout": 0},
        "supervised_tokens": {"train": 19, "heldout": 0},
        "truncated": 0,
        "length_stopped": 0,
        "dropped": {"reply-too-short": 3},
    }
    assert across(*ROWS).wrong_counts(counts) is None
    for name in ("rows", "tokens", "supervised_tokens"):
        wrong = counts | {name: {"train": 5, "heldout": 0}}
        assert across(*ROWS).wrong_counts(wrong).startswith(f"{name}.train: the manifest says 5")
    for name in ("truncated", "length_stopped", "loops"):
        wrong = across(*ROWS).wrong_counts(counts | {name: 1})
        assert wrong == f"{name}: the manifest says 1, the rows say 0"
    stuck = across(*ROWS[:3], like(ROWS[3][0], loops=True))
    assert stuck.wrong_counts(counts) == "loops: the manifest says 0, the rows say 1"
    assert stuck.wrong_counts(counts | {"loops": 1}) is None
    assert "heldout" in across(*ROWS).wrong_counts(counts | {"rows": {"train": 4, "heldout": 1}})
    moved = across(*ROWS[:3], like(ROWS[3][0], split="heldout"))
    assert moved.wrong_counts(counts) is not None


def test_rows_come_by_hash_each_once_at_a_temperature():
    first = ROWS[0][0]
    again, second = like(first, temperature=0.7), like(first, id=f"{first.id}-2")
    assert across(ROWS[0], again, second, *ROWS[1:]).wrong_order() is None
    assert "comes after" in across(ROWS[1], ROWS[0]).wrong_order()
    assert "is there twice" in across(ROWS[0], again, ROWS[0], ROWS[1]).wrong_order()


def test_no_prompt_is_in_both_splits():
    """The same tokens before the last reply in train and in heldout: found, whatever the reply."""
    one = ROWS[0][0]
    other = replace(one, id="f" * 16, split="heldout", tokens=one.tokens.clone())
    other.tokens[-1] = 0  # another reply to it
    twin = (other, ROWS[0][1])
    assert "1 prompts" in across(*ROWS, twin).shared_prompts()
    assert across(*ROWS, (replace(other, split="train"), twin[1])).shared_prompts() is None
    other.tokens[0] += 1  # another prompt
    assert across(*ROWS, twin).shared_prompts() is None


def test_prompts_that_cannot_be_told_are_left_out():
    """A text has none; conversations of several rows begin like others: both splits, no fault."""
    text = (ROWS[3][0], ROWS[3][1])
    same = (replace(text[0], id="f" * 16, split="heldout"), text[1])
    assert across(text, same).shared_prompts() is None
    assert across(text, same).told == 0
    one, states = ROWS[0]
    begin = (replace(one, id="f" * 16, split="heldout"), states)
    later = (replace(ROWS[1][0], id="f" * 16 + "-2", split="heldout"), ROWS[1][1])
    assert across(ROWS[0], begin).shared_prompts() is not None
    assert across(ROWS[0], begin, later).shared_prompts() is None

"""Features computed when a batch is asked for: those that a float32 store of the same rows holds,
for a causal model says the same of a row whatever stands beside or behind it."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from fake_rows import random_row
from head_kinds import KINDS
from safetensors.torch import load_file

from spectrain.core.batch import predicting
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.data import capture as capture_module
from spectrain.data.capture import capture
from spectrain.data.online import OnlineStore, with_features
from spectrain.data.store import FeatureStore
from spectrain.data.writer import StoreWriter

LAYERS = (0, 2, 3)
LENGTHS = (6, 11, 24, 9, 30, 5)


@pytest.fixture(scope="module")
def make(tiny, tmp_path_factory):
    """make(layers) → the same rows twice: with features in float32, and as tokens alone."""
    folder = tmp_path_factory.mktemp("stores")
    return functools.cache(lambda layers: pair(tiny, folder / str(layers), layers))


@pytest.fixture
def stores(make):
    return make(LAYERS)


def pair(tiny, folder, layers):
    rows = [random_row(seed, length)[0] for seed, length in enumerate(LENGTHS)]
    settings = {
        "dtype": "float32",
        "aux_layers": layers,
        "last_states": "everywhere",
        "target": {"fingerprint": tiny.fingerprint, "dtype": "torch.float32"},
    }
    found = dict(capture(tiny, rows, layers, torch.float32, 64, last_everywhere=True))
    counts = {
        "tokens": {"train": sum(LENGTHS)},
        "supervised_tokens": {"train": sum(row.supervised for row in rows)},
    }
    for name, states in (("stored", lambda n: found[n].states), ("none", lambda n: None)):
        with StoreWriter.claim(folder / name, settings | {"features": name}) as writer:
            writer.write_shard(0, "a", [(rows[n], states(n)) for n in range(4)])
            writer.write_shard(1, "b", [(rows[n], states(n)) for n in range(4, 6)])
            writer.finish(2, counts)
    return FeatureStore.open(folder / "stored"), FeatureStore.open(folder / "none")


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "bins", [[[0], [1], [2], [3], [4], [5]], [[4], [0, 3, 1], [5, 2]]], ids=["single", "packed"]
)
def test_batches_are_those_of_a_float32_store(tiny, stores, bins):
    full, bare = stores
    rows = full.rows("train")
    assert rows == bare.rows("train")
    bins = [[rows[n] for n in one] for one in bins]
    expected, got = full.packed(bins), OnlineStore(bare, tiny, LAYERS).packed(bins)
    for name in ("tokens", "reply", "argmax"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert (got.starts is None) == (expected.starts is None) == (len(bins) == len(rows))
    if got.starts is not None:
        assert torch.equal(got.starts, expected.starts)
    filled = torch.zeros_like(got.tokens, dtype=torch.bool)
    for place, one in enumerate(bins):
        filled[place, : sum(row.length for row in one)] = True
    for name in ("aux", "last"):
        close(getattr(got, name)[filled], getattr(expected, name)[filled])
    assert OnlineStore(full, tiny, LAYERS).packed(bins, with_aux=False).aux is None


def test_teacher_facts_are_the_stored_ones(tiny, stores):
    full, bare = stores
    for row in full.rows("train"):
        expected, got = full.teacher(row), OnlineStore(bare, tiny).teacher(row)
        assert [part.dtype for part in got] == [part.dtype for part in expected]
        for left, right in zip(got, expected, strict=True):
            close(left, right)


def test_what_is_stored_does_not_matter(tiny, stores):
    """Other layers than the store's are no hindrance: its features are not looked at."""
    full, _ = stores
    rows = full.rows("train")[:2]
    batch = OnlineStore(full, tiny, (1, 2)).batch(rows)
    alone = tiny.forward(batch.tokens, aux_layers=(1, 2))
    close(batch.aux, alone.aux)
    assert batch.aux.shape[-1] == 2 * tiny.hidden_size


def test_few_logits_exist_at_a_time(tiny, stores, monkeypatch):
    """A batch of any size: rows of logits in parts, and for predicting positions alone."""
    seen = []
    real = Target.logits
    monkeypatch.setattr(capture_module, "LOGIT_ROWS", 7)
    monkeypatch.setattr(
        Target, "logits", lambda self, last: seen.append(len(last)) or real(self, last)
    )
    _, bare = stores
    batch = OnlineStore(bare, tiny).batch(bare.rows("train"))
    assert max(seen) == 7
    assert sum(seen) == int(predicting(batch.reply).sum()) > 21


def test_features_come_in_the_type_of_the_target(tiny_path, stores):
    _, bare = stores
    target = Target.load(str(tiny_path), dtype="bfloat16")
    batch = OnlineStore(bare, target, LAYERS).batch(bare.rows("train"))
    assert batch.aux.dtype == batch.last.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_stored_features(tiny, make, kind):
    """For every kind of head: each of its tensors, and the sums of its objective."""
    head = KINDS[kind](tiny, 120).train()
    full, bare = make(head.needs.aux_layers)
    bins = [[row] for row in full.rows("train")]
    bins = [bins[4], bins[0] + bins[3] + bins[1], bins[2]]
    results = []
    for store in (full, OnlineStore(bare, tiny, head.needs.aux_layers)):
        torch.manual_seed(3)  # of the noise
        objective = head(store.packed(bins, bool(head.needs.aux_layers)))
        head.zero_grad()
        (objective.loss / objective.count.clamp(min=1)).sum().backward()
        grads = {n: p.grad for n, p in head.named_parameters() if p.grad is not None}
        results.append((objective, grads))
    (expected, wanted), (got, grads) = results
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-5)
    for name in ("count", "hits", "seen"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert grads.keys() == wanted.keys() != set()
    for name, grad in wanted.items():
        size = max(float(grad.abs().max()), 1e-3)
        torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=1e-4 * size)


# ── tokens alone ─────────────────────────────────────────────────────────────


def test_a_store_of_tokens_alone_holds_nothing_else(stores):
    _, bare = stores
    for number in range(2):
        tensors = load_file(bare.path / f"shard-0000{number}.safetensors")
        assert set(tensors) == {"tokens", "reply", "offsets", "predicting"}
    batch = bare.batch(bare.rows("train"))
    assert batch.aux is batch.last is None
    assert (batch.argmax == -1).all()
    assert bare.bytes_per_token(LAYERS, True) == 0
    assert torch.equal(bare.token_counts("train", 60), stores[0].token_counts("train", 60))
    assert torch.equal(bare.prompt(bare.rows("train")[2]), stores[0].prompt(bare.rows("train")[2]))


def test_what_needs_stored_features_is_one_line(stores):
    _, bare = stores
    row = bare.rows("train")[0]
    for ask in (
        lambda: bare.require_features((), False),
        lambda: bare.teacher(row),
        lambda: bare.hidden_size,
    ):
        with pytest.raises(SpectrainError, match="holds tokens alone") as caught:
            ask()
        assert "\n" not in str(caught.value)
        assert str(bare.path) in str(caught.value)


def test_with_features_asks_the_target_only_where_nothing_is_stored(tiny, whole, stores):
    full, bare = stores
    needs = SimpleNamespace(aux_layers=LAYERS, last_everywhere=True)
    assert with_features(full, tiny, needs) is full
    online = with_features(bare, tiny, needs)
    assert (online.features, online.last_everywhere) == (True, True)
    assert (online.hidden_size, online.bytes_per_token(LAYERS, True)) == (tiny.hidden_size, 0)
    assert with_features(online, tiny, needs) is online
    with pytest.raises(SpectrainError, match="the head reads"):
        with_features(full, tiny, SimpleNamespace(aux_layers=(0, 1), last_everywhere=False))
    with pytest.raises(SpectrainError, match="not of this target"):
        OnlineStore(bare, whole)


@pytest.mark.parametrize(
    ("dtype", "said", "rounded"),
    [
        ("float32", "torch.bfloat16", False),
        ("bfloat16", "torch.bfloat16", False),
        ("bfloat16", "torch.float32", True),
        ("float16", "torch.bfloat16", True),
        ("bfloat16", None, True),
    ],
)
def test_a_store_knows_whether_it_rounded(stores, dtype, said, rounded):
    target = {"fingerprint": "f"} | ({"dtype": said} if said else {})
    for features in ("stored", "none"):
        settings = {"dtype": dtype, "target": target, "features": features}
        store = FeatureStore(stores[0].path, {"settings": settings}, [])
        assert store.rounded == (rounded and features == "stored")

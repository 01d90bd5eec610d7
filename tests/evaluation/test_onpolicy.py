"""Rows answered anew. By the store's own target, greedily, they are the rows of the store."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from head_kinds import create
from preparing import PROMPTS, write
from tiny_models import save_tiny

from spectrain.core.batch import predicting
from spectrain.core.target import Target
from spectrain.data.store import FeatureStore
from spectrain.evaluation import onpolicy
from spectrain.evaluation.measure import measure
from spectrain.evaluation.onpolicy import OnPolicy
from spectrain.evaluation.summary import summarise
from spectrain.recipes import prepare

LAYERS = (1, 3)
NEEDS = SimpleNamespace(aux_layers=LAYERS, last_everywhere=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("onpolicy")


@pytest.fixture(scope="module")
def target(folder, tokenizer):
    """Many tokens end its replies, so that some are shorter than others."""
    path = save_tiny(folder / "target", tokenizer)
    config = path / "generation_config.json"
    stops = {"eos_token_id": [tokenizer.eos_token_id, *range(20, 80)]}
    config.write_text(json.dumps(json.loads(config.read_text()) | stops))
    return Target.load(str(path), pack_weights=False)


@pytest.fixture(scope="module")
def store(folder, target):
    """Greedy replies alone; nothing is rounded."""
    prepare.run(
        prepare.PrepareConfig(
            target=target.name,
            prompts=write(folder / "prompts.jsonl", PROMPTS),
            store=folder / "store",
            heldout=1,
            heldout_temperatures=(0.0,),
            max_new_tokens=16,
            aux_layers=LAYERS,
            dtype="float32",
        )
    )
    return FeatureStore.open(folder / "store")


@pytest.fixture
def rows(store):
    return store.rows("heldout")


@pytest.fixture
def answered(target, store, rows, monkeypatch):
    """By the target that answered the store, five prompts at a time."""
    monkeypatch.setattr(onpolicy, "_BATCH", 5)
    return OnPolicy(target, [store.prompt(row) for row in rows], rows, NEEDS)


def test_the_same_target_gives_the_store_s_own_rows(store, rows, answered):
    assert len({row.finish for row in rows}) == 2
    assert len({row.supervised for row in rows}) > 3
    for index, (old, new) in enumerate(zip(rows, answered.rows, strict=True)):
        assert new.index == index
        for name in ("id", "domain", "temperature", "length", "supervised"):
            assert getattr(new, name) == getattr(old, name)


def test_the_same_target_gives_the_store_s_own_features(store, rows, answered):
    places = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    for part in (places[:7], places[7:8], places[8:]):
        old = store.batch([rows[place] for place in part])
        new = answered.batch([answered.rows[place] for place in part])
        for name in ("tokens", "reply", "argmax"):
            assert torch.equal(getattr(new, name), getattr(old, name)), name
        for place, row in enumerate(rows[number] for number in part):
            for name in ("last", "aux"):
                mine, stored = (getattr(batch, name)[place, : row.length] for batch in (new, old))
                torch.testing.assert_close(mine, stored, atol=1e-4, rtol=1e-4)
        assert old.aux.shape[-1] == len(LAYERS) * store.hidden_size


def test_auxiliary_states_are_left_out_when_nobody_asks(answered):
    assert answered.batch(answered.rows[:2], with_aux=False).aux is None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle3", {"steps": 3, "aux_layers": LAYERS}),
        ("mtp-parallel", {"steps": 3}),
        ("mtp-sequential", {"steps": 3}),
        ("medusa", {"steps": 3}),
    ],
)
def test_acceptance_and_tau_are_the_store_s(target, store, rows, answered, name, options):
    # Not wild: untrained heads that start from the target's own weights are sometimes right.
    head = create(target, name, random=False, **options)
    on_store = measure(target, head, store, {0.0: rows}, 3)[0.0]
    anew = measure(target, head, answered, {0.0: answered.rows}, 3)[0.0]
    assert summarise(anew, 3, 0) == summarise(on_store, 3, 0)
    assert any(reply.kept.any() for found in anew for reply in found.replies)


def test_another_target_is_measured_on_what_it_says_itself(store, rows, tokenizer, tmp_path):
    """Its replies are greedy ones of its own, no longer than the longest of the rows."""
    other = Target.load(str(save_tiny(tmp_path / "other", tokenizer, seed=8)), pack_weights=False)
    answered = OnPolicy(other, [store.prompt(row) for row in rows], rows, NEEDS)
    batch = answered.batch(answered.rows)
    where = predicting(batch.reply)
    assert torch.equal(batch.tokens[:, 1:][where[:, :-1]], batch.argmax[where])
    assert max(row.supervised for row in answered.rows) == max(row.supervised for row in rows)
    assert not torch.equal(batch.tokens, store.batch(rows).tokens)
    with torch.no_grad():
        own = other.model(input_ids=batch.tokens).logits.argmax(-1)
    assert torch.equal(batch.argmax[where], own[where])

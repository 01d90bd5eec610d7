"""A store of tokens alone serves every command as one with float32 features does, to rounding: the
target says the same of a row whenever it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from preparing import PROMPTS, content, write
from safetensors.torch import load_file

from spectrain.core.config import load_config
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.data.online import OnlineStore
from spectrain.data.store import FeatureStore
from spectrain.generator import costs
from spectrain.heads.io import load_head
from spectrain.heads.registry import FAMILIES
from spectrain.recipes import compare, evaluate, plan, prepare, train
from spectrain.trainer.metrics import read_metrics


@pytest.fixture(scope="module")
def make_store(tiny_path, tmp_path_factory):
    """make_store(**settings) → folder of a store of replies of the target's own."""
    folder = tmp_path_factory.mktemp("stores")
    prompts = write(folder / "prompts.jsonl", PROMPTS)

    def make(name, **settings):
        flags = {"target": str(tiny_path), "prompts": str(prompts), "store": str(folder / name)}
        flags |= {"heldout": 0.4, "max_new_tokens": 16, "shard_tokens": 300}
        report = prepare.run(load_config(prepare.PrepareConfig, "prepare", flags=flags | settings))
        return folder / name, report

    return make


@pytest.fixture(scope="module")
def full(make_store):
    return make_store("full", dtype="float32")[0]


@pytest.fixture(scope="module")
def bare(make_store):
    return make_store("bare", features="none")[0]


@pytest.fixture
def config(tiny_path, tmp_path, monkeypatch):
    """config(store, out, **changes) → a short training in the folder `out` of this test."""
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")

    def make(store, out, **changes):
        family = changes.get("family", "eagle3")
        settings = {
            "target": str(tiny_path),
            "store": store,
            "out": tmp_path / out,
            "head": {"steps": 2, **({} if family == "draft" else {"draft_vocab_size": 60})},
            "steps": 5,
            "batch_size": 4,
            "micro_batch": 2,
            "save_every": 2,
            "log_every": 1,
            "lr": 1e-3,
        }
        return train.TrainConfig(**{**settings, **changes})

    yield make
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture
def read(monkeypatch):
    """Tokens and replies of every batch that is made, in order."""
    seen = []
    real = FeatureStore._packed

    def watched(self, bins, with_aux, with_features):
        batch = real(self, bins, with_aux, with_features)
        seen.append((batch.tokens, batch.reply))
        return batch

    monkeypatch.setattr(FeatureStore, "_packed", watched)
    return seen


def curve(folder, *keys):
    return {key: [row[key] for row in read_metrics(folder)] for key in keys}


def require_same_curve(got, expected, rel=1e-5):
    for key in ("loss", "grad_norm"):
        left, right = (curve(folder, key)[key] for folder in (got, expected))
        assert left == pytest.approx(right, rel=rel if key == "loss" else 50 * rel), key
    assert curve(got, "hits", "seen", "padding") == curve(expected, "hits", "seen", "padding")


# ── preparing ────────────────────────────────────────────────────────────────


def test_the_same_rows_on_a_fraction_of_the_disk(make_store, full, bare):
    stored, alone = FeatureStore.open(full), FeatureStore.open(bare, verify=True)
    assert stored.features
    assert not alone.features
    for split in ("train", "heldout"):
        assert alone.rows(split) == stored.rows(split) != []
    rows = stored.rows("train")
    for name in ("tokens", "reply"):
        assert torch.equal(getattr(alone.batch(rows), name), getattr(stored.batch(rows), name))
    sizes = [sum(f.stat().st_size for f in s.glob("*.safetensors")) for s in (bare, full)]
    assert sizes[0] * 20 < sizes[1]
    # A rerun has nothing to do; a setting that shapes features alone is none of this store's.
    before = content(bare)
    report = make_store("bare", features="none", last_states="replies", batch_tokens=64)[1]
    assert content(bare) == before
    assert report["tokens_per_second"]["capture"] is None
    assert "supervised" in prepare.render(report)
    with pytest.raises(SpectrainError, match="features = 'none', now it is 'stored'"):
        make_store("bare")


# ── training ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pack_length", [0, 90])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_stored_features(
    config, full, bare, tmp_path, capsys, read, family, pack_length
):
    """Step by step, on the same batches; the one line that tells of it comes once."""
    common = {"family": family, "pack_length": pack_length}
    train.run(config(full, "stored", **common))
    assert "asked at every step" not in capsys.readouterr().err
    expected, read[:] = list(read), []
    report = train.run(config(bare, "online", **common))
    assert capsys.readouterr().err.count("the target is asked at every step") == 1
    assert len(read) == len(expected) > 10
    for left, right in zip(read, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    require_same_curve(tmp_path / "online", tmp_path / "stored")
    assert f"--store {bare}" in train.render(report)
    one, two = (load_head(tmp_path / name).state_dict() for name in ("stored", "online"))
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)


@pytest.mark.parametrize("mode", ["lora", "full", "scratch"])
@pytest.mark.parametrize("family", ["medusa", "eagle3"])
def test_a_trunk_is_trained_on_tokens_alone(config, full, bare, tmp_path, mode, family):
    """The original target, apart from the trunk, says what is distilled and which rows a small
    vocabulary leaves out."""
    reports = []
    for store, out in ((full, "stored"), (bare, "online")):
        trunk = {"mode": mode, "rank": 4, "heads_first": 0.0}
        asked = config(store, out, family=family, trunk=trunk, lr=2e-3)
        reports.append(train.run(asked))
    require_same_curve(tmp_path / "online", tmp_path / "stored", rel=1e-4)
    stored, online = (report["quality"] for report in reports)
    assert online == pytest.approx(stored, rel=1e-4)
    assert online["loss_after"] != online["loss_before"]


@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_interrupted_and_resumed_is_uninterrupted(config, bare, tmp_path, monkeypatch, family):
    """Bit for bit, noise and all: what the target says depends on the batch alone."""
    train.run(config(bare, "whole", family=family))
    load, loads = OnlineStore.packed, iter(range(100))

    def crash(self, *given):
        if next(loads) == 7:  # two loads a step: in step 4
            raise RuntimeError("crash")
        return load(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(OnlineStore, "packed", crash)
        with pytest.raises(RuntimeError, match="crash"):
            train.run(config(bare, "cut", family=family))
    train.run(config(bare, "cut", family=family))
    whole, cut = (load_file(tmp_path / o / "head/model.safetensors") for o in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())
    for key in ("loss", "grad_norm", "hits"):
        assert curve(tmp_path / "whole", key) == curve(tmp_path / "cut", key)


def test_two_processes_train_what_one_does(config, bare, tmp_path):
    """Through the command line, over gloo; the two share packed rows, the one has single ones."""
    one = config(bare, "one", micro_batch=1, batch_size=6)
    train.run(one)
    settings = {"head.steps": 2, "head.draft_vocab_size": 60, "steps": 5, "batch_size": 6}
    settings |= {"micro_batch": 1, "save_every": 2, "log_every": 1, "lr": 1e-3, "pack_length": 90}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + ["-m", "spectrain", "train-eagle", "--target", one.target, "--store", str(bare)]
        + ["--out", str(tmp_path / "two")]
        + [part for key, value in settings.items() for part in ("--set", f"{key}={value}")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the target is asked at every step") == 1
    report = json.loads((tmp_path / "two" / "report.json").read_text())["report"]
    assert report["processes"] == 2
    expected, got = (curve(tmp_path / name, "loss", "seen") for name in ("one", "two"))
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert got["seen"] == expected["seen"]


def test_stored_features_are_not_looked_at_when_the_target_is_asked(
    config, make_store, full, tmp_path
):
    """A store of other layers and rounded states: with online=true as with the float32 store."""
    other = make_store("other", dtype="bfloat16", aux_layers=(0, 1), last_states="replies")[0]
    train.run(config(full, "stored"))
    train.run(config(other, "online", online=True))
    require_same_curve(tmp_path / "online", tmp_path / "stored")


def test_a_run_goes_on_the_other_way_only_where_nothing_was_rounded(config, make_store, full):
    """A float32 store has the very features that are computed; one of bfloat16 has others, and the
    second part of the run would be taught by other numbers than the first."""
    train.run(config(full, "exact", steps=2))
    longer = {"steps": 4, "extend": True}
    assert train.run(config(full, "exact", online=True, **longer))["steps"] == 4
    rounded = make_store("rounded", dtype="bfloat16")[0]
    train.run(config(rounded, "rounded", steps=2))
    with pytest.raises(SpectrainError, match="started with online = False, now it is True"):
        train.run(config(rounded, "rounded", online=True, **longer))
    assert train.run(config(rounded, "rounded", **longer))["steps"] == 4


def test_stored_features_that_are_not_there_are_one_line(config, bare, monkeypatch):
    """Before anything is loaded."""
    monkeypatch.setattr(Target, "load", None)
    for trunk in ({}, {"mode": "lora"}):
        with pytest.raises(SpectrainError, match="holds tokens alone") as caught:
            train.run(config(bare, "run", online=False, trunk=trunk))
        assert "\n" not in str(caught.value)


# ── measuring ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["eagle3", "mtp-sequential"])
def test_eval_alpha_and_plan_measure_the_same(
    config, full, bare, tmp_path, tiny_path, monkeypatch, family
):
    def flat(target, head, batch, context, widths, repeats, draft_widths):
        return costs.Costs(
            dtype="float32",
            device=costs.machine(target.device),
            threads=1,
            batch=batch,
            context=context,
            verify=dict.fromkeys(widths, 10.0),
            extend=dict.fromkeys(draft_widths, 1.0),
            expand=dict.fromkeys(draft_widths, 1.0),
        )

    monkeypatch.setattr(costs, "measure", flat)
    train.run(config(full, "run", family=family, lr=1e-2, steps=12))
    measured, planned = [], []
    for store in (full, bare):
        flags = {"target": str(tiny_path), "head": str(tmp_path / "run"), "store": str(store)}
        flags |= {"out": str(tmp_path / "out")}
        measured.append(evaluate.run(load_config(evaluate.EvalConfig, "eval", flags=flags)))
        flags |= {"batch": [1], "context": 16, "nodes": 8}
        planned.append(plan.run(load_config(plan.PlanConfig, "plan", flags=flags)))
    stored, online = (report["temperatures"] for report in measured)
    for one, two in zip(online, stored, strict=True):
        for left, right in zip(one["tau"], two["tau"], strict=True):
            assert left["value"] == pytest.approx(right["value"], rel=1e-5)
        assert [p["anchors"] for p in one["positions"]] == [p["anchors"] for p in two["positions"]]
    assert stored[0]["tau"][0]["value"] > 1
    assert planned[0]["ranks"] == planned[1]["ranks"]


def test_compare_needs_no_features_either(config, full, bare, tiny_path, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")
    entries = {
        "eagle3": {"family": "eagle3", "head": {"steps": 2}},
        "tuned": {"family": "medusa", "trunk": {"mode": "lora", "rank": 4}},
    }
    reports = [
        compare.run(
            compare.CompareConfig(
                target=str(tiny_path),
                store=store,
                out=tmp_path / store.name,
                common={"steps": 3, "batch_size": 2, "head": {"draft_vocab_size": 60}},
                entries=entries,
                draft_tokens=2,
                prompts=2,
                max_new_tokens=6,
            )
        )
        for store in (full, bare)
    ]
    stored, online = (report["entries"] for report in reports)
    for name in entries:
        for left, right in zip(online[name]["tau"], stored[name]["tau"], strict=True):
            assert left["value"] == pytest.approx(right["value"], rel=1e-3)
        assert stored[name]["bytes_per_token"] > online[name]["bytes_per_token"] == 0

"""EAGLE heads from conversations to generated text, by the recipes alone."""

from __future__ import annotations

import pytest
from preparing import prompt, talk, write

from spectrain.core.config import load_config
from spectrain.core.errors import SpectrainError
from spectrain.heads.io import load_head
from spectrain.recipes import evaluate, generate, prepare, train


@pytest.fixture
def make_store(tmp_path, tiny_path, monkeypatch):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")

    def make(**flags):
        rows = [talk(f"q{n}", f"a reply to {n}") for n in range(16)]
        flags |= {"target": str(tiny_path), "prompts": str(write(tmp_path / "rows.jsonl", rows))}
        flags |= {"store": str(tmp_path / "store"), "heldout": 0.3, "regenerate": False}
        prepare.run(load_config(prepare.PrepareConfig, "prepare", flags=flags))
        return str(tmp_path / "store")

    return make


def train_flags(tmp_path, tiny_path, store, family):
    flags = {"family": family, "store": store, "out": str(tmp_path / "run"), "steps": 3}
    return flags | {"target": str(tiny_path), "batch_size": 4, "micro_batch": 2, "lr": 1e-3}


@pytest.mark.parametrize(
    ("family", "options", "terms"),
    [
        ("eagle1", ["head.steps=2"], 2),
        ("eagle2", ["head.tree.depth=4", "head.init=target"], 1),
        ("eagle3", ["head.layers=2", "head.loss=lk_lambda", "head.embeddings=own"], 7),
    ],
)
def test_from_rows_to_text(make_store, tmp_path, tiny_path, family, options, terms):
    store = make_store()
    flags = train_flags(tmp_path, tiny_path, store, family)
    config = load_config(train.TrainConfig, "train", overrides=options, flags=flags)
    report = train.run(config)
    assert report["loss"] > 0
    assert len(report["acceptance"]) == terms
    head = load_head(tmp_path / "run")
    assert head.family == family
    assert (head.tree and head.tree.depth) == (4 if family == "eagle2" else None)
    common = {"target": str(tiny_path), "head": str(tmp_path / "run")}
    measured = {"store": store, "out": str(tmp_path / "eval"), "max_draft": 3}
    config = load_config(evaluate.EvalConfig, "eval-alpha", flags=common | measured)
    assert evaluate.run(config)["max_draft"] == 3
    prompts = write(tmp_path / "prompts.jsonl", [prompt("How many?"), prompt("the fox")])
    asked = {"prompts": str(prompts), "max_new_tokens": 10, "compare": True, "draft_tokens": 3}
    config = load_config(generate.GenerateConfig, "generate", flags=common | asked)
    assert set(generate.run(config)["identical"].values()) == {2}


def test_a_store_without_all_last_states_is_refused(make_store, tmp_path, tiny_path):
    flags = train_flags(tmp_path, tiny_path, make_store(last_states="replies"), "eagle1")
    with pytest.raises(SpectrainError, match="last_states=everywhere"):
        train.run(load_config(train.TrainConfig, "train", flags=flags))

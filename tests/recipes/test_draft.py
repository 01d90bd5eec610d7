"""A draft model from conversations and plain texts to generated text, by the recipes alone."""

from __future__ import annotations

import pytest
from preparing import prompt, talk, write
from tiny_models import save_tiny

from spectrain.core.config import load_config
from spectrain.heads.io import load_head
from spectrain.recipes import evaluate, generate, prepare, train


@pytest.fixture
def store(tmp_path, tiny_path, monkeypatch):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")
    rows = [talk(f"q{n}", f"a reply to {n}") for n in range(8)]
    rows += [{"text": f"{n} lazy dogs of the question"} for n in range(8)]
    flags = {"target": str(tiny_path), "prompts": str(write(tmp_path / "rows.jsonl", rows))}
    flags |= {"store": str(tmp_path / "store"), "heldout": 0.3}
    prepare.run(load_config(prepare.PrepareConfig, "prepare", flags=flags))
    return tmp_path / "store"


@pytest.mark.parametrize("start", ["layers", "model", "init"])
def test_from_rows_to_text(store, tmp_path, tiny_path, tokenizer, start):
    """Made of the target's layers, of another model, or going on from one as it is."""
    small = str(save_tiny(tmp_path / "small", tokenizer, num_hidden_layers=1, vocab_size=384))
    common = {"target": str(tiny_path)}
    flags = {"family": "draft", "store": str(store), "out": str(tmp_path / "run"), "steps": 3}
    flags |= {"batch_size": 4, "micro_batch": 2, "lr": 1e-3}
    options = {"layers": {"head.layers": 1}, "model": {"head.model": small}, "init": {}}[start]
    flags |= {"init": small} if start == "init" else {}
    overrides = [f"{key}={value}" for key, value in options.items()]
    config = load_config(train.TrainConfig, "train", overrides=overrides, flags=common | flags)
    report = train.run(config)
    assert report["loss"] > 0
    assert len(report["acceptance"]) == 1
    head = load_head(tmp_path / "run")
    assert (head.family, head.config.target.name) == ("draft", str(tiny_path))
    measured = {"head": str(tmp_path / "run"), "store": str(store), "out": str(tmp_path / "eval")}
    config = load_config(evaluate.EvalConfig, "eval-alpha", flags=common | measured)
    assert evaluate.run(config)["max_draft"] == 5
    prompts = write(tmp_path / "prompts.jsonl", [prompt("How many?"), prompt("the fox")])
    asked = {"prompts": str(prompts), "max_new_tokens": 10, "compare": True}
    for folder in (str(tmp_path / "run"), small):
        config = load_config(
            generate.GenerateConfig, "generate", flags=common | asked | {"head": folder}
        )
        assert set(generate.run(config)["identical"].values()) == {2}

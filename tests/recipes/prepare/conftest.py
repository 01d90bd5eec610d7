"""Settings of a small preparation; targets are loaded once, progress is silent."""

import functools

import pytest
from preparing import PROMPTS, content, write

from spectrain.core import files
from spectrain.core.target import Target
from spectrain.recipes import prepare
from spectrain.recipes.prepare import PrepareConfig


@pytest.fixture(scope="session")
def load():
    """Target.load, each target once."""
    return functools.cache(Target.load)


@pytest.fixture(autouse=True)
def quick(monkeypatch, load):
    monkeypatch.setattr(prepare.Target, "load", load)
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")
    # Processes are killed here, not machines: what was written is there without being flushed.
    monkeypatch.setattr(files.os, "fsync", lambda handle: None)


@pytest.fixture
def config(tmp_path, tiny_path):
    """Settings for sixteen prompts: several units and several shards."""

    def make(**changes) -> PrepareConfig:
        prompts = tmp_path / "prompts.jsonl"
        if not prompts.exists():
            write(prompts, PROMPTS)
        settings = {
            "target": str(tiny_path),
            "prompts": prompts,
            "store": tmp_path / "store",
            "heldout": 0.3,
            "max_new_tokens": 8,
            "reply_batch": 5,
            "shard_tokens": 300,
            "batch_tokens": 200,
            "temperature": 1.0,
        }
        return PrepareConfig(**(settings | changes))

    return make


@pytest.fixture
def clean(config, tmp_path):
    """Bytes of an uninterrupted run."""
    prepare.run(config(store=tmp_path / "clean"))
    return content(tmp_path / "clean")

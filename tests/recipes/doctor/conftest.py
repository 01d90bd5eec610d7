"""Heads that learnt the very replies that `doctor` examines them on, and spoilt copies of them.

So what is accepted of a whole head is far above a blind guess, and little of a spoilt one is.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from head_kinds import create
from preparing import prompt, write
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from typer.testing import CliRunner

from spectrain import cli
from spectrain.core.config import load_config
from spectrain.core.target import Target
from spectrain.data.online import read
from spectrain.data.reading import read_conversations
from spectrain.evaluation import behaviour
from spectrain.heads.io import save_head
from spectrain.recipes.doctor import DoctorConfig, render, run
from spectrain.recipes.generate import ids_of

WORDS = [*("apple", "dog", "two", "word", "letter", "seven"), *("fox", "quick", "lazy", "one")]
LONGEST = 24
OPTIONS = {
    # One lower than the last three of the target, so that both neighbours can be asked for.
    "eagle3": {"steps": 2, "draft_vocab_size": 300, "aux_layers": (1, 2, 3)},
    "eagle1": {"noise": 0.0, "classification_weight": 1.0},
    "medusa": {"steps": 2, "draft_vocab_size": 300},
}


def same(batch):
    return batch


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="session")
def path(folder, tokenizer):
    """A target of six layers whose text goes in no circles."""
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 6, "initializer_range": 0.3}
    return save_tiny(folder / "target", tokenizer, tie_word_embeddings=False, **sizes)


@pytest.fixture(scope="session")
def prompts(folder):
    rows = [prompt(f"{n} {one} {WORDS[n - 1]}") for n, one in enumerate(WORDS)]
    return write(folder / "prompts.jsonl", rows)


@pytest.fixture(scope="session")
def target(path):
    return Target.load(str(path), pack_weights=False)


@pytest.fixture(scope="session")
def replies(target, prompts):
    """What `doctor` will let the head guess."""
    rows = read_conversations(prompts, "last", "stop", keep_order=True)
    return behaviour.answered(target, [ids_of(target, row) for row in rows], LONGEST)


@pytest.fixture(scope="session")
def trained(folder, target, replies):
    """trained(family, change, other) → the folder of a head; change: of the batch that it learns
    from; other: a class that computes otherwise, of which the files tell nothing."""
    made = {}

    def learn(family, change=same, other=None):
        if (family, change, other) in made:
            return made[family, change, other]
        head = create(target, family, random=False, **OPTIONS[family])
        batch = read(target, replies, head.needs.aux_layers)
        asked = batch.argmax[batch.argmax >= 0]
        if head.reduced:  # the vocabulary that these replies ask for
            counts = torch.bincount(asked, minlength=target.vocab_size)
            kind = type(head)
            head = kind.create(kind.Options(**OPTIONS[family]), target, counts)
        batch = change(batch)
        head.__class__ = other or type(head)
        weights = [p for p in head.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0)
        head.train()
        for _ in range(100):
            found = head.objective(batch)
            optimizer.zero_grad()
            (found.loss / found.count).sum().backward()
            optimizer.step()
        out = folder / f"head-{len(made)}"
        save_head(head.eval(), out)
        made[family, change, other] = out
        return out

    return learn


@pytest.fixture
def examine(path, prompts, monkeypatch):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")

    def report(head, **flags):
        flags = {"target": str(path), "prompts": str(prompts), "limit": len(WORDS), **flags}
        flags |= {"path": str(head), "max_new_tokens": LONGEST}
        found = run(load_config(DoctorConfig, "doctor", flags=flags))
        _, _, *lines = render(found).splitlines()  # the first two hold paths
        assert max(map(len, lines)) <= 80
        json.dumps(found, allow_nan=False)
        for one in found["findings"]:  # whatever is wrong is told with what mends it
            assert one["fix"] or one["verdict"] in ("ok", "note") or one["check"] == "acceptance"
        return found

    return report


@pytest.fixture
def spoilt(trained, tmp_path):
    """spoilt(family, tensors, config) → a copy of a trained head, edited by functions."""

    def copy(family, tensors=lambda t: None, config=lambda c: None):
        out = tmp_path / "spoilt"
        shutil.copytree(trained(family), out)
        stored, facts = load_file(out / "model.safetensors"), out / "config.json"
        tensors(stored)
        save_file({n: t.contiguous() for n, t in stored.items()}, out / "model.safetensors")
        content = json.loads(facts.read_text())
        config(content)
        facts.write_text(json.dumps(content))
        return out

    return copy


@pytest.fixture(scope="session")
def new_head(target):
    """new_head(family, random) → an untrained head; random: of no start that training has."""

    def make(family, random=False):
        return create(target, family, random=random, **OPTIONS[family])

    return make


@pytest.fixture
def command(path, prompts):
    """command(head, more) → what the command line made of it."""

    def call(head, *more):
        flags = ["--target", str(path), "--prompts", str(prompts), "--max-new-tokens", str(LONGEST)]
        return CliRunner().invoke(cli.app, ["doctor", str(head), *flags, *more])

    return call

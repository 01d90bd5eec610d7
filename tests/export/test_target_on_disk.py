"""Export and import never load the target whole; how often they read a layer of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from head_kinds import create
from mtp_checkpoints import save_checkpoint
from tiny_models import save_tiny

from spectrain.core.checkpoint import Checkpoint
from spectrain.core.config import load_config
from spectrain.core.errors import RunFailed
from spectrain.core.on_disk import TargetOnDisk
from spectrain.core.target import Target
from spectrain.export.formats import WRITERS
from spectrain.export.own import OwnReader
from spectrain.heads.io import load_head, save_head
from spectrain.recipes import export, import_head

MTP = {"steps": 1, "pass_on": "after_norm"}
# format → the target's architecture and the heads that it has a place for
CASES = {
    **{name: ("llama", {"eagle1": {}, "eagle3": {}}) for name in ("eagle", "vllm", "sglang")},
    "trtllm": ("llama", {"eagle3": {}}),
    "speculators": ("llama", {"eagle3": {}}),
    "medusa": ("llama", {"medusa": {}}),
    "hf": ("llama", {"draft": {"layers": 2}}),
    "mtp-deepseek": ("deepseek_v3", {"mtp-sequential": MTP}),
    "mtp-mimo": ("qwen2", {"mtp-sequential": MTP}),
    "mtp-transformers": ("qwen2", {"mtp-sequential": MTP}),
    "spectrain": (
        "llama",
        {"eagle1": {}, "eagle2": {}, "eagle3": {}, "medusa": {}, "mtp-parallel": {}, "draft": {}}
        | {"mtp-sequential": MTP},
    ),
}
PAIRS = [(format, family) for format, (_, heads) in CASES.items() for family in heads]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")


@pytest.fixture(scope="module")
def targets(tmp_path_factory, tokenizer):
    """architecture → the folder of a target, and the target loaded whole"""
    made = {}

    def target(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp("targets") / kind
            if kind == "llama":  # of sizes that every engine has a place for
                sizes = {"vocab_size": len(tokenizer), "head_dim": 12, "num_hidden_layers": 8}
                save_tiny(folder, tokenizer, **sizes)
            else:
                save_checkpoint(folder, tokenizer, kind, count=0)
            made[kind] = folder, Target.load(str(folder), pack_weights=False)
        return made[kind]

    return target


@pytest.fixture
def watched(monkeypatch):
    """Names of targets that were loaded whole, and how often each tensor was read from a folder."""
    loaded, reads = [], Counter()
    load, read = Target.load.__func__, Checkpoint.read

    def loading(cls, name, **options):
        loaded.append(name)
        return load(cls, name, **options)

    def reading(self, name):
        reads[self.path, name] += 1
        return read(self, name)

    monkeypatch.setattr(Target, "load", classmethod(loading))
    monkeypatch.setattr(Checkpoint, "read", reading)
    return loaded, reads


def exported(folder, run, **flags):
    flags = {"run": str(run), "target": str(folder), "base_model": "owner/target"} | flags
    return export.run(load_config(export.ExportConfig, "export", flags=flags))


def imported(folder, path, out):
    flags = {"path": str(path), "target": str(folder), "out": str(out)}
    return import_head.run(load_config(import_head.ImportConfig, "import", flags=flags))


def made_head(targets, format, family, run):
    kind, heads = CASES[format]
    folder, whole = targets(kind)
    head = create(whole, family, **heads[family])
    save_head(head, run / "head")
    return folder, head


def test_every_format_that_can_be_had_here_is_tried():
    """A Qwen3-Next target is refused: no draft can be made for its linear layers."""
    every = {(format, family) for format, families in WRITERS.items() for family in families}
    left = {(format, "eagle2") for format in ("eagle", "vllm", "sglang")}  # EAGLE-1's weights
    assert every - set(PAIRS) == left | {("mtp-qwen3next", "mtp-sequential")}


@pytest.mark.parametrize(("format", "family"), PAIRS)
def test_there_and_back_without_the_target(targets, watched, tmp_path, format, family):
    run = tmp_path / "run"
    folder, head = made_head(targets, format, family, run)
    loaded, _ = watched
    loaded.clear()
    report = exported(folder, run, format=format)
    assert any("the same to the last bit" in text for text in report["checks"])
    imported(folder, report["out"], tmp_path / "in")
    assert str(folder) not in loaded
    again = load_head(tmp_path / "in")
    ours, theirs = head.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize(
    ("family", "times"),
    # Once for the name of the target, once for the states that drafts are compared behind; a new
    # head that begins as the last layer of EAGLE-1's target asks for its states, two are made.
    [("medusa", 2), ("eagle3", 2), ("eagle1", 4)],
)
def test_how_often_a_layer_is_read(targets, watched, tmp_path, family, times):
    folder, _ = made_head(targets, "spectrain", family, tmp_path / "run")
    _, reads = watched
    first = [name for name in Checkpoint(folder).entries if ".layers.1." in name]
    tables = [name for name in Checkpoint(folder).entries if ".layers." not in name]
    report = exported(folder, tmp_path / "run", format="spectrain")
    assert first
    assert {reads[folder, name] for name in first} == {times}
    assert {reads[folder, name] for name in tables} == {1}
    reads.clear()
    imported(folder, report["out"], tmp_path / "in")
    assert {reads[folder, name] for name in first} == {2}
    assert {reads[folder, name] for name in tables} == {1}


def test_what_only_drafts_show_is_still_seen(targets, tmp_path, monkeypatch):
    """The states are real ones: a reader that hands over another norm is found by the drafts."""
    folder, _ = made_head(targets, "spectrain", "eagle3", tmp_path / "run")
    build = OwnReader.build

    def other(self, found, target):
        assert type(target) is TargetOnDisk
        head = build(self, found, target)
        again = type(head)(head.config.model_copy(update={"rms_norm_eps": 0.5}))
        again.load_state_dict(head.state_dict())
        return again

    monkeypatch.setattr(OwnReader, "build", other)
    with pytest.raises(RunFailed, match="logits of draft step 0 differ"):
        exported(folder, tmp_path / "run", format="spectrain")

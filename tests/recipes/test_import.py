"""`spectrain import`: what is read from another place is a head that the other commands take."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from head_kinds import KINDS, create
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from spectrain import cli
from spectrain.commands import train as train_commands
from spectrain.core import files
from spectrain.core.checkpoint import SINGLE
from spectrain.export import formats, found, own
from spectrain.export.parity import differences
from spectrain.heads.io import load_head, save_head
from spectrain.heads.registry import FAMILIES
from spectrain.recipes import import_head
from spectrain.recipes.import_head import TRAINED_BY, ImportConfig, render, run


class PublicReader(own.OwnReader):
    """Stands for a public layout: the tensors in a file of torch.save, no word of our own config
    (here it is kept under a key of another name)."""

    name = "public"

    def recognises(self, found):
        return "public" in found.config

    def findings(self, found, target):
        yield from super().findings(self._own(found), target)
        yield own.Finding("norm flags", "warn", "no word about norms", "say it in the config")

    def build(self, found, target):
        return super().build(self._own(found), target)

    @staticmethod
    def _own(found):
        inner = SimpleNamespace(config=found.config["public"], path=found.path, read=found.read)
        inner.shapes, inner.dtypes = found.shapes, found.dtypes
        return inner


@pytest.fixture
def public(tiny, tmp_path, monkeypatch):
    """public(head) → folder of a head in that layout."""

    def make(head, name="theirs"):
        folder = tmp_path / name
        folder.mkdir()
        config = {"public": head.config.model_dump(mode="json")}
        (folder / "config.json").write_text(json.dumps(config))
        torch.save({"state_dict": head.state_dict()}, folder / "pytorch_model.bin")
        return folder

    monkeypatch.setitem(formats.READERS, "public", f"{__name__}:PublicReader")
    readers = {"spectrain": own.OwnReader, "public": PublicReader}
    monkeypatch.setattr(formats, "_made", lambda place: (
        own.OwnWriter if place.endswith("Writer")
        else readers["public" if place.endswith("PublicReader") else "spectrain"]
    )())  # fmt: skip
    return make


def call(*arguments, code=0):
    done = CliRunner().invoke(cli.app, [str(one) for one in arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_head_comes_through_a_pickle_unchanged(
    tiny, tiny_path, public, tmp_path, name
):
    head = KINDS[name](tiny, 120)
    folder = public(head)
    report = run(ImportConfig(path=str(folder), target=str(tiny_path), out=tmp_path / "run"))
    again = load_head(tmp_path / "run").bind(tiny.readout)
    assert differences(head, again, tiny) == []
    assert report["family"] == head.family
    assert report["steps"] == head.config.steps


def test_the_report_and_where_it_came_from(tiny, tiny_path, public, tmp_path):
    head = create(tiny, "eagle3", steps=4, draft_vocab_size=120)
    folder = public(head)
    flags = ["--target", tiny_path, "--out", tmp_path / "run", "--json", tmp_path / "report.json"]
    printed = call("import", folder, *flags).stdout
    assert "in the layout public" in printed
    assert "4 draft steps" in printed
    assert "120 of 384 tokens" in printed
    assert "warn: norm flags: no word about norms; say it in the config" in printed
    for verb in ("eval-alpha", "generate", "train-eagle"):
        assert f"spectrain {verb} --target {tiny_path}" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    about = json.loads((tmp_path / "run" / "head" / "provenance.json").read_text())
    assert about["source"]["layout"] == report["layout"] == "public"
    assert about["source"]["path"] == str(folder)
    assert about["source"]["files"] == report["files"]
    assert report["files"][0]["name"] == "pytorch_model.bin"
    assert len(report["files"][0]["sha256"]) == 64


def test_what_is_imported_is_taken_by_the_other_commands(
    tiny, tiny_path, public, tmp_path, store, monkeypatch
):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")
    head = create(tiny, "eagle1", draft_vocab_size=120)
    target = ["--target", tiny_path]
    call("import", public(head), *target, "--out", tmp_path / "run")
    run_ = tmp_path / "run"
    call("generate", *target, "--head", run_, "--prompt", "two words", "--max-new-tokens", 4)
    call("eval-alpha", *target, "--store", store, "--head", run_, "--out", tmp_path / "eval")
    further = ["--store", store, "--out", tmp_path / "further", "--steps", 1, "--lr", 1e-3]
    sets = ["--init", str(run_ / "head"), "--set", "family=eagle1"]
    call("train-eagle", *target, *further, *sets)
    before, after = (load_file(f / "head" / SINGLE) for f in (run_, tmp_path / "further"))
    assert before.keys() == after.keys()
    assert torch.equal(before["d2t"], after["d2t"])


def test_the_command_that_trains_a_family_is_named_right():
    """As commands/train.py has it, for every family."""
    choices = {
        "eagle": train_commands.VERSION,
        "medusa": train_commands.STAGE,
        "mtp": train_commands.KIND,
        "draft": train_commands.DRAFT,
    }
    assert set(choices) == set(TRAINED_BY)
    for family in FAMILIES:
        (named,) = (name for name in TRAINED_BY if family.startswith(name))
        assert family in {kind["family"] for kind in choices[named].kinds.values()}


def test_draft_steps_are_taken_where_the_weights_leave_them_open(tiny, tiny_path, public, tmp_path):
    """A recurrent head is the same head at any number of steps; one with a part for each is not."""
    settings = {"target": str(tiny_path), "draft_steps": 5}
    head = create(tiny, "eagle3", steps=2, draft_vocab_size=120)
    folder = public(head)
    report = run(ImportConfig(path=str(folder), out=tmp_path / "run", **settings))
    again = load_head(tmp_path / "run").bind(tiny.readout)
    assert report["steps"] == again.config.steps == 5
    for name, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    folder = public(create(tiny, "medusa", steps=2), "medusa")
    with pytest.raises(found.SpectrainError, match="those of 2 draft steps, not of 5"):
        run(ImportConfig(path=str(folder), out=tmp_path / "no", **settings))
    assert not (tmp_path / "no").exists()


def test_a_head_is_replaced_only_when_asked(tiny, tiny_path, tmp_path):
    one, other = (create(tiny, "medusa", seed=seed, steps=2) for seed in (0, 1))
    save_head(one, tmp_path / "one")
    save_head(other, tmp_path / "other")
    flags = ["--target", tiny_path, "--out", tmp_path / "run"]
    call("import", tmp_path / "one", *flags)
    refused = call("import", tmp_path / "other", *flags, code=2)
    assert "there is a head already" in refused.stderr
    assert differences(one, load_head(tmp_path / "run").bind(tiny.readout), tiny) == []
    call("import", tmp_path / "other", *flags, "--overwrite")
    assert differences(other, load_head(tmp_path / "run").bind(tiny.readout), tiny) == []
    # A run that reads from the very place it writes to has read it all by then.
    call("import", tmp_path / "run", *flags, "--overwrite")
    assert differences(other, load_head(tmp_path / "run").bind(tiny.readout), tiny) == []
    (tmp_path / "run" / "report.json").write_text("{}")
    assert "training run" in call("import", tmp_path / "one", *flags, "--overwrite", code=2).stderr


def test_what_was_written_is_read_back_first(tiny, tiny_path, tmp_path, monkeypatch):
    """A head that is not the one that was read takes no place, not even that of an older one."""
    one, other = (create(tiny, "medusa", seed=seed, steps=2) for seed in (0, 1))
    save_head(one, tmp_path / "one")
    flags = ["--target", tiny_path, "--out", tmp_path / "run"]
    assert "checked: read back from the disk" in call("import", tmp_path / "one", *flags).stdout
    save_head(other, tmp_path / "other")
    real = import_head.write_head

    def write(head, folder):
        real(head, folder)
        tensors = load_file(folder / SINGLE)
        next(v for v in tensors.values() if v.is_floating_point()).flatten()[-1] += 1
        save_file(tensors, folder / SINGLE)

    monkeypatch.setattr(import_head, "write_head", write)
    failed = call("import", tmp_path / "other", *flags, "--overwrite", code=1)
    assert "is not the head" in failed.stderr
    assert "nothing was written" in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["head"]
    assert differences(one, load_head(tmp_path / "run").bind(tiny.readout), tiny) == []


def test_every_file_is_read_for_its_checksum_once(tiny, tiny_path, tmp_path, monkeypatch):
    """Of an export: against its record, and for the provenance. One of MTP layers holds the
    target's files, too."""
    save_head(create(tiny, "mtp-sequential", steps=1, pass_on="after_norm"), tmp_path / "run")
    folder, seen = tmp_path / "exported", Counter()
    call("export", tmp_path / "run", "--format", "mtp-transformers", "--out", folder)
    real = found.sha256_file

    def counted(path):
        seen[path.name] += 1
        return real(path)

    for module in (found, files):
        monkeypatch.setattr(module, "sha256_file", counted)
    call("import", folder, "--target", tiny_path, "--out", tmp_path / "again")
    weights = {path.name for path in folder.iterdir() if path.suffix == ".safetensors"}
    assert len(weights) == 2
    assert weights < set(seen)
    assert set(seen.values()) == {1}


def test_every_way_to_name_a_head(tiny, tiny_path, tmp_path):
    """The folder, the run's folder, the file, a file of any name that is the only one, a link."""
    head = create(tiny, "medusa", steps=2)
    save_head(head, tmp_path / "theirs" / "head")
    folder = tmp_path / "theirs" / "head"
    lone = tmp_path / "lone"
    shutil.copytree(folder, lone)
    (lone / SINGLE).rename(lone / "medusa_lm_head.safetensors")
    torch.save({"step": 3}, lone / "training_args.bin")
    both = tmp_path / "both"  # safetensors go first
    shutil.copytree(folder, both)
    (both / "pytorch_model.bin.index.json").write_text("nonsense")
    linked = tmp_path / "linked"  # as the hub's cache keeps files
    linked.mkdir()
    for name in ("config.json", SINGLE):
        (linked / name).symlink_to(folder / name)
    for number, path in enumerate((folder, folder.parent, folder / SINGLE, lone, both, linked)):
        out = tmp_path / f"run{number}"
        text = render(run(ImportConfig(path=str(path), target=str(tiny_path), out=out)))
        assert "in the layout spectrain" in text
        assert differences(head, load_head(out).bind(tiny.readout), tiny) == []

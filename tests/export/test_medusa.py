"""The layout of Medusa's own code: numbers for names, and two versions of it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from exporting import round_trip
from head_kinds import KINDS, create
from safetensors.torch import load_file, save_file

from spectrain.export.formats import reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import Reference, load
from spectrain.export.parity import differences
from spectrain.export.write import write

FILE = "medusa_lm_head.safetensors"


@pytest.fixture
def folder(whole, tmp_path):
    """Three heads of two blocks over every token."""
    path = tmp_path / "out"
    path.mkdir()
    write(writer("medusa", "medusa").encode(made(whole), Reference(whole, "some/target")), path)
    return path


def made(target, **options):
    return create(target, "medusa", **{"steps": 3, "layers": 2, **options})


def told(folder, target, verdict="fail"):
    found = Found.open(folder)
    return [one.text for one in reader_of(found).findings(found, target) if one.verdict == verdict]


def change(folder, edit):
    """The weights of a folder after `edit` has changed the dict of them."""
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file(tensors, folder / FILE)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_heads_come_back_the_same(whole, tmp_path, layers):
    head = made(whole, layers=layers)
    again = round_trip(head, whole, "medusa", tmp_path / "out")
    assert differences(head, again, whole) == []
    assert again.config.layers == layers


def test_names_and_config(folder):
    found = Found.open(folder)
    names = {f"{k}.{l}.linear.{p}" for k in range(3) for l in range(2) for p in ("weight", "bias")}
    assert found.shapes.keys() == names | {f"{k}.2.weight" for k in range(3)}
    assert found.config == {
        "medusa_num_heads": 3,
        "medusa_num_layers": 2,
        "base_model_name_or_path": "some/target",
    }


def test_what_the_layout_cannot_say(tiny, whole):
    refusals = writer("medusa", "medusa").refusals
    assert refusals(made(whole), Reference(whole, "some/target")) == []
    (reason,) = refusals(KINDS["medusa"](tiny, 120), Reference(tiny, "some/target"))
    assert "120 of 392 tokens" in reason
    head = made(whole)
    head.config = head.config.model_copy(update={"output_bias": True})
    (reason,) = refusals(head, Reference(whole, "some/target"))
    assert "bias" in reason


def test_heads_without_output_layers_speak_through_the_targets(whole, folder):
    """Version 2: the same as heads whose output layers are copies of the target's."""

    def forget(tensors):
        for k in range(3):
            del tensors[f"{k}.2.weight"]

    change(folder, forget)
    (note,) = told(folder, whole, "note")
    assert "version 2" in note
    assert told(folder, whole) == []
    found = Found.open(folder)
    head, expected = load(reader_of(found), found, whole), made(whole)
    for own in expected.heads:
        own[-1].weight.data.copy_(whole.readout.weight)
    assert differences(head, expected, whole) == []


def test_older_names_and_pickles(whole, folder):
    """`medusa_head.` before the names, in the file that torch saves."""
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    named = {f"medusa_head.{name}": value for name, value in tensors.items()}
    torch.save(named, folder / "medusa_lm_head.pt")
    assert told(folder, whole) == told(folder, whole, "warn") == []
    found = Found.open(folder)
    assert differences(load(reader_of(found), found, whole), made(whole), whole) == []


def test_heads_beside_their_target(whole, folder):
    """A model that was trained with its heads holds both; only the heads are read."""

    def add(tensors):
        for name in list(tensors):
            tensors[f"medusa_head.{name}"] = tensors.pop(name)
        tensors["model.norm.weight"] = torch.ones(48)

    change(folder, add)
    assert told(folder, whole) == []
    assert told(folder, whole, "warn") == ["1 tensors of the target lie beside the heads"]
    found = Found.open(folder)
    assert differences(load(reader_of(found), found, whole), made(whole), whole) == []


def test_a_tensor_is_missing_misshapen_or_unknown(whole, tiny, folder):
    change(folder, lambda tensors: tensors.pop("1.0.linear.bias"))
    assert told(folder, whole) == ["missing 1.0.linear.bias"]
    assert any("expected (392, 48)" in text for text in told(folder, tiny))
    change(folder, lambda tensors: tensors.update({"surprise": torch.ones(1)}))
    assert "unknown surprise" in told(folder, whole)


@pytest.mark.parametrize(("said", "verdict"), [(4, "fail"), (2, "warn"), (3, "ok")])
def test_config_promises_other_heads(whole, folder, said, verdict):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"medusa_num_heads": said}))
    assert any("3 heads of 2 blocks" in text for text in told(folder, whole, verdict))


def test_without_a_config(whole, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    assert told(tmp_path / "bare", whole) == []


def test_repeated_blocks_are_told_of(whole):
    """Medusa's own code builds one block for a head and uses it for all."""
    launch = writer("medusa", "medusa").launch
    (two,) = launch(made(whole), Reference(whole, "some/target"))
    (one,) = launch(made(whole, layers=1), Reference(whole, "some/target"))
    assert "repeats one block" in two.note
    assert "repeats one block" not in one.note

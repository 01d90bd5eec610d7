"""What is told of a head's tensors names them as the file does, not as our modules are called."""

from __future__ import annotations

import pytest
import torch
from eagle_files import edit, export, failures, findings, head_of, read, target_of
from exporting import round_trip
from head_kinds import KINDS, create
from mtp_checkpoints import save_checkpoint

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.export import health
from spectrain.export.formats import reader_of
from spectrain.export.found import Found
from spectrain.export.layout import load

# How public files call what ours do not.
SPELLINGS = {
    "midlayer.": lambda n: n,
    "layers.0.": lambda n: n.replace("midlayer.", "layers.0."),
    "model.layers.0.": lambda n: "model." + n.replace("midlayer.", "layers.0."),
    "model.midlayer.": lambda n: n if n.startswith(("d2t", "t2d")) else f"model.{n}",
}


def renamed(folder, change):
    def apply(tensors):
        for name in list(tensors):
            tensors[change(name)] = tensors.pop(name)

    return edit(folder, apply)


@pytest.fixture
def written(tmp_path):
    target = target_of()
    head = head_of(target, draft_vocab_size=90)
    return export(head, target, "vllm", tmp_path / "out"), target


def every_name(found, head):
    reader = reader_of(found)
    return {reader.called(found, name) for name in head.state_dict()}


@pytest.mark.parametrize("place", SPELLINGS)
def test_a_tensor_is_named_as_in_the_file(written, place):
    folder, target = written
    renamed(folder, SPELLINGS[place])
    found = Found.open(folder)
    head = load(reader_of(found), found, target)
    assert every_name(found, head) == set(found.shapes)
    edit(folder, lambda t: t.update({f"{place}self_attn.q_proj.weight": torch.ones(1, 1)}))
    assert f"{place}self_attn.q_proj.weight has shape (1, 1)" in failures(folder, target)
    edit(folder, lambda t: t.pop(f"{place}hidden_norm.weight"))
    assert f"missing {place}hidden_norm.weight" in failures(folder, target)
    edit(folder, lambda t: t.update({f"{place}mlp.up_proj.weight": torch.ones(1, 1).long()}))
    assert f"{place}mlp.up_proj.weight is stored as I64" in failures(folder, target)


def test_a_further_layer_is_named_as_the_engine_does(tmp_path):
    target = target_of()
    head = head_of(target, draft_vocab_size=90, layers=2)
    folder = export(head, target, "sglang", tmp_path / "out")
    edit(folder, lambda t: t.update({"layers.1.hidden_norm.weight": torch.ones(3)}))
    assert "layers.1.hidden_norm.weight has shape (3,)" in failures(folder, target)


def test_numbers_that_are_none(written):
    folder, target = written
    renamed(folder, SPELLINGS["model.layers.0."])
    name = "model.layers.0.mlp.down_proj.weight"
    edit(folder, lambda t: t[name].fill_(float("nan")))
    with pytest.raises(SpectrainError, match=f"infinite numbers in {name}"):
        read(folder, target)


def test_a_suspect_names_what_is_to_be_mended(written):
    folder, target = written
    renamed(folder, SPELLINGS["model.layers.0."])
    found = Found.open(folder)
    fixes = " ".join(one.fix for one in reader_of(found).suspects(found, target))
    assert "3 column blocks of model.fc.weight" in fixes
    assert "model.layers.0.self_attn.q_proj.weight" in fixes


def test_what_the_built_head_shows(written):
    """A norm of zeros is seen in the module, and told of the tensor."""
    folder, target = written
    renamed(folder, SPELLINGS["model.layers.0."])
    name = "model.layers.0.post_attention_layernorm"
    edit(folder, lambda t: t[f"{name}.weight"].zero_())
    found = Found.open(folder)
    reader = reader_of(found)
    head = load(reader, found, target)
    seen = health.findings(head, target, lambda one: reader.called(found, one))
    (text,) = [one.text for one in seen if one.verdict == "fail" and one.check == "norms"]
    assert text.endswith(name)
    assert all(one.verdict != "fail" for one in findings(folder, target))


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        *(("eagle1-steps", format) for format in ("vllm", "sglang")),
        *((kind, "speculators") for kind in ("eagle3", "eagle3-two-layers")),
        *(("medusa", format) for format in ("medusa", "spectrain")),
        ("draft", "hf"),
    ],
)
def test_every_tensor_of_a_head_is_one_of_the_file(whole, tmp_path, kind, format):
    head = KINDS[kind](whole, 120 if kind.startswith("eagle3") else whole.readout.usable)
    again = round_trip(head, whole, format, tmp_path / "out")
    found = Found.open(tmp_path / "out")
    names = every_name(found, again) - {"d2t", "t2d"}
    assert names <= set(found.shapes)
    assert len(names) == len([n for n in again.state_dict() if n not in ("d2t", "t2d")])


@pytest.mark.parametrize(("format", "kind"), [("mtp-deepseek", "deepseek_v3"),
                                              ("mtp-mimo", "qwen2")])  # fmt: skip
def test_modules_beside_a_target(tmp_path, tokenizer, format, kind):
    save_checkpoint(tmp_path / "target", tokenizer, kind, count=0)
    target = Target.load(str(tmp_path / "target"), dtype="float32", pack_weights=False)
    head = create(target, "mtp-sequential", steps=2, shared=True, pass_on="after_norm")
    again = round_trip(head, target, format, tmp_path / "out")
    found = Found.open(tmp_path / "out")
    names = every_name(found, again) - {"d2t", "t2d"}
    assert {n for n in names if "experts" not in n} <= set(found.shapes)
    assert reader_of(found).called(found, "chain.0.norm") + ".weight" in found.shapes

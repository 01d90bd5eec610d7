"""MTP layers of a checkpoint are read: how many there are, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from mtp_checkpoints import native_head, save_checkpoint
from safetensors.torch import load_file, save_file

from spectrain.core.checkpoint import INDEX, SINGLE, Checkpoint
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads.mtp_native import Native


def test_a_single_layer_is_used_again_and_again(tmp_path, tokenizer):
    save_checkpoint(tmp_path / "model", tokenizer, "qwen2", count=1)
    target = Target.load(str(tmp_path / "model"), dtype="float32", pack_weights=False)
    one = native_head(target)
    assert (one.config.steps, one.config.shared, one.longest_draft) == (1, False, 1)
    three = native_head(target, steps=3)
    assert (three.config.steps, three.config.shared, three.longest_draft) == (3, True, 16)
    assert len(three.chain) == 1


def test_more_steps_than_layers_and_fewer(checkpoints):
    target, _, _ = checkpoints("qwen2")
    with pytest.raises(SpectrainError, match="has 2 MTP layers"):
        native_head(target, steps=3)
    with pytest.raises(SpectrainError, match="has 2 MTP layers"):
        native_head(target, steps=2, shared=True)
    assert len(native_head(target, steps=1).chain) == 1


def test_a_checkpoint_without_mtp_layers_is_refused(tiny):
    with pytest.raises(SpectrainError, match="no MTP layers"):
        native_head(tiny)


def change(folder, edit):
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.4.hnorm.weight"), "missing model.layers.4.hnorm.weight"),
        (
            lambda t: t.pop("model.layers.5.mlp.experts.3.up_proj.weight"),
            "missing model.layers.5.mlp.experts.3.up_proj.weight",
        ),
        (
            lambda t: t.update({"model.layers.4.enorm.weight": torch.ones(47)}),
            r"enorm.weight has shape \(47,\), expected \(48,\)",
        ),
        (
            lambda t: t.update({"model.layers.4.self_attn.surprise": torch.ones(2)}),
            "unknown model.layers.4.self_attn.surprise",
        ),
        (
            lambda t: t["model.layers.4.embed_tokens.weight"].add_(1),
            "embed_tokens.weight is not the target's own embedding",
        ),
        (
            lambda t: t["model.layers.5.shared_head.head.weight"].add_(1),
            "head.weight is not the target's own output",
        ),
        (
            lambda t: t.update(
                {"model.layers.4.enorm.weight": torch.ones(48).to(torch.float8_e4m3fn)}
            ),
            "stored as F8_E4M3",
        ),
    ],
    ids=["missing", "expert", "shape", "unknown", "embedding", "output", "float8"],
)
def test_damaged_layers_are_one_clear_line(checkpoints, tmp_path, edit, message):
    target, folder, _ = checkpoints("deepseek_v3")
    shutil.copytree(folder, tmp_path / "model")
    change(tmp_path / "model", edit)
    native = Native(tmp_path / "model", target.num_layers)
    head = native_head(target)
    with pytest.raises(SpectrainError, match=message) as caught:
        native.load(head.chain, target.readout)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "x.py"],
)
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(SpectrainError, match="not the name of a safetensors file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {"a": 3}}', "{"])
def test_an_index_that_is_none_is_refused(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(SpectrainError):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path, keep):
    save_file({"a": torch.ones(100), "b": torch.ones(3)}, tmp_path / SINGLE)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:keep])
    with pytest.raises(SpectrainError, match="not a whole safetensors file"):
        Checkpoint(tmp_path)

"""Targets that are a base model and a LoRA adapter."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from spectrain.core import adapter, attention, models
from spectrain.core.errors import SpectrainError
from spectrain.core.pretrained import library_model, text_side
from spectrain.core.target import Target


@pytest.fixture
def folder(tiny_path, tmp_path):
    """An adapter with random matrices, beside the tiny target, no tokenizer of its own."""
    return make(tiny_path, tmp_path / "adapter")


def make(base, folder, targets=None, seed=0):
    model = Target.load(str(base), pack_weights=False)
    adapted = adapter.add(model.model, model.decoder, rank=4, alpha=8, targets=targets)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in adapted.parameters():
            if value.requires_grad:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    folder.mkdir()
    adapter.save(adapted, folder, str(base))
    return folder


def test_all_linear_layers_of_the_decoder_and_nothing_else_are_trainable(tiny_path):
    target = Target.load(str(tiny_path), pack_weights=False)
    adapted = adapter.add(target.model, target.decoder, 4, 8, None)
    trainable = {name for name, value in adapted.named_parameters() if value.requires_grad}
    layers = {name.split("layers.")[1].split(".lora")[0] for name in trainable}
    parts = ["self_attn." + n for n in ("q_proj", "k_proj", "v_proj", "o_proj")]
    parts += ["mlp." + n for n in ("gate_proj", "up_proj", "down_proj")]
    assert layers == {f"{i}.{part}" for i in range(4) for part in parts}
    assert len(trainable) == 2 * len(layers)
    tokens = torch.randint(3, 380, (1, 9))
    plain = Target.load(str(tiny_path), pack_weights=False)
    assert torch.equal(target.forward(tokens).last, plain.forward(tokens).last)  # B starts at zero


def test_loaded_it_is_the_base_with_the_adapter_merged(folder, tiny, tiny_path):
    target = Target.load(str(folder), pack_weights=False)
    tokens = torch.randint(3, 380, (2, 9))
    stock = AutoModelForCausalLM.from_pretrained(tiny_path)
    expected = PeftModel.from_pretrained(stock, folder)(tokens).logits
    logits = target.logits(target.forward(tokens).last)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits, tiny.logits(tiny.forward(tokens).last), atol=0.1)
    assert target.name == str(folder)
    assert target.tokenizer.get_vocab() == tiny.tokenizer.get_vocab()
    assert not any("lora" in name for name, _ in target.model.named_parameters())
    assert not any(value.requires_grad for value in target.model.parameters())


def test_the_fingerprint_is_the_base_s_and_the_adapter_s(folder, tiny, tiny_path, tmp_path):
    """The same in every type of number, another with any other matrix or scale."""
    prints = {Target.load(str(folder), dtype=t).fingerprint for t in ("float32", "bfloat16")}
    assert len(prints) == 1
    assert prints != {tiny.fingerprint}
    prints.add(Target.load(str(make(tiny_path, tmp_path / "other", seed=1))).fingerprint)
    tensors = load_file(folder / adapter.WEIGHTS)
    first = next(iter(tensors))
    tensors[first].flatten()[-1] *= 1 + 1e-6
    save_file(tensors, folder / adapter.WEIGHTS)
    prints.add(Target.load(str(folder)).fingerprint)
    config = json.loads((folder / adapter.CONFIG).read_text())
    (folder / adapter.CONFIG).write_text(json.dumps(config | {"lora_alpha": 9}))
    prints.add(Target.load(str(folder)).fingerprint)
    assert len(prints) == 4


def test_the_text_side_is_that_of_the_loaded_target(folder, tiny_path, tokenizer, tmp_path):
    """Of a folder, of one without a generation config, of an adapter with and without a tokenizer
    of its own."""
    bare = shutil.copytree(tiny_path, tmp_path / "bare")
    (bare / "generation_config.json").unlink()
    own = shutil.copytree(folder, tmp_path / "own")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(own)
    for name in map(str, (tiny_path, bare, folder, own)):
        target, side = Target.load(name, pack_weights=False), text_side(name)
        assert (side.stop_ids, side.max_length) == (target.stop_ids, target.max_length)
        assert side.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    assert len(side.stop_ids) == 2


def test_an_embedded_base_and_an_adapter_on_an_adapter(folder, tmp_path, tiny_path, monkeypatch):
    expected = Target.load(str(folder)).fingerprint
    rename(folder, "smollm2-135m")
    real = models.resolve
    monkeypatch.setattr(
        models, "resolve", lambda name: str(tiny_path) if name == "smollm2-135m" else real(name)
    )
    Target.load(str(tiny_path)).tokenizer.save_pretrained(folder)
    target = Target.load(str(folder), pack_weights=False)
    assert target.fingerprint == expected
    # The library's own way, which would ask the hub for a model of that name.
    stock = library_model(str(folder), torch.float32, "cpu")
    tokens = torch.randint(3, 380, (1, 9))
    with torch.no_grad():
        logits = target.logits(target.forward(tokens).last)
        torch.testing.assert_close(stock(tokens).logits, logits, atol=1e-4, rtol=1e-4)
    assert stock.config._attn_implementation != attention.NAME
    twice = make(folder, tmp_path / "twice", targets=["q_proj"], seed=5)
    target = Target.load(str(twice))
    assert target.fingerprint not in (expected, Target.load(str(tiny_path)).fingerprint)


def rename(folder, base):
    config = json.loads((folder / adapter.CONFIG).read_text())
    (folder / adapter.CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": base}))


@pytest.mark.parametrize("base", ["no/such-model", "./gone", None])
def test_an_adapter_without_its_base_is_one_line(folder, base):
    rename(folder, base)
    with pytest.raises(SpectrainError) as caught:
        Target.load(str(folder))
    line = str(caught.value)
    assert line.startswith(f"{folder}: a LoRA adapter without its base model")
    assert f"base_model_name_or_path {base!r} not found" in line
    assert "give the base's folder, hub id or embedded name" in line
    assert "\n" not in line


def test_adapters_that_cannot_be_read_are_refused(folder):
    weights = folder / adapter.WEIGHTS
    whole = load_file(weights)
    save_file({name: whole[name] for name in list(whole)[1:]}, weights)
    with pytest.raises(SpectrainError, match="does not fit its base model"):
        Target.load(str(folder))
    weights.write_bytes(b"no tensors")
    with pytest.raises(SpectrainError, match="not a whole safetensors file"):
        Target.load(str(folder))
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(SpectrainError, match="weights are missing"):
        Target.load(str(folder))
    config = json.loads((folder / adapter.CONFIG).read_text())
    (folder / adapter.CONFIG).write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(SpectrainError, match="type 'IA3', only LORA"):
        Target.load(str(folder))


def test_unknown_layers_are_named(tiny_path):
    target = Target.load(str(tiny_path), pack_weights=False)
    with pytest.raises(SpectrainError, match=r"no linear layers named qproj.*down_proj"):
        adapter.add(target.model, target.decoder, 4, 8, ["qproj", "v_proj"])


def test_a_whole_model_beside_an_adapter_s_configuration_is_a_whole_model(folder, tiny_path):
    shutil.copy(tiny_path / "config.json", folder)
    assert not adapter.is_adapter(folder)

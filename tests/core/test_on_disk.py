"""A target whose layers stay on the disk is the whole one, a layer at a time."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections import Counter

import pytest
import torch
from head_kinds import KINDS
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, save_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core import adapter, on_disk
from spectrain.core.checkpoint import Checkpoint
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target

_DEEPSEEK = {
    **{"n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 16},
}
# Names as they are, tied or not; experts that are merged; names that change; learned positions.
TARGETS = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"num_hidden_layers": 12},
    "gemma2": {"final_logit_softcapping": 4.0},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": _DEEPSEEK,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer):
    """made(kind) → the folder of a target in several files, and the target loaded whole."""
    known = {}

    def make(kind):
        if kind not in known:
            folder = tmp_path_factory.mktemp("targets") / kind
            config = AutoConfig.for_model(kind, **SIZES | TARGETS[kind])
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="60KB")
            tokenizer.save_pretrained(folder)
            known[kind] = folder, Target.load(str(folder), pack_weights=False)
        return known[kind]

    return make


@pytest.fixture
def reads(monkeypatch):
    """How often each tensor of a checkpoint was read."""
    seen, real = Counter(), Checkpoint.read

    def read(self, name):
        seen[name] += 1
        return real(self, name)

    monkeypatch.setattr(Checkpoint, "read", read)
    return seen


def values(layer):
    return {name: value for name, value in layer.named_parameters() if not value.is_meta}


@pytest.mark.parametrize("kind", TARGETS)
def test_it_is_the_whole_one_to_the_last_bit(made, kind):
    folder, whole = made(kind)
    target = on_disk.load(str(folder))
    assert type(target) is on_disk.TargetOnDisk
    for name in ("fingerprint", "stop_ids", "dtype", "device", "num_layers", "vocab_size"):
        assert getattr(target, name) == getattr(whole, name), name
    assert target.config.to_dict() == whole.config.to_dict()
    tokens = torch.randint(0, 380, (2, 11), generator=torch.Generator().manual_seed(0))
    ours, theirs = (one.forward(tokens, aux_layers=(0, 1, 3)) for one in (target, whole))
    assert torch.equal(ours.last, theirs.last)
    assert torch.equal(ours.aux, theirs.aux)
    assert torch.equal(target.logits(ours.last), whole.logits(theirs.last))
    for index in (-1, 0, 2):
        layer, expected = target.layer(index), dict(whole.layer(index).named_parameters())
        assert values(layer).keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in values(layer).items())
        held = [one for one in target.decoder.layers if values(one)]
        assert held == [layer]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_another_type(made, dtype):
    folder, _ = made("gemma2")
    whole = Target.load(str(folder), dtype=dtype, pack_weights=False)
    target = on_disk.load(str(folder), dtype=dtype)
    assert (target.dtype, target.fingerprint) == (whole.dtype, whole.fingerprint)
    tokens = torch.arange(3, 12)[None]
    assert torch.equal(target.forward(tokens).last, whole.forward(tokens).last)


@pytest.mark.parametrize("kind", KINDS)
def test_new_heads_are_those_of_the_whole_target(tiny, tiny_path, monkeypatch, kind):
    """What `create` copies and asks of a target, whatever the family."""
    monkeypatch.setattr("head_kinds.wild", lambda head: head)
    target = on_disk.load(str(tiny_path))
    ours, theirs = (KINDS[kind](one, 120).state_dict() for one in (target, tiny))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_naming_it_reads_every_tensor_once(made, reads):
    folder, _ = made("mixtral")
    target = on_disk.load(str(folder))
    stored = Checkpoint(folder).entries
    assert reads == dict.fromkeys(stored, 1)
    reads.clear()
    target.layer(0)
    assert set(reads) == {name for name in stored if name.startswith("model.layers.0.")}


def test_memory_is_that_of_a_layer(tokenizer, tmp_path):
    """Of float32 all that is read is memory of Python's, which counts it."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 16}
    folder = save_tiny(tmp_path / "deep", tokenizer, **sizes)
    on_disk.load(str(folder))  # whatever is imported by it is there now
    tracemalloc.start()
    target = on_disk.load(str(folder))
    for _ in range(2):
        target.forward(torch.arange(3, 12)[None])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    layer = sum(value.nbytes for value in target.layer(0).parameters())
    table = target.readout.weight.nbytes
    assert table + layer < peak < table + 4 * layer


def test_what_cannot_be_read_so_is_loaded_whole(tiny, tiny_path, tmp_path):
    folder = tmp_path / "adapter"
    base = Target.load(str(tiny_path), pack_weights=False)
    adapted = adapter.add(base.model, base.decoder, 4, 8, None)
    folder.mkdir()
    adapter.save(adapted, folder, str(tiny_path))
    assert type(on_disk.load(str(folder))) is Target
    lacking = shutil.copytree(tiny_path, tmp_path / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    tensors.pop("model.layers.2.mlp.up_proj.weight")
    save_file(tensors, lacking / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpectrainError, match=r"there is no model\.layers\.2\.mlp\.up_proj\.weight"):
        on_disk.load(str(lacking))


def test_a_quantised_checkpoint_is_left_to_the_library(tiny_path, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_path, tmp_path / "quantised")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    asked = []
    monkeypatch.setattr(Target, "load", lambda name, **options: asked.append(name))
    on_disk.load(str(folder))
    assert asked == [str(folder)]

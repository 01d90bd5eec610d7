"""MTP formats: what is written beside a target is read back the same, under its authors' names."""

from __future__ import annotations

import copy
import json
import shlex
import shutil
from types import SimpleNamespace

import pytest
import torch
from head_kinds import create, wild
from mtp_checkpoints import SHAPES, H, native_head, save_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from spectrain.core.batch import Batch
from spectrain.core.checkpoint import INDEX, SINGLE
from spectrain.core.errors import SpectrainError
from spectrain.core.readout import Readout
from spectrain.core.target import Target
from spectrain.export.formats import reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import Reference, load
from spectrain.export.mtp_target import LAYERS, TARGET
from spectrain.export.parity import differences
from spectrain.export.write import write
from spectrain.heads.base import TargetFacts
from spectrain.heads.mtp_module import LayerKind
from spectrain.heads.mtp_sequential import MtpSequentialConfig, MtpSequentialHead

KINDS = {"mtp-deepseek": "deepseek_v3", "mtp-mimo": "qwen2", "mtp-qwen3next": "qwen3_next"}
READ = ("mtp-deepseek", "mtp-mimo")  # whose targets core.target loads


@pytest.fixture(scope="module")
def stocks(tmp_path_factory, tokenizer):
    """(kind, MTP layers, sharded) → a target's folder"""
    made = {}

    def stock(kind, count=0, sharded=False):
        key = kind, count, sharded
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind) / "model"
            save_checkpoint(made[key], tokenizer, kind, count=count, sharded=sharded)
        return made[key]

    return stock


def opened(folder):
    return Target.load(str(folder), dtype="float32", pack_weights=False)


def exported(head, target, format, folder, **how):
    made, reference = writer(format, head.family), Reference(target, target.name)
    assert made.refusals(head, reference) == []
    folder.mkdir()
    write(made.encode(head, reference), folder, **how)
    return made, Found.open(folder)


def read_again(head, target, format, folder, **how):
    made, found = exported(head, target, format, folder, **how)
    assert type(reader_of(found)) is type(made.reader)
    failed = [one for one in made.reader.findings(found, target) if one.verdict != "ok"]
    assert all(one.verdict == "note" for one in failed), failed
    return load(made.reader, found, target)


def sequential(target, steps=1, **options):
    return create(target, "mtp-sequential", steps=steps, pass_on="after_norm", **options)


def refusals(format, head, target, name=None):
    target = copy.copy(target)
    target.name = name or target.name
    reference = Reference(target, "as/others-call-it")  # where it lies here is what counts
    return " / ".join(writer(format, head.family).refusals(head, reference))


# ── round trips ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("files", ["copy", "link"])
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("format", READ)
def test_one_module_comes_back(stocks, tmp_path, format, sharded, files):
    target = opened(stocks(KINDS[format], sharded=sharded))
    head = sequential(target)
    again = read_again(head, target, format, tmp_path / "out", files=files)
    assert differences(head, again, target) == []
    # Engines go on with the only module, so a head that is read can, too.
    assert again.config.shared
    assert again.longest_draft > 1


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("format", READ)
def test_a_module_that_is_used_again_and_again(stocks, tmp_path, format, steps):
    target = opened(stocks(KINDS[format]))
    head = sequential(target, steps, shared=True)
    again = read_again(head, target, format, tmp_path / "out")
    assert again.config.steps == steps
    assert differences(head, again, target) == []


@pytest.mark.parametrize("format", ["spectrain", "mtp-transformers"])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2"])
def test_a_chain_of_modules(stocks, tmp_path, kind, steps, format):
    pytest.importorskip("transformers", minversion="5.20", reason="MtpModel came with 5.20")
    target = opened(stocks(kind))
    head = sequential(target, steps)
    assert differences(head, read_again(head, target, format, tmp_path / "out"), target) == []


def test_qwen3_next(stocks, tmp_path, tokenizer):
    """Its target has linear-attention layers, so the module is compared on made-up features."""
    folder = stocks("qwen3_next")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target = SimpleNamespace(
        name=str(folder),
        fingerprint="none",
        hidden_size=H,
        num_layers=model.config.num_hidden_layers,
        vocab_size=model.config.vocab_size,
        config=model.config,
        readout=Readout.of(model, model.config, tokenizer),
        device="cpu",
    )
    usable = target.readout.usable
    head = MtpSequentialHead(
        MtpSequentialConfig(
            **{"steps": 3, "shared": True, "native": None, "pass_on": "after_norm"},
            **{"loss": "ce", "lambda_first": 0.3, "lambda_then": 0.1, "lambda_switch": 0.67},
            vocab_size=target.vocab_size,
            draft_vocab_size=usable,
            layer=LayerKind.of(model.config),
            target=TargetFacts.of(target),
        )
    )
    wild(head.bind(target.readout))
    again = read_again(head, target, "mtp-qwen3next", tmp_path / "out")
    tokens = torch.randint(3, usable, (1, 12), generator=torch.Generator().manual_seed(5))
    batch = Batch(tokens, torch.ones_like(tokens), None, torch.randn(1, 12, H), tokens)
    pairs = zip(head.unroll(batch, 3), again.unroll(batch, 3), strict=True)
    for mine, theirs in pairs:
        assert torch.equal(mine.hidden, theirs.hidden)
    assert set(load_file(tmp_path / "out" / LAYERS)) == set(SHAPES["qwen3_next"](0))
    # A chain has no place there, and neither has a second layer.
    chain = head.config.model_copy(update={"shared": False})
    second = MtpSequentialHead(chain).bind(target.readout)
    assert "each for a step of its own" in refusals("mtp-qwen3next", second, target)


# ── what lies in the folder ──────────────────────────────────────────────────


@pytest.mark.parametrize("format", READ)
def test_names_are_those_of_the_authors(stocks, tmp_path, format):
    """And the target's own tensors are all there, byte for byte, under one index."""
    folder = stocks(KINDS[format])
    target = opened(folder)
    exported(sequential(target), target, format, tmp_path / "out")
    written = load_file(tmp_path / "out" / LAYERS)
    assert {n: tuple(t.shape) for n, t in written.items()} == SHAPES[KINDS[format]](0)
    assert (tmp_path / "out" / TARGET).read_bytes() == (folder / SINGLE).read_bytes()
    # A file of this name would be loaded without a look at the index.
    assert not (tmp_path / "out" / SINGLE).exists()
    places = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert places == dict.fromkeys(load_file(folder / SINGLE), TARGET) | dict.fromkeys(
        written, LAYERS
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    assert config["architectures"] == (
        ["MiMoForCausalLM"] if format == "mtp-mimo" else ["DeepseekV3ForCausalLM"]
    )
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert opened(tmp_path / "out").fingerprint == target.fingerprint


def test_names_for_transformers(whole, tmp_path):
    pytest.importorskip("transformers", minversion="5.20", reason="MtpModel came with 5.20")
    head = sequential(whole, 2)
    exported(head, whole, "mtp-transformers", tmp_path / "out")
    names = {"enorm", "hnorm", "eh_proj", "post_norm", "input_layernorm"}
    names |= {"post_attention_layernorm"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    names |= {f"self_attn.{x}_proj" for x in "qkvo"}
    expected = {f"mtp.layers.{k}.{name}.weight" for k in (0, 1) for name in names}
    assert set(load_file(tmp_path / "out" / LAYERS)) == expected
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_mtp_layers"] == 2


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_launch_lines(tiny, format, steps):
    """As many tokens as the head's steps; SGLang's count of those that are verified has the root in
    it. MiMo is for SGLang alone."""
    head = sequential(tiny, steps, shared=steps > 1)
    *others, sglang = writer(format, head.family).launch(head, Reference(tiny, "org/model"))
    for one in others:
        settings = json.loads(shlex.split(one.text)[-1])
        assert settings == {"method": "mtp", "num_speculative_tokens": steps}
    assert len(others) == (format != "mtp-mimo")
    words = shlex.split(sglang.text)
    assert dict(zip(words[3::2], words[4::2], strict=True)) == {
        "--model-path": "{folder}",
        "--speculative-algorithm": "NEXTN",
        "--speculative-draft-model-path": "{folder}",
        "--speculative-num-steps": str(steps),
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": str(steps + 1),
    }


# ── what cannot be said ──────────────────────────────────────────────────────


def test_refusals(stocks, tiny, tmp_path):
    target = opened(stocks("qwen2"))
    assert "layer of deepseek_v3" in refusals("mtp-deepseek", sequential(target), target)
    several = refusals("mtp-mimo", sequential(target, 2), target)
    assert "SGLang loads one only; train it with --set head.shared=true" in several
    assert refusals("mtp-mimo", sequential(target, 2, shared=True), target) == ""
    reduced = sequential(target, draft_vocab_size=120)
    before = create(target, "mtp-sequential", steps=2, shared=True, pass_on="before_norm")
    for format in ("mtp-mimo", "mtp-transformers"):
        assert "guesses 120 of 384" in refusals(format, reduced, target)
        assert "--set head.pass_on=after_norm" in refusals(format, before, target)
    shared = refusals("mtp-transformers", before, target)
    assert "one step with each module; train it with --set head.shared=false" in shared
    # With one step nothing is handed on.
    single = create(target, "mtp-sequential", steps=1, pass_on="before_norm")
    assert refusals("mtp-mimo", single, target) == ""
    with pytest.raises(SpectrainError, match="no place for a head of family mtp-parallel"):
        writer("mtp-mimo", "mtp-parallel")


def test_targets_that_nothing_can_be_put_beside(stocks, tmp_path):
    target = opened(stocks("qwen2"))
    head = sequential(target)
    (tmp_path / "empty").mkdir()
    config = json.loads((stocks("qwen2") / "config.json").read_text())
    (tmp_path / "empty" / "config.json").write_text(json.dumps(config))
    assert "cannot be extended" in refusals("mtp-mimo", head, target, str(tmp_path / "empty"))
    own = stocks("qwen2", count=1)
    assert "1 MTP layers already" in refusals("mtp-mimo", head, target, str(own))
    strange = tmp_path / "strange"
    strange.mkdir()
    tensors = load_file(stocks("qwen2") / SINGLE)
    save_file({n.replace(".mlp.", ".ffn."): t for n, t in tensors.items()}, strange / SINGLE)
    (strange / "config.json").write_text(json.dumps(config))
    assert "other tensors in layer 3" in refusals("mtp-mimo", head, target, str(strange))
    config["quantization_config"] = {"quant_method": "fp8"}
    (strange / "config.json").write_text(json.dumps(config))
    assert "quantised" in refusals("mtp-transformers", head, target, str(strange))


# ── checkpoints of others ────────────────────────────────────────────────────


@pytest.mark.parametrize("format", READ)
def test_a_public_checkpoint(stocks, format):
    """Read as an import what `head.native` reads as a part of the target."""
    folder = stocks(KINDS[format], count=1)
    target, found = opened(folder), Found.open(folder)
    if format == "mtp-deepseek":
        found = found.edited(config={"num_nextn_predict_layers": 1})
    reader = reader_of(found)
    assert reader.name == format
    verdicts = {one.verdict for one in reader.findings(found, target)}
    assert verdicts == ({"ok"} if format == "mtp-deepseek" else {"ok", "warn"})
    native = native_head(target, shared=True)
    assert differences(native, load(reader, found, target), target) == []


def broken(change, stocks, tokenizer, tmp_path, kind="deepseek_v3"):
    """Failed findings of a checkpoint with one MTP layer whose tensors went through `change`."""
    target = opened(stocks(kind, count=1))
    tensors = load_file(stocks(kind, count=1) / SINGLE)
    config = json.loads((stocks(kind, count=1) / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    change(tensors, config)
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = Found.open(tmp_path)
    failed = [one for one in reader_of(found).findings(found, target) if one.verdict == "fail"]
    with pytest.raises(SpectrainError):
        load(reader_of(found), found, target)
    return " / ".join(one.text for one in failed)


CHANGES = {
    "missing model.layers.4.hnorm.weight": lambda t, c: t.pop("model.layers.4.hnorm.weight"),
    "unknown model.layers.4.extra": lambda t, c: t.update({"model.layers.4.extra": torch.ones(1)}),
    "expected (48, 96)": lambda t, c: t.update(
        {"model.layers.4.eh_proj.weight": torch.ones(48, 48)}
    ),
    "stored as I64": lambda t, c: t.update(
        {"model.layers.4.enorm.weight": torch.ones(48, dtype=torch.int64)}
    ),
    "not the target's own embedding": lambda t, c: t["model.layers.4.embed_tokens.weight"].add_(1),
    "num_nextn_predict_layers = 3, there are 1": lambda t, c: c.update(num_nextn_predict_layers=3),
    "hidden_size is 64": lambda t, c: c.update(hidden_size=64),
    "positions turn otherwise": lambda t, c: c.update(
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    ),
}


@pytest.mark.parametrize("text", CHANGES)
def test_what_is_wrong_is_told(stocks, tokenizer, tmp_path, text):
    assert text in broken(CHANGES[text], stocks, tokenizer, tmp_path)


def test_swapped_halves_are_suspected(stocks, tmp_path):
    """The mended checkpoint drafts as the head did."""
    target = opened(stocks("qwen2"))
    head = sequential(target)
    _, found = exported(head, target, "mtp-mimo", tmp_path / "out")
    name = "model.mtp_layers.0.input_proj.weight"
    wrong = found.edited(tensors={name: found.read(name).roll(H, 1)})
    reader = reader_of(found)
    assert differences(head, load(reader, wrong, target), target) != []
    (suspect,) = reader.suspects(wrong, target)
    assert differences(head, load(reader, suspect.found, target), target) == []


def test_the_type_of_the_target_stays_its_own(stocks, tmp_path):
    """Layers in float32 beside a target in bfloat16: who reads torch_dtype means the target."""
    folder = tmp_path / "target"
    shutil.copytree(stocks("qwen2"), folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    target = opened(folder)
    head = sequential(target)
    made = writer("mtp-mimo", head.family)
    (tmp_path / "out").mkdir()
    write(made.encode(head, Reference(target, target.name)), tmp_path / "out", torch.float32)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


# ── what the config says of the layers ───────────────────────────────────────

COMPUTED = {
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-3,
    "num_experts_per_tok": 1,
    "routed_scaling_factor": 7.0,
    "norm_topk_prob": False,
    "attention_bias": True,
}


@pytest.mark.parametrize(
    "key", ["num_nextn_predict_layers", "torch_dtype", "eos_token_id", "transformers_version"]
)
def test_keys_that_no_layer_is_computed_by(stocks, key):
    folder = stocks("deepseek_v3", count=1)
    found = Found.open(folder).edited(config={"num_nextn_predict_layers": 1, key: 1})
    assert {one.verdict for one in reader_of(found).findings(found, opened(folder))} == {"ok"}


@pytest.mark.parametrize("key", COMPUTED)
def test_another_layer_than_the_target_s(stocks, key):
    """The engine makes the layer of this config, `generate` of the target's."""
    folder = stocks("deepseek_v3", count=1)
    target = opened(folder)
    found = Found.open(folder).edited(config={"num_nextn_predict_layers": 1, key: COMPUTED[key]})
    failed = [one for one in reader_of(found).findings(found, target) if one.verdict == "fail"]
    assert any(one.text.startswith(f"{key} is {COMPUTED[key]!r}, the target's") for one in failed)
    with pytest.raises(SpectrainError, match=key):
        load(reader_of(found), found, target)


def test_keys_that_the_target_lacks(stocks):
    """Nobody here knows what they are for."""
    folder = stocks("qwen2", count=1)
    found = Found.open(folder).edited(config={"num_nextn_predict_layers": 1, "layer_scale": 0.5})
    notes = [o.text for o in reader_of(found).findings(found, opened(folder)) if o.verdict != "ok"]
    assert notes == ["keys that the target's config lacks: layer_scale"]


def test_a_config_that_the_library_does_not_know(stocks):
    """Its keys are compared as they stand there."""
    folder = stocks("qwen2", count=1)
    changes = {"num_nextn_predict_layers": 1, "model_type": "no-such", "hidden_act": "gelu"}
    found = Found.open(folder).edited(config=changes)
    told = {o.check: o.verdict for o in reader_of(found).findings(found, opened(folder))}
    assert (told["rope"], told["config"]) == ("note", "fail")

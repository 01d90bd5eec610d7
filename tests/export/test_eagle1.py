"""EAGLE-1 and EAGLE-2 for the engines: what is written comes back the same, what cannot be said is
refused, and every known fault of such a file is a finding."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from eagle_files import (
    OTHERWISE,
    edit,
    export,
    failures,
    findings,
    head_of,
    mended,
    own_logits,
    read,
    refusals,
    target_of,
)
from eagle_reference import engine_logits
from tiny_models import gemma

from spectrain.core.errors import SpectrainError
from spectrain.export.eagle1 import Eagle1Reader
from spectrain.export.eagle3 import Eagle3Reader
from spectrain.export.formats import reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import Reference, load
from spectrain.export.parity import differences, drafted, prompts

FORMATS = ["eagle", "vllm", "sglang"]
NAMES = {
    "fc.weight",
    *(f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "layers.0.post_attention_layernorm.weight",
}


def same(head, folder, target):
    assert differences(head, read(folder, target), target) == []


# ── round trips ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", ["eagle1", "eagle2"])
@pytest.mark.parametrize("padded", [0, 8])
def test_round_trip(tmp_path, format, family, padded):
    """EAGLE-2 is EAGLE-1 with a tree, which has no place in these files. The tokens that a head
    can guess are all that there are, with or without padding rows behind them."""
    target = target_of(padded=padded)
    head = head_of(target, family)
    assert head.reduced is bool(padded)
    same(head, export(head, target, format, tmp_path / "out"), target)


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize("shape", [
    {"head_dim": 16}, {"num_key_value_heads": 4}, {"rope": "llama3"}, {"rope": "yarn"},
    {"rope": "linear"}, {"num_hidden_layers": 3},
])  # fmt: skip
def test_round_trip_of_every_shape(tmp_path, format, shape):
    target = target_of(**shape)
    head = head_of(target, "eagle1")
    same(head, export(head, target, format, tmp_path / "out"), target)


@pytest.mark.parametrize("format", ["eagle", "sglang"])
def test_round_trip_of_a_bias(tmp_path, format):
    target = target_of()
    head = head_of(target, "eagle1", fc_bias=True)
    same(head, export(head, target, format, tmp_path / "out"), target)


def test_a_bias_of_zeros_is_none(tmp_path):
    """It computes what no bias computes: SafeAILab's config promises it and it is kept, elsewhere
    it goes; the drafts are the same ones."""
    target = target_of()
    head = head_of(target, "eagle1", fc_bias=True)
    head.fc.bias.data.zero_()
    for format in FORMATS:
        again = read(export(head, target, format, tmp_path / format), target)
        assert (again.fc.bias is not None) is (format == "eagle")
        told = prompts(head, target)
        both = (drafted(one, *told, steps=4) for one in (head, again))
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("format", "bias"),
    [("sglang", False), ("sglang", True), ("vllm", False), ("eagle", False), ("eagle", True)],
)
def test_an_engine_computes_the_same(tmp_path, format, bias):
    """A file read as the engine reads it, over the library's last state: the halves of fc, the
    missing norm and the bias mean there what they mean here."""
    shape = {} if format == "eagle" else {"rope": "llama3", "head_dim": 16}
    target = target_of(padded=0, **shape)
    head = head_of(target, "eagle1", fc_bias=bias)
    folder = export(head, target, format, tmp_path / "out")
    tokens = torch.randint(0, 380, (9,), generator=torch.Generator().manual_seed(1))
    reference = engine_logits(folder, target.model, tokens, None, 3)
    for one, other in zip(own_logits(head, target, tokens, 3), reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# ── what each engine gets ────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("format", "architecture", "bias"),
    [
        ("eagle", "LlamaForCausalLM", False),
        ("vllm", "EagleLlamaForCausalLM", False),
        ("sglang", "LlamaForCausalLMEagle", True),
    ],
)
def test_names(tmp_path, format, architecture, bias):
    """vLLM stops at a bias, SGLang makes one and leaves it at random where the file has none."""
    target = target_of()
    head = head_of(target, "eagle1")
    found = Found.open(export(head, target, format, tmp_path / "out"))
    assert found.shapes.keys() == NAMES | ({"fc.bias"} if bias else set())
    if bias:
        assert not found.read("fc.bias").any()
    config = found.config
    assert config["architectures"] == [architecture]
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 1
    # SafeAILab's default is a bias; SGLang would give q, k, v and o one.
    assert config.get("bias") is (False if format == "eagle" else None)
    assert "draft_vocab_size" not in config
    assert Eagle1Reader().recognises(found)
    assert not Eagle3Reader().recognises(found)


# ── refusals ─────────────────────────────────────────────────────────────────


def test_refusals():
    target = target_of()
    few = head_of(target, "eagle1", draft_vocab_size=90)
    biased = head_of(target, "eagle1", fc_bias=True)
    for format in FORMATS:
        assert "draft vocabulary of 90 tokens has no place" in refusals(few, target, format)
        assert ("no bias" in refusals(biased, target, format)) is (format == "vllm")
    odd = target_of(rope="yarn", head_dim=16)
    text = refusals(head_of(odd, "eagle1"), odd, "eagle")
    assert "knows no head_dim" in text
    assert "yarn" in text
    with pytest.raises(SpectrainError, match="no place for a head of family eagle1"):
        writer("trtllm", "eagle1")


def test_a_target_that_lends_more_than_tables(tmp_path, tokenizer):
    """Gemma scales its embedding and caps its logits: heads of engines get neither."""
    target = gemma(tmp_path / "gemma", tokenizer)
    head = head_of(target, "eagle1")
    for format in FORMATS:
        text = refusals(head, target, format)
        assert "scales its embedding" in text
        assert "caps its logits" in text
    folder = export(head_of(target_of(), "eagle1"), target_of(), "vllm", tmp_path / "out")
    assert "scales its embedding" in failures(folder, target)


# ── public files ─────────────────────────────────────────────────────────────


@pytest.fixture
def written(tmp_path):
    target = target_of()
    head = head_of(target, "eagle1", fc_bias=True)
    return head, export(head, target, "sglang", tmp_path / "out"), target


def test_a_public_file(written):
    """As SafeAILab published them: with the target's embedding, a buffer of positions, old keys of
    transformers 4 and no word on the bias; here with a prefix as well."""
    head, folder, target = written

    def change(tensors):
        tensors["embed_tokens.weight"] = target.readout.embedding.weight.detach().bfloat16()
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = head.rotary._table.inv_freq
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)

    edit(folder, change, drop=("rope_parameters", "head_dim", "attention_bias", "mlp_bias"))
    same(head, folder, target)
    texts = {one.check: one.text for one in findings(folder, target)}
    assert texts["embedding"] == "in the file, equal to the target's"


def put(name, make):
    return lambda tensors: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize(("change", "config", "says"), [
    (lambda t: t.update({"embed_tokens.weight": torch.ones(392, 48)}), {}, "not the target's"),
    (lambda t: t.update({"embed_tokens.weight": torch.ones(9, 48)}), {}, "embed_tokens.weight has"),
    (lambda t: t.pop("layers.0.mlp.up_proj.weight"), {}, "missing layers.0.mlp.up_proj"),
    (lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(48)}), {}, "unknown"),
    (lambda t: t.pop("fc.bias"), {"bias": True}, "missing fc.bias"),
    (put("fc.weight", lambda m: m[:, :48]), {}, "fc.weight has shape"),
    (put("fc.weight", lambda m: m.double()), {}, "fc.weight is stored as F64"),
    (None, {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    *((None, {key: value}, f"{key} is ") for key, value in OTHERWISE.items()),
    (None, {"layer_types": ["sliding_attention"]}, "attend to the whole text"),
    (None, {"layer_types": "full_attention"}, "attend to the whole text"),
    (None, {"rope_theta": 0, "rope_parameters": None}, "with a base of 0"),
    (None, {"rope_theta": -5.0, "rope_parameters": None}, "with a base of -5.0"),
    (None, {"hot_vocab_size": 90}, "hot_vocab_size is 90"),
    (None, {"hidden_size": 64}, "the target (48, 392)"),
    (None, {"vocab_size": 7}, "the target (48, 392)"),
    (None, {"intermediate_size": 0}, "intermediate_size is 0"),
    (None, {"rope_theta": 500.0}, "say different things"),
    (None, {"rope_parameters": {"rope_type": "none"}, "rope_theta": None}, "cannot be made"),
])  # fmt: skip
def test_a_fault_is_found(written, change, config, says):
    """Each is refused in one line, before the head is made."""
    _, folder, target = written
    edit(folder, change, config)
    assert says in failures(folder, target)
    with pytest.raises(SpectrainError):
        read(folder, target)


@pytest.mark.parametrize(("format", "bias", "change", "config", "says"), [
    ("eagle", True, None, {"bias": False}, "SafeAILab's code then has no place for it"),
    ("eagle", True, None, {}, ""),
    ("eagle", True, put("fc.bias", torch.zeros_like), {"bias": False}, ""),
    ("eagle", False, None, None, "SafeAILab's code then expects one"),
    ("eagle", False, None, {}, ""),
    ("sglang", False, lambda t: t.pop("fc.bias"), {}, "SGLang always does"),
    ("sglang", True, None, {}, ""),
    ("vllm", False, None, {}, ""),
])  # fmt: skip
def test_a_bias_that_engines_read_differently(tmp_path, format, bias, change, config, says):
    """Which has it and which has not is said once, and the file is read as it is."""
    target = target_of()
    head = head_of(target, "eagle1", fc_bias=bias)
    drop = ("bias",) if config is None else ()
    folder = edit(export(head, target, format, tmp_path / "out"), change, config, drop)
    warned = [one.text for one in findings(folder, target) if one.verdict == "warn"]
    assert len(warned) == bool(says)
    assert says in "".join(warned)
    assert (read(folder, target).fc.bias is not None) is (bias and change is None)


def test_a_doubt_is_a_warning(written):
    """Other positions than the target's may be meant: they are said, and read."""
    _, folder, target = written
    edit(folder, None, {"rope_theta": 500.0}, drop=("rope_parameters",))
    (warned,) = [one for one in findings(folder, target) if one.verdict == "warn"]
    assert warned.text.startswith("default, base 500: not the rotary positions of the target (")
    assert read(folder, target).config.rope_parameters["rope_theta"] == 500.0


@pytest.mark.parametrize("config", [
    {"sliding_window": 64}, {"max_position_embeddings": 256}, {"rms_norm_eps": 1e-3},
])  # fmt: skip
def test_another_reach_or_eps_is_a_warning(written, config):
    _, folder, target = written
    edit(folder, None, config)
    assert [one.check for one in findings(folder, target) if one.verdict == "warn"] == ["config"]


@pytest.mark.parametrize(("change", "config", "name"), [
    (put("fc.weight", lambda m: torch.cat(m.chunk(2, 1)[::-1], 1)), {}, "fc reads"),
    (None, {"rope_theta": 500.0, "rope_parameters": None}, "rotary"),
])  # fmt: skip
def test_a_suspect_mends_what_it_names(written, change, config, name):
    head, folder, target = written
    edit(folder, change, config)
    again = mended(Eagle1Reader(), folder, target, name)
    assert differences(head, again, target) == []


# ── launching ────────────────────────────────────────────────────────────────


def test_launch_lines():
    """EAGLE-2's tree goes into SGLang's flags, which count the root; vLLM is told of none."""
    target = target_of()
    head = head_of(target, "eagle2", tree={"top_k": 8, "depth": 5, "nodes": 30})
    lines = {
        format: writer(format, "eagle2").launch(head, Reference(target, "tiny"))[0]
        for format in FORMATS
    }
    settings = json.loads(shlex.split(lines["vllm"].text)[-1])
    assert settings == {"method": "eagle", "model": "{folder}", "num_speculative_tokens": 3}
    assert "tree has no place" in lines["vllm"].note
    words = shlex.split(lines["sglang"].text)
    assert words[words.index("--speculative-algorithm") + 1] == "EAGLE"
    assert words[-8:] == [
        "--speculative-num-steps", "5", "--speculative-eagle-topk", "8",
        "--speculative-num-draft-tokens", "31", "--dtype", "bfloat16",
    ]  # fmt: skip
    assert "use_eagle3=False" in lines["eagle"].text
    assert "total_token=31" in lines["eagle"].text
    assert "depth=4," in lines["eagle"].text  # without the first level
    compile(lines["eagle"].text, "launch", "exec")
    single = head_of(target, "eagle1", steps=1)
    (launch,) = writer("vllm", "eagle1").launch(single, Reference(target, "tiny"))
    assert json.loads(shlex.split(launch.text)[-1])["num_speculative_tokens"] == 3


def test_own_heads_are_read_by_the_own_reader(tmp_path):
    """The same names of tensors: the config decides."""
    target = target_of()
    head = head_of(target, "eagle1")
    found = Found.open(export(head, target, "spectrain", tmp_path / "out"))
    assert not Eagle1Reader().recognises(found)
    assert differences(head, load(reader_of(found), found, target), target) == []

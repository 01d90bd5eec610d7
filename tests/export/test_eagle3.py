"""EAGLE-3 for the engines: what is written comes back the same, what cannot be said is refused.

D draft vocabulary, V the target's.
"""

from __future__ import annotations

import json
import re
import shlex

import pytest
import torch
import yaml
from eagle_files import (
    ROPES,
    export,
    head_of,
    own_logits,
    read,
    refusals,
    same,
    target_of,
)
from eagle_reference import engine_logits
from head_kinds import create
from transformers import AutoConfig

from spectrain.export import aux_layers, rope
from spectrain.export.eagle3 import Eagle3Reader
from spectrain.export.formats import reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import Reference, load
from spectrain.export.parity import differences
from spectrain.export.write import write

FORMATS = ["eagle", "vllm", "sglang", "trtllm"]
LAYER = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm",
}  # fmt: skip
FIRST = LAYER | {"input_layernorm", "hidden_norm"}
BESIDE = {"fc.weight", "norm.weight", "lm_head.weight"}


# ── round trips ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("whole", [False, True], ids=["D<V", "D=V"])
def test_round_trip(tmp_path, format, whole):
    """Every engine's files are of one layout and read by one reader."""
    target = target_of(padded=0 if whole else 8)
    head = head_of(target, draft_vocab_size=None if whole else 120)
    assert head.reduced is not whole
    same(head, export(head, target, format, tmp_path / "out"), target)


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize("rope_kind", ROPES)
def test_round_trip_of_every_rope(tmp_path, format, rope_kind):
    """The positions turn at the same frequencies, or drafts at far positions would differ."""
    target = target_of(rope=rope_kind)
    head = head_of(target, draft_vocab_size=120)
    folder = export(head, target, format, tmp_path / "out")
    same(head, folder, target)
    config = json.loads((folder / "config.json").read_text())
    spelled = [rope.effective(one, 12, 512) for one in rope.spellings(config)]
    assert len(spelled) == 2
    expected = rope.effective(head.config.rope_parameters, 12, 512)
    assert all(torch.equal(expected, one) for one in spelled)
    # The library that engines read configs with takes old keys over new ones.
    library = AutoConfig.from_pretrained(folder).rope_parameters
    assert torch.equal(expected, rope.effective(library, 12, 512))


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize("shape", [
    {"head_dim": 16}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1, "head_dim": 8},
])  # fmt: skip
def test_round_trip_of_every_shape(tmp_path, format, shape):
    target = target_of(**shape)
    head = head_of(target, draft_vocab_size=90)
    same(head, export(head, target, format, tmp_path / "out"), target)


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize("layers", [(0, 2, 6), (1, 5), (0, 1, 2, 3, 4), (1, 3, 4)])
def test_round_trip_of_every_choice_of_layers(tmp_path, format, layers):
    target = target_of()
    head = head_of(target, draft_vocab_size=90, aux_layers=layers)
    same(head, export(head, target, format, tmp_path / "out"), target)


@pytest.mark.parametrize("format", FORMATS[1:])
def test_round_trip_of_several_layers(tmp_path, format):
    target = target_of()
    head = head_of(target, draft_vocab_size=90, layers=3)
    same(head, export(head, target, format, tmp_path / "out"), target)


@pytest.mark.parametrize("format", ["eagle", "vllm"])
def test_round_trip_of_own_embeddings(tmp_path, format):
    target = target_of()
    head = head_of(target, draft_vocab_size=90, embeddings="own")
    same(head, export(head, target, format, tmp_path / "out"), target)


@pytest.mark.parametrize("format", ["eagle", "vllm"])
def test_an_untrained_embedding_of_its_own_stays_its_own(tmp_path, format):
    """It is equal to the target's and still a tensor that training may go on with."""
    target = target_of()
    head = create(target, "eagle3", random=False, draft_vocab_size=90, embeddings="own")
    same(head, export(head, target, format, tmp_path / "out"), target)


def test_linear_positions_for_safeai(tmp_path):
    """Its config takes two keys and no more; its layer knows the base 10000 alone."""
    target = target_of(rope="linear")
    head = head_of(target, draft_vocab_size=90)
    folder = export(head, target, "eagle", tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_scaling"] == {"type": "linear", "factor": 2.0}
    same(head, folder, target)


def test_another_type_is_named(tmp_path):
    """Rounding is all that a smaller type changes, and the config says which it is."""
    target = target_of()
    head = head_of(target, draft_vocab_size=90)
    encoded = writer("vllm", "eagle3").encode(head, Reference(target, "tiny"))
    (folder := tmp_path / "out").mkdir()
    write(encoded, folder, torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again = read(folder, target)
    assert torch.equal(again.fc.weight, head.fc.weight.bfloat16().float())
    assert torch.equal(again.d2t, head.d2t)


def read_inputs(format, config, launch):
    """The layers, of 8, whose inputs the engine reads. Where nothing is said they are 2, N/2 and
    N-3; vLLM's ids are these numbers, those of SGLang and TensorRT-LLM name the layer before;
    TensorRT-LLM looks into its own settings alone, SafeAILab's code nowhere."""
    if format == "vllm":
        return config.get(aux_layers.KEY, [2, 4, 5])
    outputs = [1, 3, 4]
    if format == "sglang":
        outputs = config.get("eagle_config", {}).get(aux_layers.KEY, outputs)
    if format == "trtllm" and (said := re.search(r"eagle3_layers_to_capture: (\[.*\])", launch)):
        outputs = json.loads(said[1])
    return [i + 1 for i in outputs]


@pytest.mark.parametrize(("format", "options"), [
    *((format, options) for format in ("vllm", "sglang", "trtllm") for options in (
        {}, {"aux_layers": (0, 2, 6)}, {"aux_layers": (1, 5)}, {"layers": 2})),
    ("vllm", {"embeddings": "own"}), ("vllm", {"aux_layers": (4,)}),
    ("eagle", {}), ("eagle", {"embeddings": "own"}),
])  # fmt: skip
def test_an_engine_computes_the_same(tmp_path, format, options):
    """A file read as the engine reads it, over the states that the library calls the inputs of
    layers: halves, norms, residuals and layer ids mean there what they mean here."""
    # SafeAILab's layer knows plain positions, and heads that fill the hidden size.
    target = target_of() if format == "eagle" else target_of(rope="llama3", head_dim=16)
    head = head_of(target, draft_vocab_size=90, **options)
    folder = export(head, target, format, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    (launch,) = writer(format, "eagle3").launch(head, Reference(target, "tiny"))
    inputs = read_inputs(format, config, launch.text)
    further = "input_layernorm" if format == "vllm" else "hidden_norm"
    tokens = torch.randint(0, 380, (9,), generator=torch.Generator().manual_seed(1))
    reference = engine_logits(folder, target.model, tokens, inputs, 3, further)
    for one, other in zip(own_logits(head, target, tokens, 3), reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# ── what each engine gets ────────────────────────────────────────────────────


@pytest.mark.parametrize("format", FORMATS)
def test_names(tmp_path, format):
    """The names that the loaders map; vLLM stops at any other, SGLang passes over it in silence."""
    target = target_of()
    head = head_of(target, draft_vocab_size=90)
    found = Found.open(export(head, target, format, tmp_path / "out"))
    expected = {f"midlayer.{name}.weight" for name in FIRST} | BESIDE | {"d2t", "t2d"}
    assert found.shapes.keys() == expected
    assert found.dtypes["d2t"] == "I64"
    assert found.dtypes["t2d"] == "BOOL"
    config = found.config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 1
    assert (config["draft_vocab_size"], config["vocab_size"]) == (90, target.vocab_size)
    assert config["tie_word_embeddings"] is False
    assert config["torch_dtype"] == "float32"
    assert "bias" not in config  # SGLang would give q, k, v and o one
    assert config.get("norm_before_residual") is (False if format == "vllm" else None)
    # All engines read these layers of 8 when nothing is said, and number them differently.
    assert not {aux_layers.KEY, aux_layers.NESTED, aux_layers.COUNT} & config.keys()


def test_no_maps_without_a_reduced_vocabulary(tmp_path):
    target = target_of(padded=0)
    head = head_of(target)
    for format in FORMATS:
        found = Found.open(export(head, target, format, tmp_path / format))
        assert not {"d2t", "t2d"} & found.shapes.keys()
        assert found.config["draft_vocab_size"] == target.vocab_size


def test_layer_ids_of_each_engine(tmp_path):
    """vLLM counts the inputs of layers, the others their outputs."""
    target = target_of()
    head = head_of(target, draft_vocab_size=90, aux_layers=(0, 5))
    configs = {
        format: Found.open(export(head, target, format, tmp_path / format)).config
        for format in FORMATS[1:]
    }
    key, nested, count = aux_layers.KEY, aux_layers.NESTED, aux_layers.COUNT
    assert configs["vllm"][key] == [1, 6]
    assert nested not in configs["vllm"]
    assert configs["sglang"][nested] == {"use_aux_hidden_state": True, key: [0, 5]}
    assert key not in configs["sglang"]
    assert configs["vllm"][count] == configs["sglang"][count] == 2
    (launch,) = writer("trtllm", "eagle3").launch(head, Reference(target, "tiny"))
    assert "eagle3_layers_to_capture: [0, 5]" in launch.text


@pytest.mark.parametrize(("depth", "expected"), [(8, (1, 3, 4)), (32, (1, 15, 28)), (4, (0, 1))])
def test_default_layers_of_the_engines(depth, expected):
    """Inputs of 2, N/2 and N-3, each once: of a shallow target they are not three."""
    assert aux_layers.engines_take(depth) == expected
    assert aux_layers.is_default(expected, depth) is (len(expected) == 3)


@pytest.mark.parametrize(
    ("format", "norm"),
    [("vllm", "input_layernorm"), ("sglang", "hidden_norm"), ("trtllm", "hidden_norm")],
)
def test_names_of_further_layers(tmp_path, format, norm):
    """The same norm under the name of each engine; the first layer by its number."""
    target = target_of()
    head = head_of(target, draft_vocab_size=90, layers=2)
    found = Found.open(export(head, target, format, tmp_path / "out"))
    assert found.shapes.keys() == {
        *(f"layers.0.{name}.weight" for name in FIRST),
        *(f"layers.1.{name}.weight" for name in LAYER | {norm}),
        *BESIDE,
        "d2t",
        "t2d",
    }
    assert found.config["num_hidden_layers"] == 2


# ── refusals ─────────────────────────────────────────────────────────────────


def test_refusals():
    target = target_of()
    two = head_of(target, draft_vocab_size=90, layers=2)
    assert "one decoder layer, this one 2" in refusals(two, target, "eagle")
    other = head_of(target, draft_vocab_size=90, aux_layers=(0, 2, 4))
    assert "reads the outputs of [1, 3, 4]" in refusals(other, target, "eagle")
    own = head_of(target, draft_vocab_size=90, embeddings="own")
    for format in ("sglang", "trtllm"):
        assert "puts the target's embedding in the place" in refusals(own, target, format)
    last = head_of(target, draft_vocab_size=90, aux_layers=(1, 3, 7))
    assert "last layer" in refusals(last, target, "sglang")
    assert refusals(last, target, "vllm") == refusals(last, target, "trtllm") == ""
    single = head_of(target, draft_vocab_size=90, aux_layers=(3,))
    for format in ("sglang", "trtllm"):
        assert "skips fc" in refusals(single, target, format)
    assert refusals(single, target, "vllm") == ""


@pytest.mark.parametrize(
    ("format", "chosen"),
    [
        ("eagle", {"layers": 2}),
        ("eagle", {"layers": 2, "aux_layers": (0, 2, 4)}),
        ("sglang", {"embeddings": "own"}),
        ("trtllm", {"embeddings": "own"}),
    ],
)
def test_a_head_that_is_trained_as_a_refusal_says_is_not_refused(format, chosen):
    target = target_of()
    text = refusals(head_of(target, draft_vocab_size=90, **chosen), target, format)
    advice = re.findall(r"train it with --set head\.(\w+)=([\w\[\],]+)", text)
    assert {name for name, _ in advice} == set(chosen)
    changed = {name: yaml.safe_load(value) for name, value in advice}
    assert refusals(head_of(target, draft_vocab_size=90, **chosen | changed), target, format) == ""


@pytest.mark.parametrize(("kind", "layers", "refused"), [
    *((kind, (0, 2, 6), "takes layer ids for inputs") for kind in (
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite")),
    ("deepseek_v3", (1, 2, 6), ""),  # after a first 1 the ids are outputs there as well
    ("deepseek_v3", (1, 3, 4), ""),
    ("minimax_m3_vl_text", (1, 3, 4), "one too late"),
    ("minimax_m3_vl_text", (0, 2, 6), ""),
    ("llama", (0, 2, 6), ""),
])  # fmt: skip
def test_targets_whose_layers_sglang_numbers_otherwise(monkeypatch, kind, layers, refused):
    """An id that is read one off costs all acceptance and raises nothing."""
    target = target_of()
    head = head_of(target, draft_vocab_size=90, aux_layers=layers)
    monkeypatch.setattr(target.config, "model_type", kind)
    said = refusals(head, target, "sglang")
    assert refused in said if refused else said == ""
    assert refusals(head, target, "vllm") == ""


def test_safeai_refuses_what_its_layer_does_not_know():
    target = target_of(rope="llama3", head_dim=16)
    text = refusals(head_of(target, draft_vocab_size=90), target, "eagle")
    assert "knows no head_dim" in text
    assert "llama3" in text


# ── launching ────────────────────────────────────────────────────────────────


def test_launch_lines():
    """Flags as vLLM 0.33 and SGLang 0.5.23 name them; the JSON can be read after the shell."""
    target = target_of()
    head = head_of(target, draft_vocab_size=90, steps=5)
    lines = {
        format: writer(format, "eagle3").launch(head, Reference(target, "org/my model"))[0]
        for format in FORMATS
    }
    words = shlex.split(lines["vllm"].text)
    assert words[:4] == ["vllm", "serve", "org/my model", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "eagle3", "model": "{folder}", "num_speculative_tokens": 5,
    }  # fmt: skip
    words = shlex.split(lines["sglang"].text)
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags == {
        "--model-path": "org/my model",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "{folder}",
        "--speculative-num-steps": "5",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "6",
        "--dtype": "bfloat16",
    }
    assert "--dtype is that of target and head alike" in lines["sglang"].note
    assert "decoding_type: Eagle3" in lines["trtllm"].text
    assert "eagle3_layers_to_capture" not in lines["trtllm"].text
    compile(lines["eagle"].text, "launch", "exec")


@pytest.mark.parametrize(
    ("stored", "loaded", "told"),
    [
        (torch.float16, torch.float32, "float16"),
        (torch.bfloat16, torch.float32, "bfloat16"),
        (torch.float32, torch.float32, "bfloat16"),
        (None, torch.float32, "bfloat16"),
        (None, torch.float16, "float16"),
    ],
)
def test_the_type_that_sglang_is_told(monkeypatch, stored, loaded, told):
    """That of the target's own config, not what a CPU loads it as; no engine is told float32."""
    target = target_of()
    head = head_of(target, draft_vocab_size=90)
    monkeypatch.setattr(target, "dtype", loaded)
    (launch,) = writer("sglang", "eagle3").launch(head, Reference(target, "tiny", stored))
    assert launch.text.endswith(f"--dtype {told}")
    assert ("rounded to bfloat16" in launch.note) is (stored == torch.float32)


@pytest.mark.parametrize("format", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize(("steps", "said"), [(1, True), (2, True), (3, False)])
def test_a_chain_longer_than_the_head_was_trained_for_is_said(format, steps, said):
    target = target_of()
    head = head_of(target, draft_vocab_size=90, steps=steps)
    (launch,) = writer(format, "eagle3").launch(head, Reference(target, "tiny"))
    assert (f"chain of 3 tokens; the head was trained for {steps}" in launch.note) is said


def test_own_heads_are_read_by_the_own_reader(tmp_path):
    """The same names of tensors: the config decides."""
    target = target_of()
    head = head_of(target, draft_vocab_size=90)
    found = Found.open(export(head, target, "spectrain", tmp_path / "out"))
    assert not Eagle3Reader().recognises(found)
    assert differences(head, load(reader_of(found), found, target), target) == []

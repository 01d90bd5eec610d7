"""The layout of the speculators package: what is written, what is read back, what is told apart.

Whether that package runs what is written, and we what it writes: tests/interop.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eagle_files import OTHERWISE
from exporting import round_trip
from head_kinds import KINDS, create
from tiny_models import gemma, save_tiny

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.export import rope
from spectrain.export.formats import reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import Reference, load
from spectrain.export.parity import differences
from spectrain.export.write import write

IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = "transformer_layer_config"
ROPE = {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}


@pytest.fixture
def found(tiny, tmp_path):
    """An export of a head of 120 tokens, as found."""
    return exported(KINDS["eagle3"](tiny, 120), tiny, tmp_path / "out")


def exported(head, target, folder):
    folder.mkdir()
    write(writer("speculators", "eagle3").encode(head, Reference(target, "some/target")), folder)
    return Found.open(folder)


def told(found, target, verdict="fail"):
    every = list(reader_of(found).findings(found, target))
    assert all(one.fix for one in every if one.verdict in ("warn", "fail"))
    return [f"{one.check}: {one.text}" for one in every if one.verdict == verdict]


def with_layer(found, **changes):
    return found.edited(config={LAYER: {**found.config[LAYER], **changes}})


# ── there and back ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["eagle3", "eagle3-two-layers", "eagle3-own-embeddings"])
def test_heads_come_back_the_same(tiny, tmp_path, name):
    head = KINDS[name](tiny, 120)
    again = round_trip(head, tiny, "speculators", tmp_path / "out")
    assert differences(head, again, tiny) == []
    assert again.config.steps == head.config.steps
    assert again.config.aux_layers == head.config.aux_layers
    assert again.config.embeddings == head.config.embeddings


def test_every_token_other_rotary_positions(tmp_path, tokenizer, whole):
    """Without a draft vocabulary there are no maps, and scaled positions keep their scale."""
    head = create(whole, "eagle3", steps=3, draft_vocab_size=whole.vocab_size)
    assert differences(head, round_trip(head, whole, "speculators", tmp_path / "a"), whole) == []
    assert not {"d2t", "t2d"} & Found.open(tmp_path / "a").shapes.keys()

    folder = save_tiny(tmp_path / "target", tokenizer, rope_parameters=ROPE)
    target = Target.load(str(folder), pack_weights=False)
    head = KINDS["eagle3"](target, 384)
    again = round_trip(head, target, "speculators", tmp_path / "b")
    assert differences(head, again, target) == []
    assert again.config.rope_parameters == head.config.rope_parameters


def test_an_untrained_embedding_of_its_own_stays_its_own(tiny, tmp_path):
    """It is equal to the target's and still a tensor that training may go on with."""
    head = create(tiny, "eagle3", random=False, draft_vocab_size=120, embeddings="own")
    again = round_trip(head, tiny, "speculators", tmp_path / "out")
    assert differences(head, again, tiny) == []


def test_a_scaled_embedding_is_written_as_it_is_used(tokenizer, tmp_path):
    """Gemma multiplies its table; engines look rows up and no more."""
    target = gemma(tmp_path / "gemma", tokenizer)
    head = create(target, "eagle3", draft_vocab_size=120)
    found = exported(head, target, tmp_path / "out")
    ids = torch.arange(target.vocab_size)
    assert torch.equal(found.read("embed_tokens.weight"), target.readout.embed(ids))
    assert not torch.equal(target.readout.embed(ids), target.readout.embedding.weight)
    assert load(reader_of(found), found, target).config.embeddings == "target"


# ── what is written ──────────────────────────────────────────────────────────


def test_config_says_everything(tiny, found):
    """Nothing that decides how the head computes is left to a default, which differ."""
    assert found.config == {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 120,
        "target_hidden_size": 48,
        IDS: [1, 3, 4],  # what goes into a layer: the outputs of 0, 2 and 3
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        LAYER: {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 392,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 512,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "rope_theta": 10000.0,
            "rope_scaling": None,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 4,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
    }


def test_tensors(found):
    """No `model_type` at the top and no other names: vLLM's loader raises for unknown ones."""
    layer = {f"self_attn.{p}_proj" for p in "qkvo"} | {f"mlp.{p}_proj" for p in ("gate", "up")}
    layer |= {"mlp.down_proj", "input_layernorm", "hidden_norm", "post_attention_layernorm"}
    names = {f"layers.0.{name}.weight" for name in layer}
    names |= {f"{name}.weight" for name in ("fc", "norm", "lm_head", "embed_tokens")}
    assert found.shapes.keys() == names | {"d2t", "t2d"}
    assert (found.dtypes["d2t"], found.dtypes["t2d"]) == ("I64", "BOOL")
    assert found.shapes["layers.0.self_attn.q_proj.weight"] == (64, 96)


def test_vllm_is_told_of_another_number_of_features(tiny, tmp_path):
    found = exported(KINDS["eagle3-two-layers"](tiny, 120), tiny, tmp_path / "out")
    assert found.config[LAYER]["num_aux_hidden_states"] == 2


def test_launch_names_the_target(tiny, tiny_path):
    head, made = KINDS["eagle3"](tiny, 120), writer("speculators", "eagle3")
    remote = [one.text for one in made.launch(head, Reference(tiny, "some/target"))]
    assert remote[0] == "vllm serve {folder}"
    assert remote[1].startswith("vllm serve some/target --speculative-config '{")
    # vLLM takes a target out of config.json only where it is a name on the hub.
    local = [one.text for one in made.launch(head, Reference(tiny, str(tiny_path)))]
    assert local == [text.replace("some/target", str(tiny_path)) for text in remote[1:]]


# ── what is found ────────────────────────────────────────────────────────────


def test_a_good_one_has_nothing_to_warn_of(tiny, found):
    assert told(found, tiny) == told(found, tiny, "warn") == told(found, tiny, "note") == []
    checks = {one.check for one in reader_of(found).findings(found, tiny)}
    assert checks == {
        *("config", "norms", "sizes", "rope", "layers", "steps"),
        *("tensors", "draft vocabulary", "embedding"),
    }


@pytest.mark.parametrize(
    "flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
)
def test_other_norms_are_refused(tiny, found, flag):
    (text,) = told(found.edited(config={flag: True}), tiny)
    assert text.startswith(f"norms: {flag}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3"}, "layers of type 'qwen3'"),
        *(({key: value}, f"{key} is ") for key, value in OTHERWISE.items() if "norm" not in key),
        ({"bias": True}, "bias is True"),
        ({"eagle_config": {"norm_before_fc": True}}, "eagle_config is"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, "layer_types is"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4, and 3 layers are read"),
        ({"vocab_size": 400}, "vocab_size is 400, the target's 392"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        ({"num_hidden_layers": 2}, "missing layers.1"),
        ({"intermediate_size": 64}, "has shape (48, 96), expected (48, 64)"),
        ({"rope_parameters": {"rope_type": "no-such", "rope_theta": 1.0}}, "rope"),
        ({"head_dim": 15}, ""),
        ({"num_key_value_heads": 3}, ""),
        ({"num_attention_heads": "many"}, "num_attention_heads is 'many', not a size"),
        ({"rope_theta": 500.0}, "rope_theta with rope_scaling say different things"),
    ],
)
def test_a_layer_that_is_none_of_ours(tiny, found, changes, words):
    texts = told(with_layer(found, **changes), tiny)
    assert texts
    assert words in texts[0]


def test_no_memory_for_a_head_size_that_is_only_claimed(tiny, found, monkeypatch):
    """Positions of that size are made once the tensors are known to have it."""
    monkeypatch.setattr(rope, "effective", lambda *_: pytest.fail("must not be made"))
    texts = told(with_layer(found, head_dim=2**15), tiny)
    assert any("q_proj.weight has shape (64, 96), expected (131072, 96)" in one for one in texts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 64}, "sliding_window is 64"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001, that of the target 1e-06"),
        ({"max_position_embeddings": 256}, "positions end at 256, those of the target at 512"),
    ],
)
def test_a_layer_with_other_numbers(tiny, found, changes, words):
    """It may be meant: it is said, and read."""
    other = with_layer(found, **changes)
    (text,) = told(other, tiny, "warn")
    assert words in text
    load(reader_of(other), other, tiny)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"], "sliding_window": 64},
        {"layer_types": ["sliding_attention"], "sliding_window": 512},  # as long as any text
        {"rms_norm_eps": 1e-5},
        {"logit_scale": 1, "is_causal": True, "attention_dropout": 0.1},
    ],
)
def test_what_changes_nothing(tiny, found, changes):
    """A window is one of the layers that layer_types says have one."""
    other = with_layer(found, **changes)
    assert told(other, tiny) == told(other, tiny, "warn") == []


def test_states_that_vllm_has_no_room_for(tiny, tmp_path):
    """The package counts the ids, vLLM takes three where no number is said."""
    found = exported(KINDS["eagle3-two-layers"](tiny, 120), tiny, tmp_path / "out")
    less = {k: v for k, v in found.config[LAYER].items() if k != "num_aux_hidden_states"}
    (text,) = told(found.edited(config={LAYER: less}), tiny, "warn")
    assert "is None, and 2 layers are read" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is said"),
        ({"speculators_model_type": "dflash"}, "kind 'dflash'"),
        ({IDS: [0, 2, 3]}, "0 are the embeddings"),
        ({IDS: [3, 1, 4]}, "not ascending"),
        ({IDS: [1, 2]}, "fc.weight has shape"),
        ({IDS: 3}, "config.json cannot be read"),
        ({"draft_vocab_size": None}, "draft_vocab_size None"),
        ({"draft_vocab_size": 100}, "d2t has shape (120,), expected (100,)"),
        ({LAYER: None}, "config.json cannot be read"),
    ],
)
def test_a_config_that_cannot_be(tiny, found, changes, words):
    texts = told(found.edited(config=changes), tiny)
    assert any(words in text for text in texts), texts


def test_an_embedding_of_its_own_that_is_lost(tiny, tmp_path):
    """The target's in its place would draft something else; a head that used the target's has
    none to lose."""
    head = create(tiny, "eagle3", draft_vocab_size=120, embeddings="own")
    found = exported(head, tiny, tmp_path / "out")
    shapes = {name: shape for name, shape in found.shapes.items() if name != "embed_tokens.weight"}
    lost = replace(found, shapes=shapes)
    (text,) = told(lost, tiny)
    assert text == (
        "embedding: embed_requires_grad is true, and embed_tokens.weight is not in the file"
    )
    with pytest.raises(SpectrainError, match=r"embed_tokens\.weight is not in the file"):
        load(reader_of(lost), lost, tiny)
    assert told(lost.edited(config={"embed_requires_grad": False}), tiny) == []


def test_what_is_not_said(tiny, found):
    config = {k: v for k, v in found.config.items() if k not in ("norm_before_residual", IDS)}
    del config["speculators_config"]
    left = Found(found.path, config, found.shapes, found.dtypes, found.read)
    (text,) = told(left, tiny, "warn")
    assert "norm_before_residual is not said" in text
    # The package's own rule gives no layers for a target of four.
    assert told(left, tiny) == [
        f"layers: {IDS} [2, 2, 1] are not ascending ids of 1 … 4 (0 are the embeddings)"
    ]
    assert "steps: speculative_tokens is not said; taken for 7" in told(left, tiny, "note")


def test_other_angles_than_the_targets(tiny, found):
    rope = {"rope_type": "default", "rope_theta": 500.0}
    other = with_layer(found, rope_parameters=rope, rope_theta=500.0)
    assert told(other, tiny) == []
    (text,) = told(other, tiny, "warn")
    assert text.startswith("rope: default, base 500: not the rotary positions of the target")


def test_older_spelling_of_the_angles(tmp_path, tokenizer):
    """rope_theta and rope_scaling alone mean what rope_parameters do."""
    folder = save_tiny(tmp_path / "target", tokenizer, rope_parameters=ROPE)
    target = Target.load(str(folder), pack_weights=False)
    head = KINDS["eagle3"](target, 120)
    found = exported(head, target, tmp_path / "out")
    layer = {k: v for k, v in found.config[LAYER].items() if k != "rope_parameters"}
    old = found.edited(config={LAYER: layer})
    assert told(old, target) == told(old, target, "warn") == []
    assert differences(head, load(reader_of(old), old, target), target) == []


def test_a_map_of_ids_is_no_map_of_offsets(tiny, found):
    """And the suspects hold the cure: the same head, with the same drafts."""
    offsets = found.read("d2t")
    wrong = found.edited(tensors={"d2t": offsets + torch.arange(120)})
    assert told(wrong, tiny) == ["draft vocabulary: d2t holds absolute target ids, not offsets"]
    with pytest.raises(SpectrainError, match="d2t holds absolute"):
        load(reader_of(wrong), wrong, tiny)
    (cured,) = [s for s in reader_of(wrong).suspects(wrong, tiny) if "absolute" in s.name]
    assert torch.equal(cured.found.read("d2t"), offsets)
    assert told(cured.found, tiny) == []

    damaged = found.edited(tensors={"d2t": offsets.flip(0)})
    assert told(damaged, tiny)[0].startswith("draft vocabulary: d2t does not lead to ascending")


def test_an_identity_as_ids_would_double_them(whole, tmp_path):
    head = create(whole, "eagle3", draft_vocab_size=whole.vocab_size)
    found = exported(head, whole, tmp_path / "out")
    size = whole.vocab_size

    def with_map(values):
        shapes = {**found.shapes, "d2t": (size,)}
        types = {**found.dtypes, "d2t": "I64"}
        return Found(found.path, found.config, shapes, types, found.read, {"d2t": values})

    assert told(with_map(torch.zeros(size, dtype=torch.int64)), whole) == []
    (text,) = told(with_map(torch.arange(size)), whole)
    assert "they double every id" in text


def test_a_stop_token_that_cannot_be_guessed(tiny, tmp_path):
    head = KINDS["eagle3"](tiny, 120)
    head.use_vocabulary(torch.arange(100, 220))
    found = exported(head, tiny, tmp_path / "out")
    (text,) = told(found, tiny, "warn")
    assert "stop tokens [2] are missing" in text
    assert told(found, tiny) == []


def test_layers_next_to_those_that_are_said(tiny, tmp_path):
    found = exported(KINDS["eagle3-two-layers"](tiny, 120), tiny, tmp_path / "out")  # 1 and 3
    tried = [
        s.found.config[IDS]
        for s in reader_of(found).suspects(found, tiny)
        if "layers read" in s.name
    ]
    assert tried == [[1, 3]]  # those one above would lie beyond the target
    for suspect in reader_of(found).suspects(found, tiny):
        assert told(suspect.found, tiny) == [] or "absolute" in suspect.name


def test_copies_of_the_target_that_training_left(tiny, found):
    """Versions before saved the verifier's output layer; nobody reads it."""
    shapes = {**found.shapes, "verifier_lm_head.weight": (120, 48)}
    older = Found(found.path, found.config, shapes, found.dtypes, found.read)
    assert told(older, tiny) == []
    shapes["something.else"] = (1,)
    assert told(Found(found.path, found.config, shapes, found.dtypes, found.read), tiny) == [
        "tensors: unknown something.else"
    ]

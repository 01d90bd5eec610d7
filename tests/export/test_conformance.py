"""Exports against the tables of what the engines' loaders expect.

The checkpoints are written here by hand, as their formats are published, so that the tables are
held against something that was not made with them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eagle_files import OTHERWISE, target_of
from head_kinds import KINDS

from spectrain.export.conformance import PLAIN, evaluate, problems, table
from spectrain.export.formats import WRITERS, writer
from spectrain.export.layout import Encoded, Reference

H, A, G, d, I, V, D, N = 48, 4, 2, 16, 96, 392, 120, 4
SIZES = {
    "hidden_size": H,
    "num_attention_heads": A,
    "num_key_value_heads": G,
    "head_dim": d,
    "intermediate_size": I,
    "vocab_size": V,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "model_type": "llama",
}
ALL = [(engine, name) for engine in ("vllm", "sglang") for name in table(engine)["derived"]]
EAGLE = [one for one in ALL if "Eagle" in one[1]]


def layer(prefix: str, entry: int = H) -> dict[str, tuple[int, ...]]:
    """A Llama layer whose queries, keys and values read rows of the width `entry`."""
    return {
        f"{prefix}self_attn.q_proj.weight": (A * d, entry),
        f"{prefix}self_attn.k_proj.weight": (G * d, entry),
        f"{prefix}self_attn.v_proj.weight": (G * d, entry),
        f"{prefix}self_attn.o_proj.weight": (H, A * d),
        f"{prefix}mlp.gate_proj.weight": (I, H),
        f"{prefix}mlp.up_proj.weight": (I, H),
        f"{prefix}mlp.down_proj.weight": (H, I),
        f"{prefix}post_attention_layernorm.weight": (H,),
    }


def encoded(architecture: str, shapes: dict[str, tuple[int, ...]], **config) -> Encoded:
    kinds = {"d2t": torch.int64, "t2d": torch.bool}
    tensors = {
        name: torch.empty(shape, dtype=kinds.get(name), device="meta")
        for name, shape in shapes.items()
    }
    return Encoded({**SIZES, "architectures": [architecture], **config}, tensors)


def eagle1(architecture: str, *, bias: bool, layers: int = 1) -> Encoded:
    shapes = {"fc.weight": (H, 2 * H)} | ({"fc.bias": (H,)} if bias else {})
    for index in range(layers):
        shapes |= layer(f"layers.{index}.")
        shapes |= {f"layers.{index}.input_layernorm.weight": (H,)} if index else {}
    return encoded(architecture, shapes, num_hidden_layers=layers)


def eagle3(size: int = D, name: str = "midlayer", target: int = H, aux: int = 3, **config):
    shapes = {
        "fc.weight": (H, aux * target),
        **layer(f"{name}.", 2 * H),
        f"{name}.hidden_norm.weight": (H,),
        f"{name}.input_layernorm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (size, H),
    }
    if size < V:
        shapes |= {"d2t": (size,), "t2d": (V,)}
    config = {"draft_vocab_size": size, "target_hidden_size": target} | config
    return encoded("LlamaForCausalLMEagle3", shapes, **config)


def speculator() -> Encoded:
    """The same in one file: the layer's config within another."""
    inner, beside = {}, {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    inside = eagle3(name="layers.0")
    for key, value in inside.config.items():
        (beside if key in ("draft_vocab_size", "target_hidden_size") else inner)[key] = value
    return replace(inside, config={**beside, "transformer_layer_config": inner})


NORMS = ("input_layernorm", "post_attention_layernorm")


def mtp(architecture: str, shapes: dict[str, tuple[int, ...]], **config) -> Encoded:
    """The MTP part of a checkpoint whose config is the target's."""
    sizes = {"num_hidden_layers": N, "num_nextn_predict_layers": 1, "rope_parameters": {}}
    return encoded(architecture, shapes, **sizes, **config)


def deepseek() -> Encoded:
    at = f"model.layers.{N}."
    names = ("enorm", "hnorm", "shared_head.norm", *NORMS)
    shapes = {f"{at}{name}.weight": (H,) for name in names}
    shapes |= {f"{at}eh_proj.weight": (H, 2 * H), f"{at}self_attn.q_proj.weight": (A * 24, H)}
    more = {"model_type": "deepseek_v3", "qk_rope_head_dim": 8}
    return mtp("DeepseekV3ForCausalLM", shapes, **more)


def mimo() -> Encoded:
    """3 heads and 1 kv head of 16: Qwen2's attention takes the size of a head from H / heads."""
    at = "model.mtp_layers.0."
    names = ("token_layernorm", "hidden_layernorm", "final_layernorm", *NORMS)
    shapes = layer(at) | {f"{at}{name}.weight": (H,) for name in names}
    shapes |= {f"{at}input_proj.weight": (H, 2 * H), f"{at}self_attn.o_proj.weight": (H, H)}
    for name, size in {"q": H, "k": d, "v": d}.items():
        shapes[f"{at}self_attn.{name}_proj.weight"] = (size, H)
        shapes[f"{at}self_attn.{name}_proj.bias"] = (size,)
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    return mtp("MiMoForCausalLM", shapes, model_type="mimo", **heads)


def qwen3_next() -> Encoded:
    at, names = "mtp.layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes = layer(at) | {f"mtp.{name}.weight": (H,) for name in names}
    shapes |= {"mtp.fc.weight": (H, 2 * H), f"{at}input_layernorm.weight": (H,)}
    shapes |= {f"{at}self_attn.{name}_norm.weight": (d,) for name in "qk"}
    shapes[f"{at}self_attn.q_proj.weight"] = (2 * A * d, H)  # half of it are gates
    more = {"model_type": "qwen3_next", "num_experts": 0, "decoder_sparse_step": 1}
    return mtp("Qwen3NextForCausalLM", shapes, **more)


MADE = {
    "LlamaForCausalLMEagle3": eagle3,
    "Eagle3Speculator": speculator,
    "EagleLlamaForCausalLM": lambda: eagle1("EagleLlamaForCausalLM", bias=False),
    "LlamaForCausalLMEagle": lambda: eagle1("LlamaForCausalLMEagle", bias=True),
    "DeepseekV3ForCausalLM": deepseek,
    "MiMoForCausalLM": mimo,
    "Qwen3NextForCausalLM": qwen3_next,
}


@pytest.mark.parametrize(("engine", "name"), ALL)
def test_what_is_published_conforms(engine, name):
    assert problems(MADE[name](), (engine, name)) == []


@pytest.mark.parametrize(("engine", "name"), ALL)
def test_each_tensor_is_asked_for(engine, name):
    """Left out, renamed or of another shape, it is told. No engine reads t2d, and what is in a
    module that the table does not look into cannot be told."""
    good = MADE[name]()
    rows = table(engine)["derived"][name]["parameters"]
    opaque = {row[0].split(".")[-2] for row in rows if row[1] is None}
    whole = ("self_attn.", "mlp.", *NORMS)
    hidden = ("mlp.",) if opaque == {"mlp"} else whole if opaque else ()
    for one, tensor in good.tensors.items():
        if one == "t2d" or any(part in one for part in hidden):
            continue
        others = {key: value for key, value in good.tensors.items() if key != one}
        assert problems(replace(good, tensors=others), (engine, name)), f"{one} left out"
        renamed = others | {f"{one}s": tensor}
        assert problems(replace(good, tensors=renamed), (engine, name)), f"{one} renamed"
        larger = others | {one: tensor.new_empty([size + 1 for size in tensor.shape])}
        (problem,) = problems(replace(good, tensors=larger), (engine, name))
        assert "the engine expects" in problem


@pytest.mark.parametrize(("engine", "name"), EAGLE)
def test_what_no_loader_reads(engine, name):
    good = MADE[name]()
    more = {**good.tensors, "layers.0.self_attn.q_norm.weight": torch.empty(d)}
    (problem,) = problems(replace(good, tensors=more), (engine, name))
    fate = "refuses it" if engine == "vllm" else "skips it"
    assert problem.startswith("layers.0.self_attn.q_norm.weight is no parameter")
    assert fate in problem


def test_one_file_of_eagle1_cannot_serve_both_engines():
    for engine, name, bias in (
        ("vllm", "EagleLlamaForCausalLM", True),
        ("sglang", "LlamaForCausalLMEagle", False),
    ):
        (problem,) = problems(eagle1(name, bias=bias), (engine, name))
        assert "fc.bias" in problem


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_variants_of_eagle3(engine):
    """Either name of the layer, another width of the target, other numbers of auxiliary layers, a
    whole vocabulary, tensors of the config's own biases."""
    facts = (engine, "LlamaForCausalLMEagle3")
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    assert problems(eagle3(name="layers.0"), facts) == []
    assert problems(eagle3(target=64), facts) == []
    assert problems(eagle3(aux=2, eagle_config=ids), facts) == []
    assert problems(eagle3(size=V), facts) == []
    assert problems(eagle3(aux=2), facts)
    assert any(
        "self_attn.o_proj.bias" in one for one in problems(eagle3(attention_bias=True), facts)
    )
    whole = eagle3(size=V)
    mapped = replace(whole, tensors={**whole.tensors, "d2t": torch.zeros(V)})
    assert problems(mapped, facts)


def test_embeddings_that_an_engine_would_not_keep():
    good = eagle3()
    own = replace(good, tensors={**good.tensors, "embed_tokens.weight": torch.empty(V, H)})
    assert problems(own, ("vllm", "LlamaForCausalLMEagle3")) == []
    (problem,) = problems(own, ("sglang", "LlamaForCausalLMEagle3"))
    assert problem == "embed_tokens.weight is replaced by the target's"


def test_a_config_that_says_too_little_or_something_else():
    good, facts = eagle3(), ("vllm", "LlamaForCausalLMEagle3")
    for key in ("hidden_size", "rms_norm_eps", "intermediate_size", "vocab_size"):
        less = {name: value for name, value in good.config.items() if name != key}
        assert problems(replace(good, config=less), facts) == [f"config.json lacks {key}"]
    other = {**good.config, "hidden_act": "gelu"}
    assert "the engine asks for hidden_act == 'silu'" in problems(
        replace(good, config=other), facts
    )
    other = {**good.config, "architectures": ["LlamaForCausalLM"]}
    assert "does not name" in problems(replace(good, config=other), facts)[0]
    assert problems(good, ("vllm", "LlamaForCausalLMEagle9")) == [
        "vllm has no architecture LlamaForCausalLMEagle9"
    ]


WINDOWS = {"layer_types": ["sliding_attention"], "sliding_window": 64}


@pytest.mark.parametrize(("engine", "name"), EAGLE)
def test_keys_that_make_another_head(engine, name):
    """The same tensors would load and compute something else. What our heads are is as good said
    as left out."""
    good = MADE[name]()
    for key, value in (OTHERWISE | WINDOWS).items():
        said = problems(replace(good, config={**good.config, key: value}), (engine, name))
        assert f"{key} is {value!r}, which makes another head of it" in said
    assert problems(replace(good, config={**good.config, **PLAIN}), (engine, name)) == []


def test_a_key_within_the_layer_s_config():
    good, facts = speculator(), ("vllm", "Eagle3Speculator")
    inner = {**good.config["transformer_layer_config"], "logit_scale": 0.5}
    (problem,) = problems(
        replace(good, config={**good.config, "transformer_layer_config": inner}), facts
    )
    assert problem.startswith("logit_scale is 0.5")


def test_a_default_of_the_engine_that_makes_another_head(monkeypatch):
    """Left out, a key is what the engine takes it for: so the next version may ask for it."""
    good, (engine, name) = eagle3(), ("vllm", "LlamaForCausalLMEagle3")
    defaults = table(engine)["derived"][name]["defaults"]
    monkeypatch.setitem(defaults, "norm_before_residual", "True")
    (problem,) = problems(good, (engine, name))
    assert problem.startswith("norm_before_residual is True")
    said = replace(good, config={**good.config, "norm_before_residual": False})
    assert problems(said, (engine, name)) == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_a_map_of_fractions(engine, name):
    good = eagle3()
    tensors = {**good.tensors, name: good.tensors[name].float()}
    (problem,) = problems(replace(good, tensors=tensors), (engine, "LlamaForCausalLMEagle3"))
    assert problem.startswith(f"{name} holds fractions")


def test_formulas_are_data():
    """A table cannot run anything."""
    config = {"a": 6, "b": None}
    assert evaluate("(a * 2) // config.get('c', 3)", config) == 4
    assert evaluate("a if (b is None) else 0", config) == 6
    for formula in ("__import__('os')", "config.pop('a')", "[one for one in config]", "a.real"):
        with pytest.raises(ValueError, match="not a formula"):
            evaluate(formula, config)


WITH_TABLES = [
    (format, family)
    for format, families in WRITERS.items()
    for family in families
    if writer(format, family).facts
]


@pytest.mark.parametrize(("format", "family"), WITH_TABLES)
def test_exports_conform(format, family):
    """Every kind of head that a format takes, held against its engine; one at least is taken. MTP
    formats take those of their own targets alone, which the fuzzed round trips have."""
    target = target_of()  # deep enough for the layers that engines read
    made, reference = writer(format, family), Reference(target, target.name)
    heads = [kind(target, size) for kind in KINDS.values() for size in (D, target.readout.usable)]
    carried = [
        problems(made.encode(head, reference), facts)
        for head in heads
        for facts in made.facts
        if head.family == family and not made.refusals(head, reference)
    ]
    assert not any(carried)
    assert carried or format.startswith("mtp-")

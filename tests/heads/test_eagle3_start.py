"""EAGLE-3: names, sizes and positions, where a head starts, what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import make_head, save_tiny

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads.io import load_head, save_head
from spectrain.heads.layers import Rotary
from spectrain.recipes import train


def test_start_is_the_target_s_last_layer(tiny):
    """With init "target" the fused state is the highest auxiliary state, unchanged."""
    head = make_head(tiny, wild=False)
    tokens = torch.randint(3, 380, (1, 9))
    features = tiny.forward(tokens, aux_layers=head.needs.aux_layers)
    top = features.aux[..., -tiny.hidden_size :]
    torch.testing.assert_close(head.fc(features.aux), top)
    ids = head.to_target(torch.arange(120))
    torch.testing.assert_close(head.lm_head.weight, tiny.readout.weight[ids])
    last = tiny.decoder.layers[-1]
    torch.testing.assert_close(head.midlayer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    half = head.midlayer.self_attn.q_proj.weight[:, tiny.hidden_size :]
    torch.testing.assert_close(half, last.self_attn.q_proj.weight)


def test_frozen_lm_head_is_frozen(tiny):
    head = make_head(tiny, train_lm_head=False)
    assert not head.lm_head.weight.requires_grad
    assert head.fc.weight.requires_grad


@pytest.mark.parametrize("layers", [(0, 2, 9), (-1, 2), (2, 1), (1, 1), (4,)])
def test_impossible_aux_layers_are_refused(tiny, layers):
    with pytest.raises(SpectrainError, match=r"aux_layers.*are not ascending layers of 0"):
        make_head(tiny, aux_layers=layers)


@pytest.mark.parametrize("bad", [{"steps": 0}, {"aux_layers": []}, {"layers": 0}, {"loss": "kl"}])
def test_impossible_options_are_one_line(bad):
    (key,) = bad
    with pytest.raises(SpectrainError, match=f"head.{key}: .* refused") as caught:
        train.options_of(train.TrainConfig(head=bad))
    assert "\n" not in str(caught.value)


LAYER = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}


def test_names_are_those_of_the_published_layout(tiny):
    """One layer has the names every engine knows; more of them are added behind it."""
    one = {f"midlayer.{name}" for name in LAYER} | {"midlayer.hidden_norm.weight"}
    one |= {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert make_head(tiny).state_dict().keys() == one
    further = {f"layers.{i}.{name}" for i in (1, 2) for name in LAYER}
    assert make_head(tiny, layers=3).state_dict().keys() == one | further
    own = make_head(tiny, embeddings="own").state_dict()
    assert own.keys() == one | {"embed_tokens.weight"}
    assert own["embed_tokens.weight"].shape == (tiny.vocab_size, tiny.hidden_size)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_of_auxiliary_layers(tiny, count):
    """Whatever their number, a new head passes the highest one on."""
    layers = (0, 1, 2, 3)[-count:]
    head = make_head(tiny, wild=False, aux_layers=layers)
    assert head.needs.aux_layers == layers
    features = tiny.forward(torch.randint(3, 380, (1, 9)), aux_layers=layers)
    torch.testing.assert_close(head.read(features), features.aux[..., -tiny.hidden_size :])


@torch.no_grad()
def test_several_layers_start_as_the_target_s_last_ones(tiny):
    """Fed with a hidden state alone (no embedding), the stack computes what those layers do."""
    head = make_head(tiny, wild=False, layers=2, aux_layers=(1,))
    assert torch.equal(head.midlayer.mlp.up_proj.weight, tiny.decoder.layers[-2].mlp.up_proj.weight)
    for layer in head.stack:
        if layer is head.midlayer:
            layer.input_layernorm.weight.zero_()
    tokens = torch.randint(3, 380, (1, 9))
    features = tiny.forward(tokens, aux_layers=(1,))
    # The target's layers 2 and 3 over the output of layer 1 and the final norm are its last state.
    state = head.start(1, 16)
    head.begin(state, torch.cat([tokens, tokens[:, :1]], 1), features, torch.tensor([9]))
    torch.testing.assert_close(
        head.norm(state.hidden[:, 0]), features.last[:, -1], atol=1e-4, rtol=1e-4
    )


def test_own_embeddings_start_as_the_target_s(tiny):
    head = make_head(tiny, wild=False, embeddings="own")
    assert head.embed_tokens.weight.requires_grad
    ids = torch.tensor([[5, 391]])
    assert torch.equal(head.embed(ids), tiny.readout.embed(ids))
    assert head.embed_tokens.weight.data_ptr() != tiny.readout.embedding.weight.data_ptr()


def test_a_config_written_before_there_were_these_options_loads(tiny, tmp_path):
    head = make_head(tiny)
    save_head(head, tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    for name in ("layers", "embeddings", "loss", "feature_noise"):
        del config[name]
    path.write_text(json.dumps(config))
    assert load_head(tmp_path / "head").config == head.config


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 700.0},
        {"rope_type": "linear", "rope_theta": 700.0, "factor": 3.0},
        {"rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_rotary_positions_are_the_target_s(tmp_path, tokenizer, parameters):
    """Base and scaling reach the head: the same angles, the same attention scale."""
    folder = save_tiny(tmp_path / "target", tokenizer, rope_parameters=parameters)
    target = Target.load(str(folder), pack_weights=False)
    positions = torch.tensor([[0, 1, 7, 100, 400]])
    expected = target.decoder.rotary_emb(torch.zeros(1), positions)
    ours = make_head(target).rotary(positions, torch.float32)
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=0, rtol=0)


def test_rotary_positions_stay_exact_in_a_lower_type():
    rotary = Rotary(64, 8192, {"rope_type": "default", "rope_theta": 10000.0})
    places = torch.tensor([5, 700, 8000])
    expected = rotary(places, torch.float32)
    got = rotary.to(torch.bfloat16)(places, torch.float32)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_head_size_is_explicit(tiny):
    """CASE 25: hidden size 48, four heads of 16."""
    head = make_head(tiny)
    attention = head.midlayer.self_attn
    assert tiny.hidden_size == 48 != head.config.num_attention_heads * head.config.head_dim
    assert attention.q_proj.weight.shape == (64, 96)
    assert attention.k_proj.weight.shape == (32, 96)
    assert attention.o_proj.weight.shape == (48, 64)


def test_more_draft_tokens_than_there_are(tiny):
    with pytest.raises(SpectrainError, match="not between 1 and 384"):
        make_head(tiny, draft_vocab=385)
    assert make_head(tiny, draft_vocab=None).config.draft_vocab_size == 384

"""EAGLE-1: names, where a head starts, what it refuses."""

from __future__ import annotations

import pytest
import torch
from head_kinds import create
from tiny_models import gemma, make_batch, random_rows, save_tiny

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads import eagle1_init
from spectrain.recipes import train


def test_names_are_those_of_the_published_layout(tiny, whole):
    """No input norm, no final norm, no lm_head, no bias; a map only where tokens are left out."""
    linear = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up")]
    layer = [*linear, "mlp.down_proj", "post_attention_layernorm"]
    names = {"fc.weight", *(f"layers.0.{name}.weight" for name in layer)}
    assert create(whole, "eagle1").state_dict().keys() == names
    assert create(tiny, "eagle2").state_dict().keys() == names | {"d2t", "t2d"}
    assert create(whole, "eagle1", fc_bias=True).state_dict().keys() == names | {"fc.bias"}
    shapes = {n: tuple(v.shape) for n, v in create(whole, "eagle1").state_dict().items()}
    assert shapes["fc.weight"] == (48, 96)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (64, 48)


@pytest.fixture
def scaled(tmp_path, tokenizer):
    """A target whose norms have weights worth the name, its last state at one token, and the
    residual stream h it was made of."""
    target = Target.load(str(save_tiny(tmp_path / "t", tokenizer)), pack_weights=False)
    torch.manual_seed(1)
    source = target.decoder.layers[-1]
    for norm in (target.decoder.norm, source.input_layernorm, source.post_attention_layernorm):
        norm.weight.uniform_(0.5, 2.0)
    stream = 5 * torch.randn(1, 48)
    return target, stream, target.decoder.norm(stream)


@torch.no_grad()
def test_start_is_the_target_s_last_layer(scaled, monkeypatch):
    """Piece by piece what the target's layer does to h, said of f: its own coordinates."""
    target, stream, state = scaled
    size, final = stream.pow(2).mean().sqrt(), target.decoder.norm.weight
    monkeypatch.setattr(
        eagle1_init, "sizes", lambda _: (size.item(), state.pow(2).mean().sqrt().item())
    )
    head = create(target, "eagle1", random=False, init="target")
    layer, source = head.layers[0], target.decoder.layers[-1]
    residual, x = head.enter(torch.zeros_like(state), state)
    torch.testing.assert_close(residual, state)
    assert head.fc.weight[:, :48].abs().max() < 0.02
    for name in ("q_proj", "k_proj", "v_proj"):
        own, theirs = (getattr(one.self_attn, name) for one in (layer, source))
        torch.testing.assert_close(own(x), theirs(source.input_layernorm(stream)))
    attended = torch.randn(1, 64)
    moved = source.self_attn.o_proj(attended)
    torch.testing.assert_close(layer.self_attn.o_proj(attended), moved * final / size)
    moved = source.mlp(source.post_attention_layernorm(stream))
    ours = layer.mlp(layer.post_attention_layernorm(state))
    torch.testing.assert_close(ours, moved * final / size, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_sizes_are_those_of_the_states(scaled):
    target = scaled[0]
    tokens = torch.randint(0, 384, (1, 64), generator=torch.Generator().manual_seed(3))
    state = target.forward(tokens).last
    stream = target.forward(tokens, aux_layers=(3,)).aux
    found = eagle1_init.sizes(target)
    for got, rows in zip(found, (stream, state), strict=True):
        assert got == pytest.approx(rows.pow(2).mean(-1).sqrt().median().item(), rel=0.3)


def test_what_does_not_fit_starts_at_random(tmp_path, tokenizer):
    """Gemma's layers have four norms: nothing of them is taken over, and nothing fails."""
    target = gemma(tmp_path, tokenizer)
    head = create(target, "eagle1", random=False, init="target")
    own, theirs = head.layers[0].mlp.up_proj.weight, target.decoder.layers[-1].mlp.up_proj.weight
    assert own.shape == theirs.shape
    assert own.std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(own, theirs)
    assert (head.layers[0].post_attention_layernorm.weight == 1).all()


def test_random_start(tiny):
    head = create(tiny, "eagle1", random=False, fc_bias=True)
    assert not head.fc.bias.any()
    for name, value in head.named_parameters():
        if value.dim() == 2:
            assert value.std().item() == pytest.approx(0.02, rel=0.1), name


@pytest.mark.parametrize("init", ["random", "target"])
def test_a_few_steps_of_training_lower_both_losses(tiny, init):
    """With noise on; the losses are measured without it."""
    head = create(tiny, "eagle1", random=False, init=init)
    batch = make_batch(tiny, head, *random_rows(torch.Generator().manual_seed(4)))
    both = {
        "distance": create(tiny, "eagle1", classification_weight=0.0),
        "entropy": create(tiny, "eagle1", regression_weight=0.0),
    }

    def measure():
        for other in both.values():
            other.load_state_dict(head.state_dict())
        return {name: other.objective(batch).loss.item() for name, other in both.items()}

    before = measure()
    optimizer = torch.optim.Adam(head.parameters(), 1e-3)
    head.train()
    for step in range(30):
        torch.manual_seed(step)  # as the training loop does: other noise in every step
        optimizer.zero_grad()
        head.objective(batch).loss.sum().backward()
        optimizer.step()
    after = measure()
    assert after["distance"] < 0.9 * before["distance"]
    assert after["entropy"] < 0.96 * before["entropy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "head.steps: 0 refused"),
        ({"step": 2}, "unknown key head.step.*steps"),
        ({"noise": -1}, "head.noise"),
    ],
)
def test_bad_options_are_one_line(options, message):
    config = train.TrainConfig(family="eagle1", head=options)
    with pytest.raises(SpectrainError, match=message) as caught:
        train.options_of(config)
    assert "\n" not in str(caught.value)


def test_partly_rotated_heads_are_refused(tiny, monkeypatch):
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    monkeypatch.setattr(tiny.config, "rope_parameters", parameters)
    for family in ("eagle1", "eagle2", "eagle3"):
        with pytest.raises(SpectrainError, match="partial_rotary_factor"):
            create(tiny, family)


def test_more_draft_tokens_than_there_are(tiny):
    with pytest.raises(SpectrainError, match="not between 1 and 384"):
        create(tiny, "eagle1", draft_vocab_size=385)

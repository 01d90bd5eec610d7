"""Multi-token prediction: where a head starts, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from head_kinds import create, wild
from mtp_variants import every_variant, make

from spectrain.core.errors import SpectrainError
from spectrain.heads.mtp_module import LayerBuilder, LayerKind, MtpModule, check_layer

# ── where a head starts ──────────────────────────────────────────────────────


@every_variant
@torch.no_grad()
def test_the_layer_starts_in_the_residual_stream(tiny, variant):
    """What the first layer reads is the state before the target's final norm, up to each row's
    size; the chain's later modules keep the size."""
    streams = []
    hook = tiny.decoder.norm.register_forward_pre_hook(lambda _m, args: streams.append(args[0]))
    tokens = torch.randint(3, 380, (1, 30), generator=torch.Generator().manual_seed(7))
    last = tiny.forward(tokens).last
    hook.remove()
    head = make(tiny, variant, random=False)
    parts = list(head.heads if variant == "parallel" else head.chain)
    sizes = streams[0].pow(2).mean(-1, keepdim=True).sqrt()
    for index, part in enumerate(parts):
        normed = variant != "chain before norm" or index == 0
        got = part.hnorm(last if normed else streams[0])
        assert 0.7 < got.pow(2).mean().sqrt() / sizes.mean() < 1.4
        got = got / got.pow(2).mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(got, streams[0] / sizes, atol=1e-3, rtol=1e-3)


@every_variant
def test_start_is_the_target_s_last_layer(tiny, variant):
    head = make(tiny, variant, random=False)
    last = tiny.decoder.layers[-1].state_dict()
    parts = list(head.heads if variant == "parallel" else head.chain)
    assert len(parts) == (1 if variant == "recurrent" else 3)
    for part in parts:
        for name, value in part.layer.state_dict().items():
            assert value.equal(last[name]), name
        assert part.norm.weight.equal(tiny.decoder.norm.weight)
        assert all(value.requires_grad for value in part.parameters())
    if variant != "parallel":
        hidden = tiny.hidden_size
        assert parts[0].eh_proj.weight[:, hidden:].equal(torch.eye(hidden))
        assert 0 < parts[0].eh_proj.weight[:, :hidden].abs().max() < 0.2
    other = make(tiny, variant, random=False, init="random")
    part = next(iter(other.heads if variant == "parallel" else other.chain))
    assert not part.layer.mlp.up_proj.weight.equal(last["mlp.up_proj.weight"])


def test_norms_start_without_effect_also_where_weights_are_counted_from_one(targets):
    """Gemma stores weight − 1."""
    head = make(targets("gemma3_text"), "chain", random=False)
    x = torch.randn(4, 48)
    torch.testing.assert_close(
        head.chain[0].enorm(x), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    )


def test_the_layer_looks_everywhere_where_some_of_the_target_s_do(targets):
    """Gemma alternates windows and full attention; the last layer may be of either kind."""
    target = targets("gemma2")
    kinds = target.config.layer_types
    kind = LayerKind.of(target.config)
    assert kinds[kind.source] == "full_attention"
    assert "full_attention" not in kinds[kind.source + 1 :]
    assert LayerKind.of(targets("mistral").config).source == 3


def test_rotary_positions_stay_exact_in_a_lower_type(tiny):
    """Angles of far positions need more digits than bfloat16 has."""
    head = make(tiny, "chain").to(torch.bfloat16)
    positions = torch.tensor([[0, 1, 7, 500]])
    got = head._parts.rotary(torch.zeros(1), positions)
    expected = tiny.decoder.rotary_emb(torch.zeros(1), positions)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_all_tokens_need_no_copy_of_the_output_layer(tiny, whole):
    for target in (tiny, whole):
        weight, _ = make(target, "chain", draft_vocab=None).rows
        assert len(weight) == target.readout.usable
        assert weight.data_ptr() == target.readout.weight.data_ptr()


# ── refusals ─────────────────────────────────────────────────────────────────


def test_an_unknown_architecture_is_one_line():
    kind = LayerKind(model_type="no-such-model", source=0, config={})
    with pytest.raises(SpectrainError, match="no-such-model"):
        LayerBuilder(kind)


def test_a_layer_that_acts_differently_outside_its_model_is_refused(tiny):
    kind = LayerKind.of(tiny.config)
    changed = kind.config | {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}
    with pytest.raises(SpectrainError, match="inside and outside"):
        check_layer(LayerBuilder(kind.model_copy(update={"config": changed})), tiny)


def test_a_layer_that_needs_more_than_states_and_positions_is_refused(tiny, monkeypatch):
    layer = tiny.decoder.layers[-1]
    plain = layer.forward

    def forward(hidden, **more):
        if "use_cache" not in more:
            raise TypeError("forward() missing 1 required argument: 'per_layer_input'")
        return plain(hidden, **more)

    monkeypatch.setattr(layer, "forward", forward)
    with pytest.raises(SpectrainError, match="per_layer_input"):
        make(tiny, "chain")


def test_options_that_do_not_exist_are_refused(tiny):
    for name, options in [("mtp-parallel", {"shared": True}), ("mtp-sequential", {"steps": 0})]:
        with pytest.raises(ValueError, match=r"shared|steps"):
            create(tiny, name, **options)


def test_modules_have_a_layer_of_the_cache_each(tiny):
    builder = LayerBuilder(LayerKind.of(tiny.config))
    modules = [wild(MtpModule(builder, index)) for index in range(3)]
    assert [module.layer.self_attn.layer_idx for module in modules] == [0, 1, 2]

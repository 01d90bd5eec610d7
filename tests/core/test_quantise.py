"""Rounded layers: the rounding is bounded, the product is that of the rounded weights, and a target
of them keeps what the others keep (cache, trees, shared embeddings)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import save_tiny
from torch import nn

from spectrain.core import quantise as module
from spectrain.core.errors import SpectrainError
from spectrain.core.quantise import GROUP, KINDS, MANY_ROWS, Int4Linear, Int8Linear, quantise
from spectrain.core.target import Target

HALF_ULP = 2.0**-8  # of bfloat16, relative: the most that rounding to it changes


def bfloat(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().to(torch.bfloat16).item()


def rounded8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slow and plain: the rounded weights and the scale of each, [O, I] float64."""
    values, scales = torch.zeros(weight.shape).double(), torch.zeros(weight.shape).double()
    for output, row in enumerate(weight.double()):
        scales[output] = scale = bfloat(max(row.abs().max().item(), 1e-30) / 127)
        values[output] = (row / scale).round() * scale
        values[output] = values[output].clamp(-127 * scale, 127 * scale)
    return values, scales


def rounded4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for int4: in each group of 32 the nearest of 16 values zero − 8 · scale … zero + 7 ·
    scale, the scale being what reaches both ends."""
    values, scales = torch.zeros(weight.shape).double(), torch.zeros(weight.shape).double()
    for output, row in enumerate(weight.double()):
        for start in range(0, len(row), GROUP):
            group = row[start : start + GROUP]
            least, most = group.min().item(), group.max().item()
            zero = bfloat(least + (most - least) * 8 / 15)
            scale = bfloat(max((zero - least) / 8, (most - zero) / 7, 1e-30))
            grid = zero + scale * torch.arange(-8, 8).double()
            nearest = (group[:, None] - grid).abs().argmin(dim=1)
            values[output, start : start + GROUP] = grid[nearest]
            scales[output, start : start + GROUP] = scale
    return values, scales


ROUNDED = {"int8": rounded8, "int4": rounded4}
kinds = pytest.mark.parametrize("kind", KINDS)


def kept(layer: module.QuantisedLinear, weight: torch.Tensor) -> torch.Tensor:
    """The weights that the layer multiplies by, exactly, from what it keeps: [O, I] float64. What
    int4 packs is laid out as the CPU likes it, so that its codes are made anew."""
    if isinstance(layer, Int8Linear):
        return layer.quantised.double() * layer.scale.double()[:, None]
    codes, scales = module.in_groups(weight)
    assert torch.equal(scales, layer.scales)
    scale, zero = scales.double().transpose(0, 1).repeat_interleave(GROUP, dim=1).unbind(-1)
    return scale * (codes - 8) + zero


def linear(bias: bool = True, outputs: int = 80) -> nn.Linear:
    """Rows of very different size, one of zeros, one of a single entry, one of a constant, one far
    from zero."""
    torch.manual_seed(0)
    layer = nn.Linear(96, outputs, bias=bias)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-6, 4, outputs)[:, None])
        layer.weight[3] = 0
        layer.weight[4] = 0
        layer.weight[4, 17] = -0.3
        layer.weight[5] = 0.777
        layer.weight[6] = layer.weight[6] * 10 + 1
    return layer


@pytest.fixture(scope="module")
def plain_path(tmp_path_factory, tokenizer):
    """A tiny target all of whose layers fit both kinds."""
    return save_tiny(tmp_path_factory.mktemp("target") / "wide", tokenizer, hidden_size=64)


@pytest.fixture(scope="module")
def plain(plain_path) -> Target:
    return Target.load(str(plain_path), pack_weights=False)


@pytest.fixture(scope="module", params=list(KINDS))
def quantised(plain_path, request) -> Target:
    return Target.load(str(plain_path), quantize=request.param)


def tokens(count: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(3, 380, (1, count), generator=torch.Generator().manual_seed(seed))


@kinds
def test_each_weight_is_off_by_half_a_scale_at_most(kind):
    """And rounded as the slow reference does. A weight half-way between two steps may go to either
    (float32 against float64), so it is the distance that is compared."""
    weight = linear().weight.detach()
    got = kept(KINDS[kind](linear()), weight)
    expected, scale = ROUNDED[kind](weight)
    gap, least = (got - weight.double()).abs(), (expected - weight.double()).abs()
    size = weight.double().abs()
    assert (gap <= scale / 2 + size * 1e-6).all()
    assert (gap <= least + scale * 1e-6 + size * 1e-6).all()


def test_scales_are_no_larger_than_the_steps_ask_for():
    """127 steps to a row's largest weight; 15 from the least of a group to its most, and what the
    rounded zero (2⁻⁸ of itself away) adds to one end, over the 7 steps there."""
    layer, weight = Int8Linear(linear()), linear().weight.double()
    largest = weight.abs().amax(dim=1)
    assert (layer.scale.double() * 127 <= largest * (1 + HALF_ULP) + 1e-25).all()
    groups = weight.unflatten(1, (-1, GROUP))
    span = groups.amax(-1) - groups.amin(-1)
    largest = groups.abs().amax(-1)
    scale = Int4Linear(linear()).scales[..., 0].double().T
    asked = span / 15 + largest * HALF_ULP / 7
    assert (scale <= asked * (1 + HALF_ULP) + 1e-25).all()


@torch.inference_mode()
@kinds
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8, MANY_ROWS - 1, MANY_ROWS, 2 * MANY_ROWS])
def test_product_is_that_of_the_rounded_weights(kind, rows, bias):
    """Both routes. Inputs of bfloat16 make it exact up to the result's own rounding to bfloat16,
    the float32 of sums and widened weights (2⁻²⁴ for each of 96 terms and of their parts, for int4
    scale · code and zero), and the bias's addition."""
    plain = linear(bias)
    layer = KINDS[kind](plain)
    x = torch.randn(rows, 2, 96).to(torch.bfloat16).float()
    got = layer(x)
    assert got.dtype == torch.float32
    assert got.shape == (rows, 2, 80)
    weight = kept(layer, plain.weight)
    exact = x.double() @ weight.T
    sums = x.double().abs() @ (weight.abs() + plain.weight.double().abs().amax(1)[:, None]).T
    expected = exact if layer.bias is None else exact + layer.bias.double()
    allowed = exact.abs() * HALF_ULP + (sums + expected.abs()) * 99 * 2.0**-24
    assert ((got.double() - expected).abs() <= allowed + 1e-25).all()


@torch.inference_mode()
@kinds
def test_product_is_near_the_plain_one(kind):
    """Half a scale for each weight, half a unit of bfloat16 for each input, one for the result."""
    plain = linear()
    layer = KINDS[kind](plain)
    x = torch.randn(5, 96)
    expected = F.linear(x.double(), plain.weight.double(), plain.bias.double())
    sums = x.double().abs() @ plain.weight.double().abs().T
    by_weights = x.double().abs() @ ROUNDED[kind](plain.weight)[1].T / 2
    allowed = by_weights + 3 * HALF_ULP * (sums + by_weights + expected.abs())
    gap = (layer(x).double() - expected).abs()
    assert (gap <= allowed + 1e-25).all()
    assert (gap.amax(0) > 0)[5:].all()  # the weights were rounded indeed


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "most"), [("int8", MANY_ROWS - 1), ("int4", 3 * MANY_ROWS)])
def test_a_row_does_not_depend_on_the_rows_beside_it(kind, most):
    """To the bit: what a verify pass reads is what single steps would have read."""
    layer = KINDS[kind](linear())
    x = torch.randn(most, 96)
    alone = torch.cat([layer(row[None]) for row in x])
    for count in (2, 3, 5, 8, 16, most):
        assert torch.equal(layer(x[:count]), alone[:count])


@pytest.mark.parametrize(
    ("kind", "fitting", "odd"),
    [("int8", (32, 5), (40, 32)), ("int4", (64, 48), (48, 64)), ("int4", (32, 16), (32, 67))],
)
def test_layers_the_operator_cannot_take_stay(kind, fitting, odd):
    """int8's reads past the end of rows that are no multiple of 16; int4's refuses inputs that are
    no multiple of 32 and outputs that are none of 16."""
    model = nn.Sequential(nn.Linear(*odd), nn.Sequential(nn.Linear(*fitting)), nn.LayerNorm(5))
    assert quantise(model, kind) == 1
    assert isinstance(model[0], nn.Linear)
    assert isinstance(model[1][0], KINDS[kind])


@torch.inference_mode()
def test_target_is_the_one_with_rounded_weights(quantised, plain_path):
    """Against a plain float32 target that was given the same rounded weights; what is left is
    bfloat16's rounding of inputs and results: 8 matrices a layer, 4 layers, each 2⁻⁸."""
    reference = Target.load(str(plain_path), pack_weights=False)
    ours = dict(quantised.decoder.named_modules())
    for name, layer in reference.decoder.named_modules():
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(kept(ours[name], layer.weight).float())
    head = kept(quantised.readout._lm_head, reference.readout.weight).float()
    expected = F.linear(reference.forward(tokens(20)).last, head)
    got = quantised.logits(quantised.forward(tokens(20)).last)
    scale = expected.abs().max()
    assert (got - expected).abs().max() <= 16 * HALF_ULP * scale
    assert (got - expected).square().mean().sqrt() <= 2 * HALF_ULP * scale


@torch.inference_mode()
def test_target_says_nearly_what_the_plain_one_says(quantised, plain):
    """127 steps a weight: the argmax of a peaked random model seldom changes. 15 steps a group
    change it more often (random weights amplify more than trained ones), far from always: by chance
    it would agree once in 392."""
    ids = tokens(64)
    ours, theirs = (t.logits(t.forward(ids).last) for t in (quantised, plain))
    assert ours.dtype == theirs.dtype == torch.float32
    agreeing = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    assert agreeing > {"int8": 0.9, "int4": 0.25}[quantised.quantisation]
    assert not torch.equal(ours, theirs)


def test_what_a_head_shares_is_not_rounded(quantised, plain):
    """Tied: lm_head's weight is the embedding; `rows`, which heads are made of, read the plain. The
    output layer is int8 beside a decoder of either kind."""
    ids = torch.arange(20)
    assert quantised.readout.embedding.weight is quantised.readout.weight
    assert torch.equal(quantised.readout.embed(ids), plain.readout.embed(ids))
    assert torch.equal(quantised.readout.rows(ids)[0], plain.readout.rows(ids)[0])
    assert isinstance(quantised.readout._lm_head, Int8Linear)
    kind = KINDS[quantised.quantisation]
    assert sum(isinstance(m, kind) for m in quantised.decoder.modules()) == 4 * 7
    assert not any(isinstance(m, nn.Linear) for m in quantised.decoder.modules())


def test_it_is_the_same_target_and_says_that_it_is_quantised(quantised, plain):
    """A head of the plain target may be used: it is checked by the fingerprint."""
    assert quantised.fingerprint == plain.fingerprint
    assert quantised.quantisation in KINDS
    assert plain.quantisation is None
    assert (quantised.dtype, quantised.name) == (plain.dtype, plain.name)


def gap(left: torch.Tensor, right: torch.Tensor) -> float:
    """The root mean square difference, as a share of the right's root mean square."""
    return ((left - right).square().mean().sqrt() / right.square().mean().sqrt()).item()


@torch.inference_mode()
def test_pieces_and_trees_equal_one_pass(quantised):
    """Float32 roundings of attention may turn a bfloat16 one, no more; a token read at a wrong
    place or with a wrong past changes much more."""
    ids = tokens(16)
    whole = quantised.logits(quantised.forward(ids).last)
    cache = quantised.new_cache(1, 32)
    pieces = []
    for piece in (ids[:, :9], ids[:, 9:12], ids[:, 12:]):
        pieces.append(quantised.forward(piece, cache=cache).last)
        cache.commit(torch.tensor([piece.shape[1]]))
    assert gap(quantised.logits(torch.cat(pieces, dim=1)), whole) < 0.01

    cache = quantised.new_cache(1, 32)
    quantised.forward(ids[:, :12], cache=cache)
    cache.commit(torch.tensor([12]))
    nodes = torch.cat([tokens(4, seed=5), ids[:, 12:]], dim=1)
    ancestors = torch.block_diag(*[torch.ones(4, 4).tril()] * 2).bool()
    depths = torch.arange(4).repeat(2)
    tree = quantised.forward(nodes, cache=cache, ancestors=ancestors, depths=depths).last
    assert gap(quantised.logits(tree[:, 4:]), whole[:, 12:]) < 0.01
    assert gap(quantised.logits(tree[:, :4]), whole[:, 12:]) > 0.1


def test_unknown_kind_is_refused_before_anything_is_read():
    with pytest.raises(SpectrainError, match="unknown quantisation 'int3'; choose int8 or int4"):
        Target.load("/nowhere", quantize="int3")


@kinds
def test_float16_is_refused(plain_path, kind):
    with pytest.raises(SpectrainError, match="float16 cannot be kept"):
        Target.load(str(plain_path), dtype="float16", quantize=kind)
    with pytest.raises(SpectrainError, match="float16 cannot be kept"):
        quantise(nn.Sequential(nn.Linear(32, 16)).half(), kind)


def test_a_device_without_the_operator_is_refused():
    with pytest.raises(SpectrainError, match="no int8 product for fpga"):
        module.require("int8", "fpga", torch.float32)
    with pytest.raises(SpectrainError, match="no int4 product for cuda"):  # its own is another
        module.require("int4", "cuda", torch.float32)


@kinds
def test_a_target_of_which_nothing_fits_is_refused(tmp_path, tokenizer, kind):
    odd = save_tiny(tmp_path / "odd", tokenizer, hidden_size=40, intermediate_size=88, head_dim=10)
    with pytest.raises(SpectrainError, match=f"no linear layer .* as {kind}"):
        Target.load(str(odd), quantize=kind)

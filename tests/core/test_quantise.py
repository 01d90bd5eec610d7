"""Int8 layers: the rounding is bounded, the product is that of the rounded weights, and a target
of them keeps what the others keep (cache, trees, shared embeddings)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import save_tiny
from torch import nn

from spectrain.core import quantise as module
from spectrain.core.errors import SpectrainError
from spectrain.core.quantise import MANY_ROWS, QuantisedLinear, quantise
from spectrain.core.target import Target

HALF_ULP = 2.0**-8  # of bfloat16, relative: the most that rounding to it changes


def rounded(layer: QuantisedLinear) -> torch.Tensor:
    """The weights that the layer multiplies by, exactly: [O, I] float64."""
    return layer.quantised.double() * layer.scale.double()[:, None]


def linear(bias: bool = True, outputs: int = 67) -> nn.Linear:
    """Rows of very different size, one of zeros, one of a single entry."""
    torch.manual_seed(0)
    layer = nn.Linear(96, outputs, bias=bias)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-6, 4, outputs)[:, None])
        layer.weight[3] = 0
        layer.weight[4] = 0
        layer.weight[4, 17] = -0.3
    return layer


@pytest.fixture(scope="module")
def quantised(tiny_path) -> Target:
    return Target.load(str(tiny_path), quantize="int8")


def tokens(count: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(3, 380, (1, count), generator=torch.Generator().manual_seed(seed))


def test_each_weight_is_off_by_half_a_scale_at_most():
    """And the scale is no larger than 127 steps to the row's largest weight ask for."""
    plain = linear()
    layer = QuantisedLinear(plain)
    gap = (rounded(layer) - plain.weight.double()).abs()
    assert (gap <= layer.scale.double()[:, None] / 2 * (1 + 1e-6)).all()
    largest = plain.weight.abs().amax(dim=1).double()
    assert (layer.scale.double() * 127 <= largest * (1 + HALF_ULP) + 1e-25).all()


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8, MANY_ROWS - 1, MANY_ROWS, 2 * MANY_ROWS])
def test_product_is_that_of_the_rounded_weights(rows, bias):
    """Both routes. Inputs of bfloat16 make it exact up to the result's own rounding to bfloat16,
    the sums' float32 (2⁻²⁴ for each of 96 terms), and the bias's addition."""
    layer = QuantisedLinear(linear(bias))
    x = torch.randn(rows, 2, 96).to(torch.bfloat16).float()
    got = layer(x)
    assert got.dtype == torch.float32
    assert got.shape == (rows, 2, 67)
    exact = x.double() @ rounded(layer).T
    sums = x.double().abs() @ rounded(layer).abs().T
    expected = exact if layer.bias is None else exact + layer.bias.double()
    allowed = exact.abs() * HALF_ULP + (sums + expected.abs()) * 97 * 2.0**-24
    assert ((got.double() - expected).abs() <= allowed + 1e-25).all()


@torch.inference_mode()
def test_product_is_near_the_plain_one():
    """Half a scale for each weight, half a unit of bfloat16 for each input, one for the result."""
    plain = linear()
    layer = QuantisedLinear(plain)
    x = torch.randn(5, 96)
    expected = F.linear(x.double(), plain.weight.double(), plain.bias.double())
    sums = x.double().abs() @ plain.weight.double().abs().T
    by_weights = x.double().abs().sum(-1, keepdim=True) * layer.scale.double() / 2
    allowed = by_weights + 3 * HALF_ULP * (sums + by_weights + expected.abs())
    gap = (layer(x).double() - expected).abs()
    assert (gap <= allowed + 1e-25).all()
    assert (gap.amax(0) > 0)[5:].all()  # the weights were rounded indeed


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it():
    """To the bit: what a verify pass reads is what single steps would have read."""
    layer = QuantisedLinear(linear())
    x = torch.randn(MANY_ROWS - 1, 96)
    alone = torch.cat([layer(row[None]) for row in x])
    for count in (2, 3, 5, 8, 16, MANY_ROWS - 1):
        assert torch.equal(layer(x[:count]), alone[:count])


def test_layers_the_operator_cannot_take_stay():
    """It reads past the end of rows that are no multiple of 16."""
    model = nn.Sequential(nn.Linear(40, 32), nn.Sequential(nn.Linear(32, 5)), nn.LayerNorm(5))
    assert quantise(model, "int8") == 1
    assert isinstance(model[0], nn.Linear)
    assert isinstance(model[1][0], QuantisedLinear)


@torch.inference_mode()
def test_target_is_the_one_with_rounded_weights(quantised, tiny_path):
    """Against a plain float32 target that was given the same rounded weights; what is left is
    bfloat16's rounding of inputs and results: 8 matrices a layer, 4 layers, each 2⁻⁸."""
    reference = Target.load(str(tiny_path), pack_weights=False)
    ours = dict(quantised.decoder.named_modules())
    for name, layer in reference.decoder.named_modules():
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(rounded(ours[name]).float())
    head = rounded(quantised.readout._lm_head).float()
    expected = F.linear(reference.forward(tokens(20)).last, head)
    got = quantised.logits(quantised.forward(tokens(20)).last)
    scale = expected.abs().max()
    assert (got - expected).abs().max() <= 16 * HALF_ULP * scale
    assert (got - expected).square().mean().sqrt() <= 2 * HALF_ULP * scale


@torch.inference_mode()
def test_target_says_nearly_what_the_plain_one_says(quantised, tiny):
    """127 steps a weight: the argmax of a peaked random model seldom changes."""
    ids = tokens(64)
    ours, plain = (t.logits(t.forward(ids).last) for t in (quantised, tiny))
    assert ours.dtype == plain.dtype == torch.float32
    assert (ours.argmax(-1) == plain.argmax(-1)).float().mean() > 0.9
    assert not torch.equal(ours, plain)


def test_what_a_head_shares_is_not_rounded(quantised, tiny):
    """Tied: lm_head's weight is the embedding; `rows`, which heads are made of, read the plain."""
    ids = torch.arange(20)
    assert quantised.readout.embedding.weight is quantised.readout.weight
    assert torch.equal(quantised.readout.embed(ids), tiny.readout.embed(ids))
    assert torch.equal(quantised.readout.rows(ids)[0], tiny.readout.rows(ids)[0])
    assert isinstance(quantised.readout._lm_head, QuantisedLinear)
    assert not any(isinstance(m, nn.Linear) for m in quantised.decoder.modules())


def test_it_is_the_same_target_and_says_that_it_is_quantised(quantised, tiny):
    """A head of the plain target may be used: it is checked by the fingerprint."""
    assert quantised.fingerprint == tiny.fingerprint
    assert (quantised.quantisation, tiny.quantisation) == ("int8", None)
    assert (quantised.dtype, quantised.name) == (tiny.dtype, tiny.name)


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
    with pytest.raises(SpectrainError, match="unknown quantisation 'int3'; choose int8"):
        Target.load("/nowhere", quantize="int3")


def test_float16_is_refused(tiny_path):
    with pytest.raises(SpectrainError, match="float16 cannot be kept"):
        Target.load(str(tiny_path), dtype="float16", quantize="int8")
    with pytest.raises(SpectrainError, match="float16 cannot be kept"):
        quantise(nn.Sequential(nn.Linear(16, 16)).half(), "int8")


def test_a_device_without_the_operator_is_refused():
    with pytest.raises(SpectrainError, match="no int8 product for fpga"):
        module.require("int8", "fpga", torch.float32)


def test_a_target_of_which_nothing_fits_is_refused(tmp_path, tokenizer):
    odd = save_tiny(tmp_path / "odd", tokenizer, hidden_size=40, intermediate_size=88, head_dim=10)
    with pytest.raises(SpectrainError, match="no linear layer of the target"):
        Target.load(str(odd), quantize="int8")

"""The target adapter says what the stock model says, for every supported architecture."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from tiny_models import SIZES, save_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.errors import SpectrainError
from spectrain.core.packing import can_pack
from spectrain.core.readout import Readout
from spectrain.core.target import Target

SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, **SLIDING}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "mistral-sliding": ("mistral", {"sliding_window": 6}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**SLIDING, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {**SLIDING, "query_pre_attn_scalar": 16}),
    # Learned positions, a table of them for no more than the longest conversation.
    "opt": ("opt", {"max_position_embeddings": 32, "ffn_dim": 64, "word_embed_proj_dim": 48}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory, tokenizer):
    kind, changes = FAMILIES[request.param]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes))
    folder = tmp_path_factory.mktemp("family") / request.param
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(path):
    """Our adapter and the library's own eager model from the same files."""
    target = Target.load(str(path), pack_weights=False)
    stock = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    return target, stock


def tokens(count: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(3, 380, (rows, count), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def test_features_are_the_library_s(pair):
    """CASES 18, 19: last is what enters lm_head; aux are outputs of the layers that were named."""
    target, stock = pair
    ids = tokens(14)
    layers = target.default_aux_layers()
    features = target.forward(ids, aux_layers=layers)
    expected = stock(ids, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(target.logits(features.last), expected.logits, atol=1e-4, rtol=1e-4)
    # hidden_states[0] are the embeddings, so the output of layer i is entry i + 1.
    aux = torch.cat([expected.hidden_states[i + 1] for i in layers[:2]], dim=-1)
    width = 2 * target.hidden_size
    torch.testing.assert_close(features.aux[..., :width], aux, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_documents_of_one_row_are_read_as_if_alone(pair):
    """Rows of several documents, longer than a window and than a table of positions, and a padded
    one: at every position what the library says of that document by itself."""
    target, stock = pair
    lengths = [[14, 9, 16], [3, 11]]
    own = [[tokens(length, 1) + place for place, length in enumerate(row)] for row in lengths]
    longest = max(map(sum, lengths))
    ids = torch.zeros(2, longest, dtype=torch.int64)
    starts = torch.arange(longest).repeat(2, 1)
    begins = [list(accumulate(row, initial=0))[:-1] for row in lengths]
    for row, documents in enumerate(own):
        for begin, one in zip(begins[row], documents, strict=True):
            ids[row, begin : begin + one.shape[1]] = one
            starts[row, begin : begin + one.shape[1]] = begin
    got = target.logits(target.forward(ids, starts=starts).last)
    for row, documents in enumerate(own):
        for begin, one in zip(begins[row], documents, strict=True):
            alone = stock(one, use_cache=False).logits[0]
            part = got[row, begin : begin + one.shape[1]]
            torch.testing.assert_close(part, alone, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_cache_in_pieces_with_rollback_equals_one_pass(pair):
    """Rows of unequal length; a rejected block is overwritten and leaves no trace."""
    target, stock = pair
    ids = tokens(16)
    expected = stock(ids, use_cache=False).logits
    cache = target.new_cache(2, 24)
    lengths = torch.tensor([5, 8])
    first = target.forward(ids[:, :8], cache=cache, view=8)
    cache.commit(lengths)
    target.forward(tokens(4, 2), cache=cache, view=12)  # drafted, none accepted: no commit
    block = torch.stack([ids[b, n : n + 6] for b, n in enumerate(lengths.tolist())])
    second = target.forward(block, cache=cache, view=16)
    for row, length in enumerate(lengths.tolist()):
        got = torch.cat([first.last[row, :length], second.last[row]])
        torch.testing.assert_close(
            target.logits(got), expected[row, : length + 6], atol=1e-4, rtol=1e-4
        )


@torch.no_grad()
def test_tree_nodes_see_their_ancestors_only(pair):
    """Two branches written side by side give what each gives alone."""
    target, stock = pair
    prefix, left, right = tokens(9, 1), tokens(3, 1), tokens(3, 1) + 1
    cache = target.new_cache(1, 32)
    target.forward(prefix, cache=cache)
    cache.commit(torch.tensor([9]))
    nodes = torch.cat([left, right], dim=1)
    ancestors = torch.block_diag(*[torch.ones(3, 3).tril()] * 2).bool()
    depths = torch.tensor([0, 1, 2, 0, 1, 2])
    got = target.forward(nodes, cache=cache, ancestors=ancestors, depths=depths)
    for branch, part in ((left, slice(0, 3)), (right, slice(3, 6))):
        alone = stock(torch.cat([prefix, branch], dim=1), use_cache=False).logits[0, 9:]
        torch.testing.assert_close(target.logits(got.last[0, part]), alone, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_packed_weights_change_nothing_but_rounding(path, pair):
    packed = Target.load(str(path))
    ids = tokens(10)
    assert can_pack(), "this build of torch has no oneDNN linear; the packed path is not tested"
    assert any(type(m).__name__ == "PackedLinear" for m in packed.decoder.modules())
    expected = pair[0].logits(pair[0].forward(ids).last)
    torch.testing.assert_close(
        packed.logits(packed.forward(ids).last), expected, atol=1e-4, rtol=1e-4
    )
    assert packed.fingerprint == pair[0].fingerprint


def test_bfloat16_names_the_same_target(tiny_path, tiny):
    assert Target.load(str(tiny_path), dtype="bfloat16").fingerprint == tiny.fingerprint


def test_another_target_has_another_fingerprint(tmp_path, tokenizer, tiny):
    other = Target.load(str(save_tiny(tmp_path / "other", tokenizer, seed=5)), pack_weights=False)
    assert other.fingerprint != tiny.fingerprint


def test_pre_norm_state_is_refused(tiny_path, monkeypatch):
    """CASE 18: an adapter that hands out the wrong state does not load."""
    real = Readout.logits
    monkeypatch.setattr(Readout, "logits", lambda self, last: real(self, last * 1.5))
    with pytest.raises(SpectrainError, match="model's own logits"):
        Target.load(str(tiny_path))


def test_recurrent_layers_are_refused(tmp_path, tokenizer):
    """CASE 40: a rejected draft would spoil a recurrent state."""
    config = AutoConfig.for_model(
        "qwen3_next",
        **SIZES | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    )
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SpectrainError, match="linear_attention"):
        Target.load(str(tmp_path))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_the_length_are_refused(tmp_path, tokenizer, kind):
    """A draft row near the switch would change the angles of the rows before it."""
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        parameters |= {"original_max_position_embeddings": 64}
    folder = save_tiny(tmp_path / "target", tokenizer, rope_parameters=parameters)
    with pytest.raises(SpectrainError, match=f"{kind}.*depends on the length"):
        Target.load(str(folder))


@pytest.mark.parametrize(
    ("layers", "expected"), [(30, (1, 14, 26)), (32, (1, 15, 28)), (4, (0, 2, 3)), (6, (1, 3, 4))]
)
def test_default_aux_layers(tiny, monkeypatch, layers, expected):
    monkeypatch.setattr(tiny, "num_layers", layers)
    assert tiny.default_aux_layers() == expected


def test_two_layers_are_too_few(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "num_layers", 2)
    with pytest.raises(SpectrainError, match="three different"):
        tiny.default_aux_layers()


def test_an_architecture_without_named_layers_is_one_line(tmp_path, tokenizer):
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=400)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SpectrainError, match="GPT2LMHeadModel is not supported") as caught:
        Target.load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_unknown_target_is_one_line(tmp_path):
    with pytest.raises(SpectrainError) as caught:
        Target.load(str(tmp_path / "nowhere"))
    assert "\n" not in str(caught.value)

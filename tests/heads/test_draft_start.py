"""Where a small draft model may start: the target's layers, or a model of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from draft_models import folder_of
from head_kinds import create
from tiny_models import SIZES, make_batch
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.batch import counted
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads import draft_init
from spectrain.heads.draft_config import DraftOptions


def test_frozen_tables_are_copies(target):
    head = create(target, "draft", random=False)
    frozen = {name for name, p in head.named_parameters() if not p.requires_grad}
    tied = target.model.config.tie_word_embeddings
    assert frozen == {"decoder.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    own, theirs = head.decoder.get_input_embeddings().weight, target.readout.embedding.weight
    assert torch.equal(own, theirs)
    assert own.data_ptr() != theirs.data_ptr()


def test_a_draft_of_the_target_s_layers(whole):
    """Evenly chosen from first to last, with embedding, final norm and output layer."""
    assert draft_init.chosen_layers(9, 4) == [0, 2, 5, 8]
    assert draft_init.chosen_layers(30, 1) == [0]
    for total in range(1, 40):
        for count in range(1, total + 1):
            assert sorted(set(layers := draft_init.chosen_layers(total, count))) == layers
            assert layers[-1] == (total - 1 if count > 1 else 0)
    head = create(whole, "draft", random=False, layers=2)
    assert head.decoder.config.num_hidden_layers == len(head.decoder.layers) == 2
    for own, theirs in zip(head.decoder.layers, (0, 3), strict=True):
        expected = whole.decoder.layers[theirs].state_dict()
        for name, value in own.state_dict().items():
            assert torch.equal(value, expected[name])
    assert torch.equal(head.decoder.norm.weight, whole.decoder.norm.weight)
    tokens = torch.randint(3, 380, (2, 11))
    every = create(whole, "draft", random=False, layers=4)
    reply = torch.ones_like(tokens)
    (unrolled,) = every.unroll(make_batch(whole, every, tokens, reply), 1)
    rows = counted(reply, 0).flatten().nonzero().flatten() + 1
    expected = whole.logits(whole.forward(tokens).last).flatten(0, 1)[rows]
    torch.testing.assert_close(every.logits(unrolled.hidden, 0), expected)


def test_layers_of_two_kinds(tmp_path, tokenizer):
    """Facts that a config gives layer by layer follow the chosen layers."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **SIZES)).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), pack_weights=False)
    head = create(target, "draft", random=False, layers=3)
    kinds = target.config.layer_types
    assert head.decoder.config.layer_types == [kinds[0], kinds[1], kinds[3]]


def test_a_model_to_start_from(tmp_path, tokenizer, tiny):
    folder = folder_of(tmp_path, tokenizer)
    head = create(tiny, "draft", random=False, model=str(folder), steps=3)
    assert head.config.steps == 3
    stock = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in stock.get_decoder().state_dict().items():
        assert torch.equal(head.decoder.state_dict()[name], value)
    with pytest.raises(SpectrainError, match=r"head\.model: .*nowhere"):
        create(tiny, "draft", model="./nowhere")


def test_impossible_options(tiny):
    with pytest.raises(SpectrainError, match=r"head\.layers: 5 is not between 1 and 4"):
        create(tiny, "draft", layers=5)
    with pytest.raises(ValueError, match="exclude each other"):
        DraftOptions(model="a", layers=2)


def test_a_target_that_cannot_be_cut_is_one_line(tiny, monkeypatch):
    strange = copy.copy(tiny)
    strange.decoder = copy.deepcopy(tiny.decoder)
    strange.decoder.layers[3].extra = torch.nn.Linear(2, 2)
    with pytest.raises(SpectrainError, match=r"cannot be cut .*extra.*head\.model") as caught:
        create(strange, "draft", layers=4)
    assert "\n" not in str(caught.value)

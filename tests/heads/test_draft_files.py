"""The small draft model: tokenizers that have to agree, folders that are or become heads."""

from __future__ import annotations

import copy
import types
from pathlib import Path

import pytest
import torch
from draft_models import folder_of
from head_kinds import create
from safetensors.torch import load_file
from tiny_models import make_tokenizer

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads.draft_model import DraftModelHead
from spectrain.heads.io import load_head, save_head
from spectrain.heads.tokenizers import first_difference


def words(tokenizer, change):
    """Its vocabulary with some ids put elsewhere or left out (None)."""
    content = {i: t for t, i in tokenizer.get_vocab().items()} | change
    ids = {token: i for i, token in content.items() if token is not None}
    return types.SimpleNamespace(get_vocab=lambda: ids)


def test_the_first_entry_that_differs_is_named(tokenizer):
    known = {i: t for t, i in tokenizer.get_vocab().items()}
    assert first_difference(tokenizer, make_tokenizer()) is None
    cases = {
        f"id 17: the draft has {known[17]!r}, the target 'abd'": {17: "abd", 99: "x"},
        f"id 383: the draft has {known[383]!r}, the target nothing": {383: None},
        "id 384: the draft has nothing, the target 'more'": {384: "more"},
    }
    for message, change in cases.items():
        assert first_difference(tokenizer, words(tokenizer, change)) == message


def test_another_end_of_reply_is_no_obstacle(tiny):
    """A base model and its chat version share ids and end replies differently."""
    other = copy.deepcopy(tiny.tokenizer)
    other.eos_token = "<|endoftext|>"
    assert other.eos_token_id != tiny.tokenizer.eos_token_id
    assert first_difference(other, tiny.tokenizer) is None


def test_another_tokenizer_is_refused(tmp_path, tiny, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<new>"])
    folder = folder_of(tmp_path, other)
    head = load_head(folder)
    with pytest.raises(SpectrainError, match=r"^here: .*id 384: the draft has '<new>'"):
        head.check_target(tiny, "here")
    with pytest.raises(SpectrainError, match=f"{folder}: .*id 384"):
        create(tiny, "draft", model=str(folder))
    with pytest.raises(SpectrainError, match="385 tokens, the target one of 384"):
        head.bind(tiny.readout)


# ── files, and what a draft starts from ──────────────────────────────────────


def test_a_folder_of_transformers_is_a_head(tmp_path, tokenizer, tiny, whole):
    """For every target with its tokenizer; once saved with one, it is that target's."""
    folder = folder_of(tmp_path, tokenizer)
    head = load_head(folder)
    assert isinstance(head, DraftModelHead)
    assert not head.training
    for target in (whole, tiny):
        head.check_target(target, "draft")
        head.bind(target.readout)
    save_head(head, tmp_path / "saved")
    again = load_head(tmp_path / "saved")
    again.check_target(tiny, "saved")
    with pytest.raises(SpectrainError, match="trained for"):
        again.check_target(whole, "saved")


def test_the_file_holds_each_tensor_once(target, tmp_path):
    """Tied tables are one tensor under one name; nothing is missing, nothing is shared."""
    head = create(target, "draft", train_embeddings=True)
    save_head(head, tmp_path / "head")
    names = set(load_file(tmp_path / "head/model.safetensors"))
    tied = target.model.config.tie_word_embeddings
    assert ("lm_head.weight" in names) is not tied
    assert "decoder.embed_tokens.weight" in names
    again = load_head(tmp_path / "head")
    assert {n for n, p in again.named_parameters() if p.requires_grad} == names - {"d2t", "t2d"}
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no head here"),
        ("runs/nowhere", "not usable as a draft model: cannot load"),
        ("./runs/deep/nowhere", "no head here"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_line(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpectrainError, match=message) as caught:
        load_head(Path(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["smollm2-135m", "owner/name"])
def test_a_name_is_taken_for_a_model_where_there_is_no_such_folder(
    name, tmp_path, monkeypatch, tokenizer, tiny
):
    monkeypatch.chdir(tmp_path)
    asked = []
    real = Target.load
    folder = str(folder_of(tmp_path, tokenizer))
    monkeypatch.setattr(
        Target, "load", lambda asked_for, **more: asked.append(asked_for) or real(folder, **more)
    )
    assert load_head(Path(name)).family == "draft"
    assert asked == [name]
    save_head(create(tiny, "draft"), tmp_path / name)
    assert load_head(Path(name)).decoder.config.num_hidden_layers == 2
    assert asked == [name]


def test_a_config_that_cannot_be_built_is_one_line(tiny, tmp_path):
    head = create(tiny, "draft")
    head.config = head.config.model_copy(
        update={"model": head.config.model | {"model_type": "of the future"}}
    )
    save_head(head, tmp_path / "head")
    with pytest.raises(SpectrainError, match="cannot build the draft model") as caught:
        load_head(tmp_path / "head")
    assert "\n" not in str(caught.value)


def test_rotary_frequencies_keep_their_type(tiny):
    """In bfloat16 they would be off by whole turns after a few hundred positions."""
    head = create(tiny, "draft", random=False)
    before = head.decoder.rotary_emb.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.decoder.norm.weight.dtype == torch.bfloat16
    assert torch.equal(head.decoder.rotary_emb.inv_freq, before)

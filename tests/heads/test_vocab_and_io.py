"""The draft vocabulary and strict loading."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from chat_tokenizers import KINDS
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import make_head

from spectrain.core.errors import SpectrainError
from spectrain.heads import vocab
from spectrain.heads.io import load_head, save_head
from spectrain.heads.registry import family


@given(st.data())
@settings(deadline=None)
def test_choice_keeps_the_most_frequent_and_the_pinned(data):
    """CASE 30: special tokens stay whatever the corpus; padding rows never enter."""
    total = data.draw(st.integers(2, 40))
    usable = data.draw(st.integers(1, total))
    size = data.draw(st.integers(1, usable))
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=total, max_size=total)))
    pinned = data.draw(st.lists(st.integers(0, usable - 1), max_size=size, unique=True))
    ids = vocab.choose_tokens(counts, size, pinned, usable).tolist()
    assert ids == sorted(set(ids))
    assert len(ids) == size
    assert set(pinned) <= set(ids)
    assert max(ids) < usable
    left_out = set(range(usable)) - set(ids)
    free = set(ids) - set(pinned)
    if left_out and free:
        assert max(int(counts[i]) for i in left_out) <= min(int(counts[i]) for i in free)
    d2t, t2d = vocab.maps(torch.tensor(ids), total)
    assert (torch.arange(size) + d2t).tolist() == ids == t2d.nonzero().flatten().tolist()


@pytest.mark.parametrize("size", [0, 9])
def test_impossible_sizes(size):
    with pytest.raises(SpectrainError, match="draft_vocab_size"):
        vocab.choose_tokens(torch.ones(8), size, [], 8)


def test_no_room_for_special_tokens():
    with pytest.raises(SpectrainError, match="no room"):
        vocab.choose_tokens(torch.ones(8), 2, [1, 2, 3], 8)


@pytest.mark.parametrize("kind", KINDS)
def test_single_bytes_are_known_by_what_they_say(kind):
    """CASE 30. Of byte-level tokenizers all names are one character; others have none, or those of
    byte fallback."""
    tokenizer = KINDS[kind]()
    tokenizer.add_tokens(["Ġ", "<0x41>"])  # ordinary text, where it is no byte already
    entries = tokenizer.get_vocab().items()
    byte_level = {i for name, i in entries if len(name) == 1}
    fallback = {i for name, i in entries if re.fullmatch("<0x[0-9A-F]{2}>", name)}
    expected = {"byte_level": byte_level, "metaspace": fallback, "legacy_metaspace": fallback}
    assert vocab.byte_tokens(tokenizer) == expected.get(kind, set())
    assert len(expected.get(kind, range(256))) == 256


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_single_bytes_are_in_where_they_are_a_quarter_at_most(kind):
    tokenizer = KINDS[kind]()
    single = vocab.byte_tokens(tokenizer)
    readout = SimpleNamespace(usable=len(tokenizer))
    target = SimpleNamespace(tokenizer=tokenizer, readout=readout, stop_ids=(2,))
    small, large = (set(vocab.always_in(target, size)) for size in (1023, 1024))
    assert small == {*tokenizer.all_special_ids, 2}
    assert large == small | single


@pytest.fixture
def saved(tiny, tmp_path):
    head = make_head(tiny)
    save_head(head, tmp_path / "head", {"provenance.json": {"seed": 1}})
    return head, tmp_path / "head"


def test_round_trip_is_exact(saved, tiny):
    head, folder = saved
    again = load_head(folder)
    assert again.config == head.config
    assert again.state_dict().keys() == head.state_dict().keys()
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    hidden = torch.randn(3, tiny.hidden_size)
    torch.testing.assert_close(again.logits(hidden, 0), head.logits(hidden, 0), atol=0, rtol=0)
    assert json.loads((folder / "provenance.json").read_text()) == {"seed": 1}


def test_a_map_is_stored_only_where_there_is_one(tiny, whole, tmp_path):
    """CASE 31: identity is the absence of a map. A padded target needs one even for all tokens:
    its rows beyond the tokenizer are never drafted."""
    padded, identity = make_head(tiny, draft_vocab=384), make_head(whole, draft_vocab=384)
    assert "d2t" in padded.state_dict()
    assert not {"d2t", "t2d"} & identity.state_dict().keys()
    ids = torch.arange(384)
    assert torch.equal(padded.to_target(ids), ids)
    assert torch.equal(identity.to_target(ids), ids)
    probabilities = torch.rand(3, 384)
    torch.testing.assert_close(identity.spread(probabilities), probabilities)
    save_head(identity, tmp_path / "head")
    again = load_head(tmp_path / "head")
    assert torch.equal(again.to_target(ids), ids)


def test_spread_puts_each_probability_at_its_token(tiny):
    head = make_head(tiny)
    probabilities = torch.rand(2, 120)
    full = head.spread(probabilities)
    ids = head.t2d.nonzero().flatten()
    assert full.shape == (2, 392)
    torch.testing.assert_close(full[:, ids], probabilities)
    torch.testing.assert_close(full.sum(-1), probabilities.sum(-1))


def damage(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_missing_extra_and_misshapen_tensors_are_named(saved):
    """CASE 32"""
    _, folder = saved

    def change(tensors):
        tensors["stranger.weight"] = torch.zeros(2)
        tensors["fc.weight"] = torch.zeros(3, 3)
        del tensors["norm.weight"]

    damage(folder, change)
    with pytest.raises(SpectrainError) as caught:
        load_head(folder)
    line = str(caught.value)
    assert "missing norm.weight" in line
    assert "unknown stranger.weight" in line
    assert "fc.weight has shape (3, 3)" in line


def test_absolute_map_is_refused(saved):
    """CASE 31: ids where offsets belong would double every id."""
    _, folder = saved

    def change(tensors):
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    damage(folder, change)
    with pytest.raises(SpectrainError, match="offsets"):
        load_head(folder)


def test_reduced_vocabulary_without_map_is_refused(saved):
    """CASE 31"""
    _, folder = saved
    damage(folder, lambda tensors: tensors.pop("d2t"))
    with pytest.raises(SpectrainError, match="missing d2t"):
        load_head(folder)


def test_head_is_untied_even_when_the_target_is_tied(saved, tiny):
    """CASE 24: the head's own rows, whatever the target does."""
    _, folder = saved
    assert tiny.model.config.tie_word_embeddings
    assert load_head(folder).lm_head.weight.shape == (120, tiny.hidden_size)


def test_truncated_file_and_foreign_folder(saved, tmp_path):
    head, folder = saved
    assert load_head(tmp_path).config == head.config  # the run's folder stands for its head
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SpectrainError, match="safetensors"):
        load_head(folder)
    with pytest.raises(SpectrainError, match="no head here"):
        load_head(tmp_path / "elsewhere")


def test_unknown_family_and_bad_config(saved):
    _, folder = saved
    with pytest.raises(SpectrainError, match="did you mean 'eagle3'"):
        family("eagle33")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "steps": 0}))
    with pytest.raises(SpectrainError, match="steps"):
        load_head(folder)


def test_another_target_is_refused(saved, tiny):
    head, folder = saved
    head.check_target(tiny, str(folder))

    class Other:
        fingerprint, name = "0" * 16, "other"

    with pytest.raises(SpectrainError, match="trained for"):
        head.check_target(Other, str(folder))

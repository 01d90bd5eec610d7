"""Rows of several conversations, for layers that look at a part of what came before."""

from __future__ import annotations

import pytest
import torch
from head_kinds import create
from mtp_variants import ARCHITECTURES, every_variant, make
from packed_rows import documents, pack, require_same_sums
from tiny_models import SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.heads.noise import document_lengths, document_noise


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@every_variant
def test_mtp_of_every_kind_of_layer(targets, architecture, variant):
    """Windows, soft caps, rotary positions of two kinds, latent attention, experts."""
    target = targets(architecture)
    head = make(target, variant)
    require_same_sums(head, documents(target, head, 21))


@pytest.mark.parametrize("kind", ["gemma2", "mistral", "opt"])
def test_drafts_of_other_architectures(tmp_path, tokenizer, kind):
    """Learned positions, too: the longest conversation counts and not the row."""
    sizes = {**SIZES, "vocab_size": 384, "sliding_window": 6, "initializer_range": 0.3}
    if kind == "opt":
        sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 48, "max_position_embeddings": 40}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), pack_weights=False)
    head = create(target, "draft", layers=2)
    own = documents(target, head, 22)
    assert sum(one.tokens.shape[1] for one in own) > 45
    require_same_sums(head, own)
    if kind == "opt":
        for one in own[:2]:  # a conversation that is too long is refused in a row, too
            one.tokens, one.reply = (v.repeat(1, 3) for v in (one.tokens, one.reply))
            one.last, one.argmax = one.last.repeat(1, 3, 1), one.argmax.repeat(1, 3)
        longest = max(one.tokens.shape[1] for one in own)
        assert longest > 40
        with pytest.raises(SpectrainError, match=f"40 positions, {longest} are needed"):
            head.objective(pack([own]))


def test_noise_is_that_of_the_conversation(tiny):
    """Bit for bit at every place up to the end of a conversation's last reply, 0 elsewhere."""
    own = documents(tiny, create(tiny, "eagle1"), 4, count=3)
    own[1].reply[0, -3:] = 0  # tokens behind the last reply
    batch = pack([[own[0], own[1]], [own[2]]], extra=4)
    torch.manual_seed(5)
    together = document_noise(batch, batch.last)
    begin = own[0].tokens.shape[1]
    for one, row, start in zip(own, (0, 0, 1), (0, begin, 0), strict=True):
        torch.manual_seed(5)
        stop = start + one.tokens.shape[1]
        alone = document_noise(one, one.last)[0]
        assert torch.equal(together[row, start:stop], alone)
        assert alone[:-3].any(1).all()
        lengths = document_lengths(batch)[row, start:stop]
        assert torch.equal(lengths, document_lengths(one)[0])
        together[row, start:stop] = 0
    assert not together.any()

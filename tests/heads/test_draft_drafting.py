"""The small draft model drafts: the text is the target's, whatever the draft is."""

from __future__ import annotations

import math

import pytest
import torch
from draft_models import folder_of, plain
from head_kinds import create
from tiny_models import SIZES, make_batch, random_rows
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator
from spectrain.heads.io import load_head, save_head
from spectrain.heads.tree import TreeDefaults


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 380, (n,), generator=generator) for n in (1, 5, 17, 30, 9, 2)]


@pytest.mark.parametrize("together", [True, False])
def test_greedy_text_is_the_target_s(target, prompts, tmp_path, tokenizer, together):
    """With a draft of random weights, and with one that is right half of the time; in one batch of
    unequal rows and one by one."""
    groups = [prompts] if together else [[prompt] for prompt in prompts]
    stranger = load_head(folder_of(tmp_path, tokenizer, vocab_size=384))
    stranger.check_target(target, "draft")
    near = create(target, "draft", random=False, layers=3)
    accepted = 0
    for head in (stranger.bind(target.readout), near):
        generator = Generator(target, head, 4)
        for group in groups:
            done = generator.generate(group, 24)
            assert [c.tokens for c in done] == plain(target, group, 24)
            accepted += sum(run * times for c in done for run, times in c.runs.items())
    assert accepted > 0


@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_the_target_as_its_own_draft_is_always_right(whole, prompts, gamma):
    """τ is γ+1 up to the end of the reply: no forward commits less before the last."""
    head = load_head(whole.name)
    head.check_target(whole, "draft")
    head.bind(whole.readout)
    done = Generator(whole, head, gamma).generate(prompts, 25)
    assert [c.tokens for c in done] == plain(whole, prompts, 25)
    for completion in done:
        assert completion.forwards == math.ceil(completion.committed / (gamma + 1))
        short = [run for run, times in completion.runs.items() for _ in range(times) if run < gamma]
        assert len(short) <= 1


def test_sampled_text_from_its_own_draft_is_accepted(whole, prompts):
    head = load_head(whole.name)
    head.check_target(whole, "draft")
    head.bind(whole.readout)
    done = Generator(whole, head, 3).generate(prompts, 25, Sampling(temperature=0.8))
    assert sum(c.committed for c in done) / sum(c.forwards for c in done) > 3.5


@pytest.mark.parametrize("kind", ["gemma2", "mistral", "opt"])
def test_other_architectures(tmp_path, tokenizer, kind):
    """Sliding windows, soft caps and scaled embeddings, learned positions: its own draft again."""
    sizes = {**SIZES, "vocab_size": 384, "sliding_window": 6, "initializer_range": 0.3}
    if kind == "opt":
        sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 48}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), pack_weights=False)
    head = load_head(tmp_path)
    head.check_target(target, "draft")
    head.bind(target.readout)
    prompts = [torch.randint(3, 380, (n,)) for n in (4, 20)]
    done = Generator(target, head, 3).generate(prompts, 30)
    assert [c.tokens for c in done] == plain(target, prompts, 30)
    assert all(c.forwards == math.ceil(c.committed / 4) for c in done)
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head").bind(target.readout)
    tokens, reply = random_rows(torch.Generator().manual_seed(2))
    batch = make_batch(target, head, tokens, reply)
    torch.testing.assert_close(again.objective(batch).loss, head.objective(batch).loss)


def test_positions_beyond_the_draft_s_own(tmp_path, tokenizer, tiny):
    """CASE 36: rotary positions go on, of learned ones the last stands for all that follow: the
    guesses are worse, the text is the target's. Training there is refused."""
    head = load_head(folder_of(tmp_path, tokenizer, max_position_embeddings=8))
    head.check_target(tiny, "draft")
    head.bind(tiny.readout)
    prompt = torch.randint(3, 380, (30,))
    done = Generator(tiny, head, 3).generate([prompt], 8)
    assert [c.tokens for c in done] == plain(tiny, [prompt], 8)

    config = AutoConfig.for_model(
        "opt", **{**SIZES, "max_position_embeddings": 16, "ffn_dim": 64, "word_embed_proj_dim": 48}
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "learned")
    tokenizer.save_pretrained(tmp_path / "learned")
    head = load_head(tmp_path / "learned")
    head.check_target(tiny, "draft")
    head.bind(tiny.readout)
    for way in ({"draft_tokens": 3}, {"tree": TreeDefaults(top_k=2, depth=3, nodes=6)}):
        done = Generator(tiny, head, **way).generate([prompt, prompt[:12]], 8)
        assert [c.tokens for c in done] == plain(tiny, [prompt, prompt[:12]], 8)
    assert head.positions == 16
    tokens, reply = torch.randint(3, 380, (1, 17)), torch.ones(1, 17, dtype=torch.int64)
    with pytest.raises(SpectrainError, match="16 positions, 17 are needed"):
        head.objective(make_batch(tiny, head, tokens, reply))


# ── vocabularies ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("own", [384, 392, 400])
def test_tables_of_other_sizes(target, prompts, tmp_path, tokenizer, own):
    """Rows beyond the tokenizer may be as many as they like, and are never drafted."""
    head = load_head(folder_of(tmp_path, tokenizer, vocab_size=own))
    with torch.no_grad():
        head.decoder.get_input_embeddings().weight[384:] *= 100
    head.check_target(target, "draft")
    head.bind(target.readout)
    assert head.config.vocab_size == target.vocab_size
    assert head.config.draft_vocab_size == 384
    assert head.reduced == (target.vocab_size > 384)
    assert head.draft_ids.tolist() == list(range(384))
    done = Generator(target, head, 3).generate(prompts, 12)
    assert [c.tokens for c in done] == plain(target, prompts, 12)
    probabilities = torch.rand(2, 384)
    torch.testing.assert_close(head.spread(probabilities)[:, :384], probabilities)
    save_head(head, tmp_path / "saved")
    again = load_head(tmp_path / "saved")
    again.check_target(target, "saved")
    assert again.bind(target.readout).config == head.config

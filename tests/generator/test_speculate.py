"""The engine: greedy output is the library's, whatever the head guesses; ends where it should."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from head_kinds import KINDS
from helped_heads import GoodGuesser, NoisyTarget
from scipy.stats import chisquare
from tiny_models import SIZES, make_head
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.generator import verify
from spectrain.generator.decode import complete
from spectrain.generator.rules import Typical
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Clock, Generator
from spectrain.heads.tree import TreeDefaults


@pytest.fixture(scope="module")
def stock(tiny_path):
    return AutoModelForCausalLM.from_pretrained(tiny_path).eval()


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 30, (50,), generator=generator).tolist()
    return [torch.randint(3, 380, (n,), generator=generator) for n in sizes]


def plain(stock, prompt, new, stop_ids=None):
    """`transformers` greedy decoding, one prompt at a time."""
    out = stock.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        do_sample=False,
        max_new_tokens=new,
        **({} if stop_ids is None else {"eos_token_id": list(stop_ids)}),
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_greedy_equals_transformers_on_50_prompts(tiny, stock, prompts, gamma):
    head = make_head(tiny, steps=4, wild=False)
    generator = Generator(tiny, head, gamma)
    accepted = 0
    for prompt in prompts:
        got = generator.generate([prompt], 24)[0]
        assert got.tokens == plain(stock, prompt, 24)
        assert sum(got.runs.values()) == got.forwards
        accepted += sum(run * times for run, times in got.runs.items())
    assert accepted > 0, "nothing was ever accepted: the accepting path was not tested"


@pytest.mark.parametrize("spoil", [2, 3, 5, 1000])
def test_long_accepted_runs_change_nothing(tiny, stock, prompts, spoil):
    """Runs of 0 … γ accepted tokens, the head's own cache kept in step all the while."""
    for prompt in prompts[:12]:
        truth = plain(stock, prompt, 40)
        head = GoodGuesser(make_head(tiny), prompt.tolist() + truth, spoil)
        got = Generator(tiny, head, 4).generate([prompt], 40)[0]
        assert got.tokens == truth
        if spoil == 1000 and len(truth) == 40:
            assert got.forwards == 8  # 39 tokens after the prefill's, 5 a step
            assert got.committed / got.forwards == pytest.approx(39 / 8)


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 6])
def test_stop_token_inside_an_accepted_block(tiny, stock, prompts, place, monkeypatch):
    """CASE 35: the reply ends at the stop token, wherever in a block it falls."""
    checked = 0
    for prompt in prompts[:10]:
        truth = plain(stock, prompt, 20)
        stop = truth[min(place, len(truth) - 1)]
        monkeypatch.setattr(tiny, "stop_ids", (stop,))
        expected = plain(stock, prompt, 20, stop_ids=(stop,))
        head = GoodGuesser(make_head(tiny), prompt.tolist() + truth, 1000)
        got = Generator(tiny, head, 4).generate([prompt], 20)[0]
        assert got.tokens == expected
        assert got.finish == ("stop" if expected[-1] == stop else "length")
        checked += got.finish == "stop"
    assert checked


@pytest.mark.parametrize("new", [0, 1, 2, 3, 7])
def test_new_token_limits(tiny, stock, prompts, new):
    """CASE 42: 0, 1 and limits inside a block."""
    for prompt in prompts[:5]:
        truth = plain(stock, prompt, new) if new else []
        head = GoodGuesser(make_head(tiny), [*prompt.tolist(), *truth, 5, 5, 5], 1000)
        got = Generator(tiny, head, 4).generate([prompt], new)[0]
        assert got.tokens == truth


def test_context_limit(tiny, stock):
    """CASE 42: a prompt near the context's end gets what is left, one beyond it is refused."""
    full = torch.randint(3, 380, (tiny.max_length,), generator=torch.Generator().manual_seed(3))
    near = full[:-5]
    got = Generator(tiny, make_head(tiny), 3).generate([near], 50)[0]
    assert got.tokens == plain(stock, near, 5)
    assert Generator(tiny).generate([full[:-1]], 5)[0].tokens == plain(stock, full[:-1], 1)
    with pytest.raises(SpectrainError, match="512 tokens"):
        Generator(tiny).generate([full], 5)
    with pytest.raises(SpectrainError, match="empty prompt"):
        Generator(tiny).generate([full[:0]], 5)
    with pytest.raises(SpectrainError, match="negative"):
        Generator(tiny).generate([near], -1)


def test_ids_that_the_target_does_not_have_are_refused(tiny):
    """In one line that names the prompt, and not by an index error inside the model."""
    good = torch.tensor([5, 6])
    for ids, told in (([5, tiny.vocab_size], tiny.vocab_size), ([-1, 5], -1)):
        with pytest.raises(SpectrainError, match=f"^prompt 2: {told} is no token of 0 … "):
            Generator(tiny).generate([good, torch.tensor(ids)], 4)
    for stop in (tiny.vocab_size, -1):
        with pytest.raises(SpectrainError, match=f"^stop_ids: {stop} is no token of 0 … "):
            Generator(tiny).generate([good], 4, Sampling(stop_ids=(5, stop)))
    last = tiny.vocab_size - 1
    Generator(tiny).generate([torch.tensor([0, last])], 1, Sampling(stop_ids=(0, last)))


@pytest.mark.parametrize("tree", [None, TreeDefaults(top_k=2, depth=3, nodes=6)])
def test_drafts_beyond_a_table_of_positions(tmp_path, tokenizer, tree):
    """CASE 42 where positions are learned: a block may reach beyond the last one, no reply does."""
    sizes = {**SIZES, "max_position_embeddings": 64, "ffn_dim": 64, "word_embed_proj_dim": 48}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **sizes)).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), pack_weights=False)
    head = KINDS["medusa"](target, None).eval()
    prompts = [torch.randint(3, 380, (n,)) for n in (50, 63)]
    got = Generator(target, head, tree=tree).generate(prompts, 20)
    assert [len(c.tokens) for c in got] == [14, 1]
    assert [c.tokens for c in got] == [plain(model, p, 64 - len(p)) for p in prompts]


@pytest.mark.parametrize("head", [True, False])
def test_a_batch_equals_its_rows(tiny, stock, prompts, head):
    """Rows of unequal length, decoded together."""
    head = make_head(tiny, wild=False) if head else None
    got = Generator(tiny, head, 3 if head else None).generate(prompts[:16], 30)
    for prompt, completion in zip(prompts[:16], got, strict=True):
        assert completion.tokens == plain(stock, prompt, 30)


def test_plain_batches_narrow_when_rows_end(tiny, stock, prompts, monkeypatch):
    """Dropping finished rows from the cache moves the others, and changes nothing."""
    truths = [plain(stock, prompt, 30) for prompt in prompts[:12]]
    stops = tuple({truth[i % len(truth)] for i, truth in enumerate(truths)})
    monkeypatch.setattr(tiny, "stop_ids", stops)
    got = complete(tiny, prompts[:12], 30)
    assert len({len(c.tokens) for c in got}) > 3
    for prompt, completion in zip(prompts[:12], got, strict=True):
        assert completion.tokens == plain(stock, prompt, 30, stop_ids=stops)


def test_same_seed_same_text_other_seed_other_text(tiny, prompts):
    one = complete(tiny, prompts[:6], 20, temperature=1.0, seed=1)
    two = complete(tiny, prompts[:6], 20, temperature=1.0, seed=1)
    other = complete(tiny, prompts[:6], 20, temperature=1.0, seed=2)
    assert [c.tokens for c in one] == [c.tokens for c in two]
    assert [c.tokens for c in one] != [c.tokens for c in other]


def test_rows_that_accept_unequal_counts_equal_their_solo_runs(tiny, stock, prompts):
    """Greedy: in one batch some rows accept whole drafts while others accept nothing."""
    got = Generator(tiny, NoisyTarget(tiny, 0.3), 3).generate(prompts[:16], 30)
    assert len({completion.forwards for completion in got}) > 2
    for prompt, completion in zip(prompts[:16], got, strict=True):
        assert completion.tokens == plain(stock, prompt, 30)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_sampled_text_has_the_exact_distribution(tiny, stock, prompts, noise):
    """Three tokens at temperature 0.6 and top-k 4 from a whole generator: the first by the prefill,
    the others by drafts accepted and rejected. 12,000 draws against the products of the stock
    model's own warped probabilities; by chance it fails at 1 of 10,000 seeds (fixed here).
    """
    head = NoisyTarget(tiny, noise)
    prompt, sampling = prompts[3], Sampling(temperature=0.6, top_k=4, seed=11)

    @torch.no_grad()
    def following(text):
        logits = stock(torch.cat([prompt, torch.tensor(text, dtype=torch.int64)])[None]).logits
        return sampling.warp(logits[0, -1])

    expected = {(): 1.0}
    for _ in range(3):
        grown = {}
        for text, chance in expected.items():
            probabilities = following(list(text))
            for token in probabilities.nonzero().flatten().tolist():
                grown[(*text, token)] = chance * float(probabilities[token])
        expected = grown
    assert len(expected) == 64

    draws, parts = 12_000, 2
    seen, accepted, forwards = Counter(), 0, 0
    for part in range(parts):
        seeded = replace(sampling, seed=part)
        for done in Generator(tiny, head, 2).generate([prompt] * (draws // parts), 3, seeded):
            seen[tuple(done.tokens)] += 1
            accepted += done.committed - done.forwards
            forwards += done.forwards
    # Both paths are taken: drafts are accepted and rejected.
    assert 0.1 < accepted / (2 * forwards) < 0.9
    assert set(seen) <= set(expected)
    common = [text for text, chance in expected.items() if chance * draws >= 5]
    rare = sum(chance for text, chance in expected.items() if chance * draws < 5)
    observed = [seen[text] for text in common] + [draws - sum(seen[text] for text in common)]
    chances = torch.tensor([expected[text] for text in common] + [rare], dtype=torch.float64)
    keep = chances > 0
    observed, chances = torch.tensor(observed)[keep], chances[keep]
    assert len(chances) > 10
    assert chisquare(observed.numpy(), (chances / chances.sum() * draws).numpy()).pvalue > 1e-4


def test_the_rule_gets_the_distribution_that_was_drawn_from(tiny, prompts, monkeypatch):
    """Temperature and top-k change p and q both, before the rule."""
    head = make_head(tiny, wild=False)
    rule, calls = verify.drawn_tree, []
    monkeypatch.setattr(
        verify, "drawn_tree", lambda p, q, *rest: calls.append((p, q)) or rule(p, q, *rest)
    )
    Generator(tiny, head, 3).generate(prompts[:2], 6, Sampling(temperature=0.5, top_k=5))
    assert calls
    for p, q in calls:
        for distribution in (p, q[:, :-1]):  # nothing is drawn after the last node
            assert ((distribution > 0).sum(-1) <= 5).all()
            torch.testing.assert_close(distribution.sum(-1), torch.ones(distribution.shape[:-1]))


def test_typical_acceptance_is_used_by_chains_that_nobody_asked_to_be_drawn(tiny, prompts):
    """Everything is likely enough: a whole chain of the head's likeliest tokens each step."""
    everything = Typical(epsilon=1e-9, delta=1e-9)
    generator = Generator(tiny, NoisyTarget(tiny, 0.1), 3, typical=everything)
    assert not generator.drawn
    for done in generator.generate(prompts[:3], 9, Sampling(1.0)):
        assert max(done.runs) == 3


def test_only_model_forwards_are_no_overhead(tiny, prompts, monkeypatch):
    """A slow sampler shows up as overhead, not as drafting."""
    warp = Sampling.warp
    naps = []

    def slow(self, logits):
        naps.append(time.sleep(0.01))
        return warp(self, logits)

    generator = Generator(tiny, make_head(tiny), 2)
    generator.generate([prompts[0]], 8, Sampling(temperature=1.0))
    monkeypatch.setattr(Sampling, "warp", slow)
    generator.generate([prompts[0]], 8, Sampling(temperature=1.0))
    assert len(naps) > 8
    # The prefill's own sample is before the first step.
    assert generator.clock.overhead >= 0.01 * (len(naps) - 1)
    assert Clock(draft=1.0, verify=2.0, total=4.0).overhead == 1.0


@pytest.mark.parametrize("temperature", [1e-39, 1e-6])
def test_the_smallest_temperatures_are_greedy(tiny, prompts, temperature):
    cold = Generator(tiny).generate(prompts[:3], 8, Sampling(temperature=temperature))
    greedy = Generator(tiny).generate(prompts[:3], 8)
    assert [c.tokens for c in cold] == [c.tokens for c in greedy]


def test_impossible_settings(tiny):
    with pytest.raises(SpectrainError, match="without a head"):
        Generator(tiny, None, 3)
    with pytest.raises(SpectrainError, match="between 1 and 16"):
        Generator(tiny, make_head(tiny), 0)
    with pytest.raises(SpectrainError, match="not of drawn ones"):
        Generator(tiny, make_head(tiny), 3, typical=Typical(), proposal="drawn")
    for bad in ({"temperature": -1}, {"top_p": 0}, {"top_k": -2}):
        with pytest.raises(SpectrainError):
            Sampling(**bad)

"""The engine: greedy output is the library's, whatever the head guesses; ends where it should."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2_contingency
from tiny_models import make_head
from transformers import AutoModelForCausalLM

from spectrain.core.errors import SpectrainError
from spectrain.generator.decode import complete
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator


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


class GoodGuesser:
    """A head whose guesses are the true continuation, now and then spoilt: every run length."""

    def __init__(self, head, truth, spoil):
        self.inner, self.truth, self.spoil, self.calls = head, truth, spoil, 0
        self.config, self.needs = head.config, head.needs
        self.longest_draft = head.longest_draft

    def start(self, rows, slots):
        self.read = 0
        return self.inner.start(rows, slots)

    def begin(self, state, tokens, features, counts):
        self.read = int(counts[0])
        self.inner.begin(state, tokens, features, counts)
        return self.guess(0)

    def extend(self, state, tokens, features, counts, view=0):
        self.read += int(counts[0])
        self.inner.extend(state, tokens, features, counts, view)
        return self.guess(0)

    def expand(self, state, tokens, parents):
        self.inner.expand(state, tokens, parents)
        self.depth += 1
        return self.guess(self.depth)[:, None]

    def guess(self, depth):
        self.depth = depth
        self.calls += 1
        position = self.read + 1 + depth
        token = self.truth[position] if position < len(self.truth) else 5
        if self.calls % self.spoil == 0:
            token = (token + 1) % 380
        return torch.nn.functional.one_hot(torch.tensor([token]), 392).float()

    def to_target(self, ids):
        return ids


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
    assert Generator(tiny).generate([full], 5)[0].tokens == []
    with pytest.raises(SpectrainError, match="513 tokens"):
        Generator(tiny).generate([torch.cat([full, full[:1]])], 5)
    with pytest.raises(SpectrainError, match="empty prompt"):
        Generator(tiny).generate([full[:0]], 5)
    with pytest.raises(SpectrainError, match="negative"):
        Generator(tiny).generate([near], -1)


@pytest.mark.parametrize("head", [True, False])
def test_a_batch_equals_its_rows(tiny, stock, prompts, head):
    """Rows of unequal length that accept and end at different times."""
    head = make_head(tiny, wild=False) if head else None
    got = Generator(tiny, head, 3 if head else None).generate(prompts[:16], 30)
    for prompt, completion in zip(prompts, got, strict=False):
        assert completion.tokens == plain(stock, prompt, 30)


def test_plain_batches_narrow_when_rows_end(tiny, stock, prompts, monkeypatch):
    """Dropping finished rows from the cache moves the others, and changes nothing."""
    truths = [plain(stock, prompt, 30) for prompt in prompts[:12]]
    stops = tuple({truth[i % len(truth)] for i, truth in enumerate(truths)})
    monkeypatch.setattr(tiny, "stop_ids", stops)
    got = complete(tiny, prompts[:12], 30)
    assert len({len(c.tokens) for c in got}) > 3
    for prompt, completion in zip(prompts, got, strict=False):
        assert completion.tokens == plain(stock, prompt, 30, stop_ids=stops)


def test_same_seed_same_text_other_seed_other_text(tiny, prompts):
    one = complete(tiny, prompts[:6], 20, temperature=1.0, seed=1)
    two = complete(tiny, prompts[:6], 20, temperature=1.0, seed=1)
    other = complete(tiny, prompts[:6], 20, temperature=1.0, seed=2)
    assert [c.tokens for c in one] == [c.tokens for c in two]
    assert [c.tokens for c in one] != [c.tokens for c in other]


def test_sampled_text_has_the_plain_distribution(tiny, prompts):
    """Two-sample chi-square over the third new token, 3,000 draws each: plain decoding and a head
    whose guesses are drawn from its own q. By chance it fails at 1 of 10,000 seeds (fixed here)."""
    head = make_head(tiny, wild=False)
    prompt = prompts[3]
    rows = [prompt] * 3000
    sampling = Sampling(temperature=0.5, seed=11)
    spoken = Generator(tiny, head, 2).generate(rows, 3, sampling)
    plain_text = Generator(tiny).generate(rows, 3, Sampling(temperature=0.5, seed=12))
    assert any(c.runs[1] or c.runs[2] for c in spoken)
    table = torch.zeros(2, 392)
    for kind, completions in enumerate((spoken, plain_text)):
        for completion in completions:
            table[kind, completion.tokens[-1]] += 1
    # Rare tokens share a bin, so that the test's assumptions hold.
    common = table.sum(0) >= 20
    bins = torch.cat([table[:, common], table[:, ~common].sum(1, keepdim=True)], dim=1)
    assert bins.shape[1] > 3
    assert chi2_contingency(bins[:, bins.sum(0) > 0].numpy()).pvalue > 1e-4


def test_impossible_settings(tiny):
    with pytest.raises(SpectrainError, match="without a head"):
        Generator(tiny, None, 3)
    with pytest.raises(SpectrainError, match="between 1 and 16"):
        Generator(tiny, make_head(tiny), 0)
    for bad in ({"temperature": -1}, {"top_p": 0}, {"top_k": -2}):
        with pytest.raises(SpectrainError):
            Sampling(**bad)

"""The whole generator with grown trees: every family, unequal rows, ends, exact sampling."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from head_kinds import KINDS
from scipy.stats import chisquare
from tiny_models import SIZES, make_head
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.batch import Features
from spectrain.core.cache import KVCache
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator
from spectrain.generator.tree import shape_for
from spectrain.heads.base import Needs
from spectrain.heads.tree import TreeDefaults

SHAPE = TreeDefaults(top_k=3, depth=4, nodes=11)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 380, (n,), generator=generator) for n in (7, 1, 19)]


class Helped:
    """A head whose guesses are helped: at most places the true next token gets the first, second or
    third rank, so that paths of every length and place are accepted. All calls go on to the head
    itself, and what it says after each commit is kept: `said` (row, verified rows, logits).
    """

    def __init__(self, head, truths, ranks=(0, 0, 1, 1, 2, None)):
        self.inner, self.ranks, self.said = head, ranks, []
        self.truths, self.random = truths, torch.Generator().manual_seed(3)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def begin(self, state, tokens, features, counts):
        self.read = counts.clone()
        return self._verified(self.inner.begin(state, tokens, features, counts), counts)

    def extend(self, state, tokens, features, counts, view=0):
        self.read += counts
        return self._verified(self.inner.extend(state, tokens, features, counts, view), counts)

    def expand(self, state, tokens, parents):
        self.depth += 1
        return self._help(self.inner.expand(state, tokens, parents))

    def _verified(self, logits, counts):
        self.depth = 0
        self.said += [
            (row, int(self.read[row]), logits[row].clone())
            for row in range(len(counts))
            if counts[row]
        ]
        return self._help(logits[:, None])[:, 0]

    def _help(self, logits):
        logits = logits.clone()
        for row, read in enumerate(self.read.tolist()):
            place = int(torch.randint(len(self.ranks), (), generator=self.random))
            position, rank = read + 1 + self.depth, self.ranks[place]
            truth = self.truths[row]
            if rank is None or position >= len(truth):
                continue
            ids = (self.inner.draft_ids == truth[position]).nonzero()
            if len(ids):
                first = logits[row].topk(4, dim=-1).values
                between = (
                    first[:, 0] + 1 if rank == 0 else (first[:, rank - 1] + first[:, rank]) / 2
                )
                logits[row, :, ids[0, 0]] = between
        return logits


def helped(target, head, prompts, new, **options):
    truths = Generator(target).generate(prompts, new + 8)
    texts = [p.tolist() + t.tokens for p, t in zip(prompts, truths, strict=True)]
    return Helped(head, texts, **options), [t.tokens[:new] for t in truths]


@torch.no_grad()
def require_said_as_read_afresh(target, watched):
    """After every commit the head says what it says having read the same text at once: its cache is
    that of the accepted path, and it got the target's features of the accepted nodes."""
    head = watched.inner
    for row, count, logits in watched.said:
        text = torch.tensor([watched.truths[row]])
        features = target.forward(text[:, :count], aux_layers=head.needs.aux_layers)
        state = head.start(1, count + 8)
        fresh = head.begin(state, text[:, : count + 1], features, torch.tensor([count]))[0]
        error = (logits - fresh).abs().max() / fresh.abs().max()
        assert error < 1e-4, (row, count, float(error))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_plain_for_every_family(tiny, prompts, kind):
    head = KINDS[kind](tiny, 300)
    watched, truths = helped(tiny, head, prompts, 18)
    shape = shape_for(head, top_k=3, depth=min(4, head.longest_draft))
    got = Generator(tiny, watched, tree=shape).generate(prompts, 18)
    assert [c.tokens for c in got] == truths
    runs = sum((c.runs for c in got), Counter())
    assert sum(runs.values()) == sum(c.forwards for c in got) < sum(c.committed for c in got)
    assert len(runs) > 2, "paths of too few lengths"
    require_said_as_read_afresh(tiny, watched)


def test_the_published_tree_of_eagle2(tiny, prompts):
    head = KINDS["eagle2"](tiny, 120)
    shape = shape_for(head)
    assert (shape.top_k, shape.depth, shape.nodes) == (10, 6, 60)
    watched, truths = helped(tiny, head, prompts, 18)
    got = Generator(tiny, watched, tree=shape).generate(prompts, 18)
    assert [c.tokens for c in got] == truths
    assert max(max(c.runs) for c in got) >= 3
    require_said_as_read_afresh(tiny, watched)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_sliding_windows(tmp_path, tokenizer, prompts, family):
    torch.manual_seed(1)
    sizes = SIZES | {"sliding_window": 6, "initializer_range": 0.3}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), pack_weights=False)
    watched, truths = helped(target, make_head(target, draft_vocab=384), prompts, 24)
    got = Generator(target, watched, tree=SHAPE).generate(prompts, 24)
    assert [c.tokens for c in got] == truths
    assert sum(c.committed - c.forwards for c in got) > 10
    require_said_as_read_afresh(target, watched)


@pytest.mark.parametrize("gamma", [1, 4])
def test_a_tree_of_width_one_is_the_chain(tiny, prompts, gamma):
    """The same tokens by the same runs, forward by forward."""
    head, shape = make_head(tiny), TreeDefaults(top_k=1, depth=gamma, nodes=gamma)
    results = []
    for options in ({"draft_tokens": gamma}, {"tree": shape}):
        watched, truths = helped(tiny, head, prompts, 30, ranks=(0, 0, 0, None))
        results.append(Generator(tiny, watched, **options).generate(prompts, 30))
        assert [c.tokens for c in results[-1]] == truths
    assert results[0] == results[1]
    assert max(max(c.runs) for c in results[0]) == gamma


@pytest.mark.parametrize("place", [1, 2, 3, 4, 6])
def test_stop_token_inside_an_accepted_path(tiny, prompts, place, monkeypatch):
    head = make_head(tiny, draft_vocab=384)
    truths = [c.tokens for c in Generator(tiny).generate(prompts, 20)]
    monkeypatch.setattr(tiny, "stop_ids", (truths[0][place],))
    expected = Generator(tiny).generate(prompts, 20)
    texts = [p.tolist() + t for p, t in zip(prompts, truths, strict=True)]
    got = Generator(tiny, Helped(head, texts, ranks=(0,)), tree=SHAPE).generate(prompts, 20)
    assert [(c.tokens, c.finish) for c in got] == [(c.tokens, c.finish) for c in expected]
    assert got[0].finish == "stop"
    assert all(sum(run * n for run, n in c.runs.items()) <= c.committed for c in got)


@pytest.mark.parametrize("new", [0, 1, 2, 3, 7])
def test_new_token_limits(tiny, prompts, new):
    watched, truths = helped(tiny, make_head(tiny, draft_vocab=384), prompts, new, ranks=(0,))
    got = Generator(tiny, watched, tree=SHAPE).generate(prompts, new)
    assert [c.tokens for c in got] == truths


def test_context_limit(tiny, prompts):
    """The tree is larger than what is left of the context."""
    full = torch.randint(3, 380, (tiny.max_length,), generator=torch.Generator().manual_seed(3))
    near = [full[:-5], prompts[0]]
    expected = [c.tokens for c in Generator(tiny).generate(near, 12)]
    texts = [p.tolist() + t for p, t in zip(near, expected, strict=True)]
    watched = Helped(make_head(tiny, draft_vocab=384), texts, ranks=(0,))
    got = Generator(tiny, watched, tree=SHAPE).generate(near, 12)
    assert [c.tokens for c in got] == expected
    assert [len(tokens) for tokens in expected] == [5, 12]


# ── exact sampling ───────────────────────────────────────────────────────────


class Markov:
    """A target of 6 tokens, each drawn given the one before; and a head that knows it roughly."""

    device, stop_ids, max_length, vocab_size = torch.device("cpu"), (), 64, 6
    longest_draft, needs, tree, reduced = 16, Needs(), None, False
    config = SimpleNamespace(steps=3, draft_vocab_size=6, vocab_size=6)

    def __init__(self, noise):
        generator = torch.Generator().manual_seed(4)
        self.table = 1.2 * torch.randn(6, 6, generator=generator)
        self.guesses = self.table + noise * torch.randn(6, 6, generator=generator)

    def new_cache(self, rows, slots):
        return KVCache(rows, slots)

    def forward(self, tokens, **_):
        return Features(torch.nn.functional.one_hot(tokens, 6).float(), None)

    def logits(self, last):
        return last @ self.table

    def start(self, rows, slots):
        return None

    def begin(self, state, tokens, features, counts):
        return self.guesses[tokens[torch.arange(len(counts)), counts]]

    def extend(self, state, tokens, features, counts, view):
        return self.guesses[tokens[torch.arange(len(counts)), (counts - 1).clamp(min=0)]]

    def expand(self, state, tokens, parents):
        return self.guesses[tokens]

    def to_target(self, ids):
        return ids


@pytest.mark.parametrize("shape", [(2, 2, 4), (3, 3, 9), (2, 1, 2)])
@pytest.mark.parametrize("sampling", [Sampling(0.8, seed=2), Sampling(1.0, top_k=3, seed=3)])
def test_sampled_text_has_the_exact_distribution(shape, sampling):
    """Three tokens, 20,000 replies from the whole generator against the products of the target's
    own warped probabilities; by chance it fails at 1 of 10,000 seeds (fixed here)."""
    shape = TreeDefaults(**dict(zip(("top_k", "depth", "nodes"), shape, strict=True)))
    model, draws = Markov(0.7), 20_000
    done = Generator(model, model, tree=shape).generate([torch.tensor([2])] * draws, 3, sampling)
    accepted = sum(c.committed - c.forwards for c in done)
    assert 0.1 < accepted / draws < 1, "both ways, acceptance and rejection, are taken"
    p = sampling.warp(model.table)
    joint = p[2][:, None, None] * p[:, :, None] * p[None]
    text = torch.tensor([c.tokens for c in done])
    seen = torch.bincount((text * torch.tensor([36, 6, 1])).sum(-1), minlength=216)
    expected = joint.flatten().double() * draws
    assert not seen[expected == 0].any()
    common = expected >= 5
    observed = torch.cat([seen[common], seen[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    keep = wanted > 0
    observed, wanted = observed[keep].double(), wanted[keep]
    assert len(wanted) > 20
    wanted *= draws / wanted.sum()
    assert chisquare(observed.numpy(), wanted.numpy()).pvalue > 1e-4


def test_sampling_with_a_real_head_repeats_and_follows_the_target(tiny, prompts):
    """Near temperature 0 sampling is greedy; a seed gives the same text again."""
    watched, truths = helped(tiny, make_head(tiny, draft_vocab=384), prompts, 16)
    cold = Generator(tiny, watched, tree=SHAPE).generate(prompts, 16, Sampling(1e-6))
    assert [c.tokens for c in cold] == truths
    head, warm = make_head(tiny), Sampling(1.0, top_p=0.9, seed=5)
    one, two, other = (
        [c.tokens for c in Generator(tiny, head, tree=SHAPE).generate(prompts, 16, sampling)]
        for sampling in (warm, warm, replace(warm, seed=6))
    )
    assert one == two != other


# ── static shapes, refusals ──────────────────────────────────────────────────


class Recorder(TorchDispatchMode):
    """Names and shapes of all tensor operations; a list of its own from each mark on."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.steps:
            shapes = [tuple(t.shape) for t in args if isinstance(t, torch.Tensor)]
            self.steps[-1].append((str(function), shapes))
        return result


def test_a_step_is_the_same_operations_whatever_is_accepted(tiny, prompts, monkeypatch):
    head = make_head(tiny)
    watched, _ = helped(tiny, head, prompts, 24)
    generator = Generator(tiny, watched, tree=SHAPE)
    recorder = Recorder()
    draft, help_ = generator.drafter.draft, watched._help
    monkeypatch.setattr(
        generator.drafter, "draft", lambda *args: recorder.steps.append([]) or draft(*args)
    )

    def unrecorded(logits):
        with torch.utils._python_dispatch._disable_current_modes():
            return help_(logits)

    monkeypatch.setattr(watched, "_help", unrecorded)
    monkeypatch.setattr(watched, "_verified", lambda logits, counts: _plain(watched, logits))
    with recorder:
        got = generator.generate(prompts, 24)
    assert sum(c.committed - c.forwards for c in got) > 10
    # In the first step a CPU's cache grows to what the steps see; the last one has no `extend`.
    _, second, *others, _ = recorder.steps
    assert len(others) > 2
    assert all(step == second for step in others)
    assert len(second) > 100


def _plain(watched, logits):
    watched.depth = 0
    return watched._help(logits[:, None])[:, 0]


def test_impossible_settings(tiny):
    head = make_head(tiny)
    with pytest.raises(SpectrainError, match="a tree without a head"):
        Generator(tiny, tree=SHAPE)
    with pytest.raises(SpectrainError, match="of a chain, not of a tree"):
        Generator(tiny, head, 3, SHAPE)
    with pytest.raises(SpectrainError, match="tree_nodes: 99 is more than 12"):
        Generator(tiny, head, tree=TreeDefaults(top_k=3, depth=2, nodes=99))

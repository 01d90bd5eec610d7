"""The whole generator with grown trees: every family, unequal rows, ends, exact sampling."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from head_kinds import KINDS, create
from helped_heads import Helped, Markov, helped, require_said_as_read_afresh
from scipy.stats import chisquare
from tiny_models import SIZES, make_head
from transformers import AutoConfig, AutoModelForCausalLM

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator
from spectrain.generator.tree import shape_for
from spectrain.heads.tree import TreeDefaults, TreeShape

SHAPE = TreeDefaults(top_k=3, depth=4, nodes=11)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 380, (n,), generator=generator) for n in (7, 1, 19)]


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


@pytest.mark.parametrize("way", [{"tree": SHAPE}, {"draft_tokens": 4}], ids=["tree", "chain"])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mistral", {"sliding_window": 6}),
        ("gemma2", {"sliding_window": 6}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_windows_and_experts(tmp_path, tokenizer, prompts, family, more, way):
    """CASE 39: texts that pass the window; and targets whose tokens take different paths."""
    torch.manual_seed(1)
    sizes = SIZES | {"initializer_range": 0.3} | more
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), pack_weights=False)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    watched, truths = helped(target, make_head(target, draft_vocab=384), prompts, 24)
    got = Generator(target, watched, **way).generate(prompts, 24)
    assert [c.tokens for c in got] == truths
    for prompt, tokens in zip(prompts, truths, strict=True):
        mask = torch.ones_like(prompt[None])
        out = stock.generate(
            prompt[None], attention_mask=mask, do_sample=False, max_new_tokens=len(tokens)
        )
        assert out[0, len(prompt) :].tolist() == tokens
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


STATIC = TreeShape(paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0)))
EXACT = [
    *(
        {"tree": TreeDefaults(**dict(zip(("top_k", "depth", "nodes"), shape, strict=True)))}
        for shape in ((2, 2, 4), (3, 3, 9), (2, 1, 2))
    ),
    *({"tree": STATIC, "proposal": proposal} for proposal in ("top-k", "drawn")),
    *({"draft_tokens": 2, "proposal": proposal} for proposal in ("top-k", "drawn")),
]


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize("sampling", [Sampling(0.8, seed=2), Sampling(1.0, top_k=3, seed=3)])
def test_sampled_text_has_the_exact_distribution(way, sampling):
    """Three tokens, 20,000 replies from the whole generator against the products of the target's
    own warped probabilities; by chance it fails at 1 of 10,000 seeds (fixed here)."""
    model, draws = Markov(0.7), 20_000
    done = Generator(model, model, **way).generate([torch.tensor([2])] * draws, 3, sampling)
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


# ── refusals ─────────────────────────────────────────────────────────────────


def test_impossible_settings(tiny):
    head = make_head(tiny)
    with pytest.raises(SpectrainError, match="a tree without a head"):
        Generator(tiny, tree=SHAPE)
    with pytest.raises(SpectrainError, match="of a chain, not of a tree"):
        Generator(tiny, head, 3, SHAPE)
    with pytest.raises(SpectrainError, match="tree_nodes: 99 is more than 12"):
        Generator(tiny, head, tree=TreeDefaults(top_k=3, depth=2, nodes=99))
    with pytest.raises(SpectrainError, match="cannot be drawn"):
        Generator(tiny, head, tree=SHAPE, proposal="drawn")
    with pytest.raises(SpectrainError, match="choice number 121, it can guess 120"):
        Generator(tiny, head, tree=TreeShape(paths=((120,),)))


def test_a_tree_deeper_than_the_heads_is_refused_with_both_numbers(tiny):
    """CASE 37: three heads, a tree four deep; fixed or grown."""
    head = create(tiny, "medusa", steps=3, draft_vocab_size=120)
    for tree in (TreeShape.chain(4), TreeDefaults(top_k=2, depth=4, nodes=6)):
        with pytest.raises(SpectrainError, match=r"4.*3") as caught:
            Generator(tiny, head, tree=tree)
        assert "\n" not in str(caught.value)

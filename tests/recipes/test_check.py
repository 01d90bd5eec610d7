"""`check`: it passes where nothing is wrong, and fails, saying where, for every kind of fault."""

from __future__ import annotations

import json

import pytest
import torch
from helped_heads import NoisyTarget, helped
from preparing import prompt, write
from tiny_models import make_head
from typer.testing import CliRunner
from wrong_engines import (
    accepts_one_too_many,
    does_not_subtract_q,
    keeps_the_draft_s_token,
    reuses_its_random_numbers,
)

from spectrain import cli
from spectrain.core.config import load_config
from spectrain.core.errors import SpectrainError
from spectrain.core.pretrained import library_model
from spectrain.evaluation import identity, lossless
from spectrain.generator.completion import Completion
from spectrain.generator.rules import Rules, Typical
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator
from spectrain.heads.io import save_head
from spectrain.heads.tree import TreeDefaults, TreeShape
from spectrain.recipes.check import CheckConfig, render, run

ROWS = [prompt(text) for text in ("How many apples?", "the fox", "def add", "one two", "seven")]
SMALL = {"contexts": 2, "replies": 60, "self_test_replies": 300, "max_new_tokens": 10, "limit": 4}
WARM = Sampling(1.0, top_k=20)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")


@pytest.fixture
def flags(tiny, tiny_path, tmp_path):
    save_head(make_head(tiny, wild=False), tmp_path / "head")
    prompts = write(tmp_path / "prompts.jsonl", ROWS)
    return {
        "target": str(tiny_path),
        "prompts": str(prompts),
        "head": str(tmp_path / "head"),
        **SMALL,
    }


@pytest.fixture(scope="module")
def stock(tiny_path):
    return library_model(str(tiny_path), torch.float32, "cpu")


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 380, (n,), generator=generator) for n in (7, 12, 19)]


def check(flags, **changes):
    return run(load_config(CheckConfig, "check", flags=flags | changes))


def verdicts(report):
    return {name: part["verdict"] for name, part in report["parts"].items()}


# ── the whole check ──────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "way",
    [
        {"draft_tokens": 3, "rows": 2},
        {"tree": "grown"},
        {"head": None, "lookup": 2},
        {"head": None},
    ],
)
def test_it_passes(flags, way):
    report = check(flags, **way)
    found = verdicts(report)
    assert set(found) == {"greedy", "seeds", "self-test", "sampling"}
    assert set(found.values()) <= {"holds", "untried"}
    assert found["self-test"] == "holds"
    drafts = bool(way.get("draft_tokens") or way.get("tree") or way.get("lookup"))
    for name in ("greedy", "seeds", "sampling"):  # what nothing was accepted in has shown nothing
        accepted = report["parts"][name]["accepted"]
        assert (found[name] == "untried") == (drafts and accepted == 0), name
    assert ("UNTRIED" in render(report)) == ("untried" in found.values())
    assert (report["holds"], report["failure"]) == (True, None)
    greedy = report["parts"]["greedy"]
    assert (greedy["replies"], greedy["equal"], greedy["differences"]) == (4, 4, [])
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    text = render(report)
    assert "LOSSLESS" in text
    assert "LOSSY" not in text
    assert max(map(len, text.splitlines()[1:])) <= 80  # the first line has the folders


def test_temperature_0_is_greedy_alone(flags):
    assert verdicts(check(flags, temperature=0)) == {"greedy": "holds"}


def test_a_typical_head_is_told_lossy(flags, tmp_path):
    """The command: exit code 1, the table and the file all the same."""
    out = tmp_path / "check.json"
    arguments = [f"--{key.replace('_', '-')}" for key in ("target", "prompts", "head", "limit")]
    arguments = [part for flag, key in zip(arguments, ("target", "prompts", "head", "limit"),
                 strict=True) for part in (flag, str(flags[key]))]  # fmt: skip
    for key in ("contexts", "replies", "self_test_replies"):
        arguments += ["--set", f"{key}={flags[key]}"]
    arguments += ["--max-new-tokens", "8", "--json", str(out)]
    result = CliRunner().invoke(cli.app, ["check", *arguments, "--typical"])
    assert result.exit_code == 1
    assert "LOSSY" in result.stdout
    assert result.stderr.split("\n")[-2].startswith("error: seeds, self-test")
    report = json.loads(out.read_text())
    assert verdicts(report) == {
        "greedy": "holds", "seeds": "fails", "self-test": "fails", "sampling": "fails"
    }  # fmt: skip
    assert CliRunner().invoke(cli.app, ["check", *arguments]).exit_code == 0


@pytest.mark.parametrize("way", [{"draft_tokens": 2}, {"tree": "static", "tree_nodes": 5}])
def test_bfloat16(flags, way):
    """Replies are compared, differences measured by the type's own bound, seeds not judged."""
    report = check(flags, dtype="bfloat16", temperature=1.0, **way)
    found = verdicts(report)
    assert found.pop("seeds") == "shown"
    assert set(found.values()) <= {"holds", "untried"}
    for difference in report["parts"]["greedy"]["differences"]:
        assert difference["bound"] == 2**-6
        assert difference["margin"] < 2**-6


def test_impossible_settings(flags):
    for bad in ({"limit": 0}, {"replies": 2}, {"temperature": -1}, {"lookup": 2}):
        with pytest.raises(SpectrainError):
            check(flags, **bad)


# ── greedy and seeds: every fault is seen and told ───────────────────────────


def test_a_kept_draft_is_seen_where_it_is(tiny, stock, prompts, monkeypatch):
    head, truths = helped(tiny, make_head(tiny, draft_vocab=384), prompts, 20)
    generator = Generator(tiny, head, 3)
    assert lossless.greedy(generator, stock, prompts, 20, 2)["verdict"] != "fails"
    keeps_the_draft_s_token(monkeypatch)
    part = lossless.greedy(generator, stock, prompts, 20, 2)
    assert part["verdict"] == "fails"
    assert part["equal"] < len(prompts)
    found = part["differences"][0]
    assert found["theirs"] == truths[found["prompt"]][found["position"]]
    assert found["ours"] != found["theirs"]
    assert found["margin"] > 0
    assert not found["tolerated"]


@pytest.mark.parametrize(
    "way", [{"draft_tokens": 3}, {"tree": TreeDefaults(top_k=3, depth=3, nodes=9)}]
)
def test_one_accepted_too_many_is_seen(tiny, stock, prompts, way, monkeypatch):
    generator = Generator(tiny, make_head(tiny), **way, proposal="top-k")
    assert lossless.greedy(generator, stock, prompts, 20, 3)["verdict"] != "fails"
    assert lossless.seeds(generator, stock, prompts, 20, 3, WARM)["verdict"] != "fails"
    accepts_one_too_many(monkeypatch)
    assert lossless.greedy(generator, stock, prompts, 20, 3)["verdict"] == "fails"
    assert lossless.seeds(generator, stock, prompts, 20, 3, WARM)["verdict"] == "fails"


def test_a_reply_cut_short_is_seen(tiny, stock, prompts, monkeypatch):
    take = Completion.take

    def wrong(self, tokens, ends, limit):
        return take(self, tokens, ends, min(limit, 9))

    monkeypatch.setattr(Completion, "take", wrong)
    part = lossless.greedy(Generator(tiny), stock, prompts, 12, 3)
    assert part["verdict"] == "fails"
    assert {(d["position"], d["ours"], d["tolerated"]) for d in part["differences"]} == {
        (9, None, False)
    }


def test_what_rounding_excuses_is_counted(tiny, stock, prompts, monkeypatch):
    """With a bound so wide that it excuses anything, nothing but the count tells."""
    keeps_the_draft_s_token(monkeypatch)
    monkeypatch.setitem(identity.ROUNDING, torch.float32, 10.0)
    part = lossless.greedy(Generator(tiny, make_head(tiny), 3), stock, prompts, 20, 3)
    assert part["verdict"] != "fails"
    assert part["tolerated"] == len(part["differences"]) > 0
    # Compared is what stands before the differences.
    assert part["tokens"] == sum(d["position"] for d in part["differences"])


def test_draws_with_other_numbers_are_seen(tiny, stock, prompts, monkeypatch):
    """A draw that depends on how many tokens a step has committed."""
    generator = Generator(tiny, NoisyTarget(tiny, 0.5), 3, proposal="top-k")
    right = Rules.choose

    def wrong(self, logits, keys, number):
        return right(self, logits, keys, number if logits.dim() < 3 else number.clamp(min=4))

    assert lossless.seeds(generator, stock, prompts, 20, 3, WARM)["verdict"] != "fails"
    plain = Generator(tiny).generate(prompts, 20, WARM)
    monkeypatch.setattr(Rules, "choose", wrong)
    drafted = generator.generate(prompts, 20, WARM)
    assert [c.tokens for c in drafted] != [c.tokens for c in plain]
    results = iter([drafted, plain])
    monkeypatch.setattr(Generator, "generate", lambda *_: next(results))
    part = lossless.seeds(generator, stock, prompts, 20, 3, WARM)
    assert part["verdict"] == "fails"
    assert all(d["margin"] > d["bound"] for d in part["differences"] if not d["tolerated"])


# ── sampling with a model ────────────────────────────────────────────────────


WAYS = {
    "drawn chain": {"draft_tokens": 2, "proposal": "drawn"},
    "top-k chain": {"draft_tokens": 2, "proposal": "top-k"},
    "drawn tree": {"tree": TreeShape(paths=((0,), (1,), (0, 0))), "proposal": "drawn"},
}


def sampled(tiny, stock, prompts, way, typical=None):
    head = NoisyTarget(tiny, 0.8) if "draft_tokens" in way else make_head(tiny, wild=False)
    generator = Generator(tiny, head, **way, typical=typical)
    return lossless.sampling_real(generator, stock, prompts, 300, Sampling(0.8, top_k=6))


def test_undecided_contexts_come_first(tiny, stock, prompts):
    contexts = [prompt[:size] for prompt in prompts for size in (2, 4, 6)]
    found = lossless.undecided(stock, contexts, WARM, 3)

    @torch.no_grad()
    def largest(context):
        for _ in range(2):
            p = WARM.warp(stock(context[None]).logits[0, -1])
            context = torch.cat([context, p.argmax()[None]])
        return float(p.max())

    distances = {tuple(context.tolist()): abs(largest(context) - 0.5) for context in contexts}
    expected = sorted(distances, key=distances.get)[:3]
    assert [tuple(context.tolist()) for context in found] == expected


@pytest.mark.parametrize("way", WAYS)
def test_samples_of_a_right_engine_pass(tiny, stock, prompts, way):
    """1 of 10,000 seeds would fail."""
    part = sampled(tiny, stock, prompts, WAYS[way])
    assert part["verdict"] != "fails"
    assert part["accepted"] > 0.03
    assert part["tokens"] > 3 * 300
    assert 0 < part["detectable"] < 0.2


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("drawn chain", does_not_subtract_q),
        ("drawn chain", reuses_its_random_numbers),
        ("top-k chain", accepts_one_too_many),
        ("top-k chain", keeps_the_draft_s_token),
    ],
)
def test_samples_of_a_wrong_engine_fail(tiny, stock, prompts, way, fault, monkeypatch):
    fault(monkeypatch)
    assert sampled(tiny, stock, prompts, WAYS[way])["verdict"] == "fails"


def test_samples_by_typical_acceptance_fail(tiny, stock, prompts):
    """Not by its greedy first tokens: only what follows them is looked at."""
    part = sampled(tiny, stock, prompts, WAYS["top-k chain"], Typical(delta=1.0))
    assert part["verdict"] == "fails"

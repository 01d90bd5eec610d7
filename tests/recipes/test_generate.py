"""`generate`: what it decodes, what it reports, what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from exporting import round_trip
from head_kinds import create
from preparing import prompt, talk, write
from tiny_models import make_head, save_tiny

from spectrain.core.config import load_config
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.data.reading import read_conversations
from spectrain.data.tokenise import prompt_ids
from spectrain.generator.costs import Costs, machine
from spectrain.generator.decode import complete
from spectrain.generator.saved_plan import Choice, SavedPlan
from spectrain.heads.io import save_head
from spectrain.heads.tree import TreeShape
from spectrain.recipes.generate import GenerateConfig, render, run

ROWS = [prompt("How many apples?"), talk("one two", "old reply"), prompt("the fox", domain="code")]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")


@pytest.fixture
def flags(tiny, tiny_path, tmp_path):
    save_head(make_head(tiny, wild=False), tmp_path / "head")
    prompts = write(tmp_path / "prompts.jsonl", ROWS)
    return {"target": str(tiny_path), "prompts": str(prompts), "max_new_tokens": 12}


def generate(flags, **changes):
    return run(load_config(GenerateConfig, "generate", flags=flags | changes))


@pytest.mark.parametrize(
    ("family", "format", "layout"),
    [("eagle3", "vllm", "eagle3"), ("eagle3", "speculators", "speculators")],
)
def test_a_head_of_another_engine_is_refused_with_the_way_in(
    flags, tiny, tmp_path, family, format, layout
):
    path = tmp_path / "theirs"
    round_trip(create(tiny, family, steps=2), tiny, format, path)
    with pytest.raises(SpectrainError, match=f"a head in the layout {layout}") as refused:
        generate(flags, head=str(path))
    way = f"spectrain import {path} --target {flags['target']} --out RUN"
    assert way in refused.value.fix
    # What is none is refused in the words that fit it.
    (path / "config.json").write_text("{}")
    for file in path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(SpectrainError) as refused:
        generate(flags, head=str(path))
    assert "layout" not in refused.value.what


def test_replies_are_the_target_s_in_the_file_s_order(flags, tiny, tmp_path):
    report = generate(flags, head=str(tmp_path / "head"), out=str(tmp_path / "out"))
    lines = (tmp_path / "out/replies.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    conversations = read_conversations(tmp_path / "prompts.jsonl", "last", keep_order=True)
    ids = [torch.tensor(prompt_ids(tiny.tokenizer, c, 500)) for c in conversations]
    expected = [complete(tiny, [one], 12)[0] for one in ids]
    assert [row["messages"][0]["content"] for row in rows] == [
        "How many apples?", "one two", "the fox"
    ]  # fmt: skip
    assert [row["messages"][-1]["content"] for row in rows] == [
        tiny.tokenizer.decode(c.tokens[:-1] if c.finish == "stop" else c.tokens) for c in expected
    ]
    assert [row["finish_reason"] for row in rows] == [c.finish for c in expected]
    assert list(report["methods"]) == ["eagle3"]
    assert report["methods"]["eagle3"]["tokens"] == sum(len(c.tokens) for c in expected)


def test_comparison(flags, tmp_path):
    """Three methods on the same prompts; equal ids are counted, and unequal ones would not be."""
    report = generate(flags, head=str(tmp_path / "head"), compare=True, draft_tokens=2)
    assert list(report["methods"]) == ["eagle3", "spectrain-plain", "transformers"]
    assert report["identical"] == {"spectrain-plain": 3, "transformers": 3}
    assert [s["baseline"] for s in report["speedup"]] == ["spectrain-plain", "transformers"]
    for ratio in report["speedup"]:
        rates = report["methods"]
        expected = rates["eagle3"]["tokens_per_second"]
        expected /= rates[ratio["baseline"]]["tokens_per_second"]
        assert ratio["value"] == pytest.approx(expected, rel=1e-3)
        assert ratio["low"] is ratio["high"] is None  # three prompts
    plain = report["methods"]["spectrain-plain"]
    assert plain["tau"] == 1
    text = render(report)
    assert max(map(len, text.splitlines())) <= 100
    assert "the same tokens as transformers: 3 of 3 prompts" in text


def test_unequal_outputs_are_not_called_identical(flags, tmp_path, monkeypatch):
    """A generator that spoils its last token is found out."""
    from spectrain.recipes import generate as recipe

    real = recipe.of_generator

    def spoilt(generator, *rest):
        decode = real(generator, *rest)

        def wrong(prompt):
            done = decode(prompt)
            if generator.head is not None and len(prompt) % 2:
                done.tokens[-1] += 1
            return done

        return wrong

    monkeypatch.setattr(recipe, "of_generator", spoilt)
    report = generate(flags, head=str(tmp_path / "head"), compare=True, draft_tokens=2)
    assert report["identical"]["transformers"] < 3


def test_sampling_is_compared_in_speed_only(flags, tmp_path):
    report = generate(flags, head=str(tmp_path / "head"), compare=True, temperature=0.8)
    assert list(report["methods"]) == ["eagle3", "spectrain-plain"]
    assert report["identical"] == {}


def test_one_prompt_without_a_head(flags, tiny, capsys):
    """The reply is printed while it grows, once."""
    report = generate(flags | {"prompts": None}, prompt="How many apples?")
    assert capsys.readouterr().out == report["text"] + "\n"
    assert "tokens/s" in render(report)
    assert report["text"] not in render(report)
    assert report["methods"]["spectrain-plain"]["tokens"] <= 12


@pytest.mark.parametrize("new", [0, 1])
def test_hardly_any_tokens(flags, tmp_path, new):
    """CASE 42"""
    report = generate(flags, head=str(tmp_path / "head"), max_new_tokens=new, compare=True)
    assert report["methods"]["eagle3"]["tokens"] == 3 * new
    assert report["methods"]["eagle3"]["tau"] is None
    render(report)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "hi"}, "either --prompts FILE or --prompt TEXT"),
        ({"compare": True}, "needs a --head"),
        ({"head": "nowhere"}, "no head here"),
        ({"prompts": "nowhere.jsonl"}, "no such file"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"head": "x", "tree": "grown", "draft_tokens": 3}, "--draft-tokens is of a chain"),
        ({"head": "x", "tree": "chain", "tree_depth": 3}, "tree_depth is of a grown tree"),
        ({"lookup": 2, "head": "x"}, "needs no --head"),
        ({"compare": True, "lookup": 2, "rows": 2}, "leave out --rows"),
        ({"head": "x", "tree": "grown", "proposal": "drawn"}, "cannot be drawn"),
        ({"stop": ""}, "empty stop string"),
        ({"head": "x", "draft_tokens": 2, "tree_top_k": 3}, "tree_top_k is of a grown tree"),
        ({"tree": "grown"}, "a tree needs a --head"),
        ({"tree_nodes": 3}, "a tree needs a --head"),
        ({"tree": "oak"}, "a tree needs a --head"),
        ({"head": "HEAD", "tree": "oak"}, "no such tree"),
    ],
)
def test_refusals(flags, changes, words, tmp_path):
    if changes.get("head") == "HEAD":
        changes = changes | {"head": str(tmp_path / "head")}
    with pytest.raises(SpectrainError, match=words) as caught:
        generate(flags, **changes)
    assert "\n" not in str(caught.value)


def test_how_it_drafts_is_decided_and_told(flags, tiny, tmp_path):
    """A head that names a tree grows it, any other when asked; the same ids all the while."""
    save_head(create(tiny, "eagle2", draft_vocab_size=120), tmp_path / "eagle2")
    own = {"top_k": 10, "depth": 6, "nodes": 60}
    small = {"top_k": 2, "depth": 3, "nodes": 6}
    asked = {f"tree_{name}": value for name, value in small.items()}
    for head, changes, tree, drafted, shown in (
        ("eagle2", {}, own, None, "grown tree: top 10, depth 6, 60 nodes"),
        ("eagle2", {"draft_tokens": 2}, None, 2, "2 drafted a step"),
        ("eagle2", {"tree": "chain"}, None, 3, "3 drafted a step"),
        ("eagle2", {"tree_depth": 2}, own | {"depth": 2}, None, "depth 2, 60 nodes"),
        ("head", {}, None, 3, "3 drafted a step"),
        ("head", {"tree": "grown"}, {"top_k": 4, "depth": 4, "nodes": 16}, None, "top 4, depth 4"),
        ("head", asked, small, None, "top 2, depth 3, 6 nodes"),
    ):
        report = generate(flags, head=str(tmp_path / head), compare=True, **changes)
        assert (report["tree"], report["draft_tokens"]) == (tree, drafted)
        assert report["rule"] == "greedy"
        assert set(report["identical"].values()) == {3}
        assert shown in render(report)
    report = generate(flags, head=str(tmp_path / "eagle2"), temperature=0.8)
    assert report["rule"] == "sampling, top-k"
    report = generate(flags, head=str(tmp_path / "head"), temperature=0.8)
    assert report["rule"] == "sampling, drawn"


def test_static_trees(flags, tiny, tmp_path, capsys):
    """By assumption without a plan, as measured with one, and from a file; the same ids."""
    head = tmp_path / "head"

    def paths(**changes):
        report = generate(flags, head=str(head), compare=True, **changes)
        assert set(report["identical"].values()) == {3}
        return report["tree"]["paths"]

    assert len(paths(tree="static")) == 16
    assert "the tree is a guess" in capsys.readouterr().err
    accepted = ((0.1, 0.8), (0.9, 0.05))
    machine = {"dtype": "float32", "device": "another", "threads": 64}
    times = {"verify": {1: 1.0}, "extend": {1: 1.0}, "expand": {1: 1.0}}
    costs = Costs(**machine, **times, batch=1, context=1)
    choice = Choice(tree=None, speedup=1.0, costs=costs)
    plan = SavedPlan(target=tiny.fingerprint, accepted=accepted, choices={1: choice}, **machine)
    plan.save(head / "plan.json")
    # What a head gets accepted does not depend on the machine; what to draft does.
    assert paths(tree="static", tree_nodes=3) == [[0], [1], [1, 0]]
    report = generate(flags, head=str(head))
    assert report["draft_tokens"] == 3
    assert "drafting as without one" in capsys.readouterr().err
    file = tmp_path / "tree.json"
    file.write_text('{"paths": [[1], [0], [0, 0]]}')
    assert paths(tree=str(file)) == [[0], [1], [0, 0]]
    file.write_text('{"paths": [[0, 0]]}')
    with pytest.raises(SpectrainError, match="has no parent"):
        paths(tree=str(file))


def test_the_plan_is_followed(flags, tiny, tmp_path):
    """Where nothing pays, decoding is plain; what is asked for goes before the plan."""
    head = tmp_path / "head"
    machine_ = {
        "dtype": "float32", "device": machine(tiny.device), "threads": torch.get_num_threads()
    }  # fmt: skip
    times = {"verify": {1: 1.0}, "extend": {1: 1.0}, "expand": {1: 1.0}}
    choices = {}
    for batch, tree in ((1, TreeShape(paths=((0,), (1,)))), (3, None)):
        costs = Costs(**machine_, **times, batch=batch, context=1)
        choices[batch] = Choice(tree=tree, speedup=1.0, costs=costs)
    SavedPlan(target=tiny.fingerprint, accepted=((0.5,),), choices=choices, **machine_).save(
        head / "plan.json"
    )
    one = generate(flags, head=str(head))
    assert one["way"] == "static tree: 2 nodes, depth 1, as planned"
    three = generate(flags, head=str(head), rows=3)
    assert three["way"] == "plain decoding, as planned"
    assert three["methods"]["spectrain-plain"]["tau"] == 1
    assert generate(flags, head=str(head), draft_tokens=2)["way"] == "2 drafted a step"
    # Another batch, another plan, the same sampled replies: what is planned is top-k.
    for rows in (1, 3):
        changes = {"out": str(tmp_path / str(rows)), "temperature": 0.9, "rows": rows}
        generate(flags, head=str(head), **changes)
    one, three = ((tmp_path / rows / "replies.jsonl").read_bytes() for rows in "13")
    assert one == three
    compared = render(generate(flags, head=str(head), compare=True))
    assert "the plan promised 1.00 × spectrain-plain" in compared


def test_prompts_that_cannot_be_used_are_left_out_if_asked(flags, tmp_path, capsys):
    long = prompt("one " * 600)
    write(tmp_path / "prompts.jsonl", [long, *ROWS])
    with pytest.raises(SpectrainError, match=r"too-long-prompt \(the target reads 512 tokens\)"):
        generate(flags)
    assert generate(flags, on_bad_row="skip")["prompts"] == 3
    assert "left out" in capsys.readouterr().err
    write(tmp_path / "prompts.jsonl", [long])
    with pytest.raises(SpectrainError, match="no prompt is left"):
        generate(flags, on_bad_row="skip")


def test_a_tree_larger_than_is_drafted_is_refused(flags, tmp_path):
    with pytest.raises(SpectrainError, match="tree_nodes: 9 is more than 6, all that is drafted"):
        generate(flags, head=str(tmp_path / "head"), tree_top_k=2, tree_depth=2, tree_nodes=9)


def test_too_long_a_draft_names_both_numbers(flags, tmp_path):
    with pytest.raises(SpectrainError, match="20 is not between 1 and 16"):
        generate(flags, head=str(tmp_path / "head"), draft_tokens=20)


def test_a_head_of_another_target_is_refused(flags, tmp_path, tokenizer):
    other = Target.load(str(save_tiny(tmp_path / "other", tokenizer, seed=9)), pack_weights=False)
    save_head(make_head(other), tmp_path / "foreign")
    with pytest.raises(SpectrainError, match="was trained for"):
        generate(flags, head=str(tmp_path / "foreign"))


def test_a_slowdown_is_called_one(flags, tmp_path):
    report = generate(flags, head=str(tmp_path / "head"), compare=True)
    cases = {
        (0.67, None, None): "too few prompts for an interval (8 are needed)",
        (0.67, 0.5, 0.9): "SLOWER",
        (0.97, 0.8, 1.1): "no difference shown",
        (1.2, 0.9, 1.4): "no difference shown",
        (1.2, 1.1, 1.4): "",
        (1.2, None, None): "too few prompts for an interval (8 are needed)",
    }
    for (value, low, high), words in cases.items():
        ratio = {"baseline": "plain", "method": "eagle3", "value": value, "low": low, "high": high}
        shown = render(report | {"speedup": [ratio]})
        assert words in shown
        verdicts = ("SLOWER", "no difference", "too few")
        assert sum(text in shown for text in verdicts) == bool(words)

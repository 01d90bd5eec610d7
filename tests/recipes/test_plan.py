"""`spectrain plan` on the tiny target: from prompts or a store to plan.json. Costs are injected."""

from __future__ import annotations

import json

import pytest
import torch
from head_kinds import KINDS
from preparing import PROMPTS, prompt, write
from tiny_models import make_head

from spectrain.core.config import load_config
from spectrain.core.errors import SpectrainError
from spectrain.data.reading import read_conversations
from spectrain.data.store import FeatureStore
from spectrain.data.tokenise import prompt_ids
from spectrain.evaluation.measure import measure
from spectrain.evaluation.ranks import rank_table, walked
from spectrain.generator import costs
from spectrain.generator.saved_plan import SavedPlan
from spectrain.heads.io import load_head, save_head
from spectrain.heads.tree import TreeShape
from spectrain.recipes import prepare
from spectrain.recipes.plan import PlanConfig, render, run


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")


@pytest.fixture
def flags(tiny, tiny_path, tmp_path):
    save_head(make_head(tiny, wild=False), tmp_path / "head")
    return {
        "target": str(tiny_path),
        "head": str(tmp_path / "head"),
        "max_new_tokens": 24,
        "context": 16,
        "nodes": 8,
    }


@pytest.fixture
def prompts(tmp_path):
    return {"prompts": str(write(tmp_path / "prompts.jsonl", PROMPTS))}


def flat(target, head, batch, context, widths, repeats, draft_widths):
    """At batch 1 a head that costs nothing and verifications as cheap as a step; else each token
    verified costs a step of its own."""
    return costs.Costs(
        dtype="float32",
        device=costs.machine(target.device),
        threads=torch.get_num_threads(),
        batch=batch,
        context=context,
        verify={n: 10.0 * (1 if batch == 1 else n) for n in widths},
        extend=dict.fromkeys(draft_widths, 0.01),
        expand=dict.fromkeys(draft_widths, 0.01),
    )


@pytest.fixture
def injected(monkeypatch):
    monkeypatch.setattr(costs, "measure", flat)


def plan(flags, **changes):
    return run(load_config(PlanConfig, "plan", flags=flags | changes))


def stored(tmp_path, tiny_path, temperature):
    prepare.run(
        prepare.PrepareConfig(
            target=str(tiny_path),
            prompts=write(tmp_path / "prompts.jsonl", PROMPTS),
            store=tmp_path / "store",
            heldout=1,
            heldout_temperatures=(temperature,),
            max_new_tokens=16,
            dtype="float32",
        )
    )
    return FeatureStore.open(tmp_path / "store")


def test_a_perfect_head_drafts_its_longest_where_that_is_free(flags, prompts, tmp_path, injected):
    """The target drafts for itself: each first choice is right (but where the tiny target takes one
    of its padded rows, which nobody drafts), so a longer chain always pays at batch 1, no other
    choice ever does, and at batch 4 nothing is gained by any."""
    out = tmp_path / "out"
    own = {"head": flags["target"], "out": str(out)}
    report = plan(flags | prompts, **own, batch=[1, 4], max_draft=3)
    assert report["tau_from"] == "walks"
    for row in report["ranks"]["accepted"]:
        assert row[0] > 0.9
        assert row[1:] == [0.0] * 9
    one, four = report["batches"]
    assert (one["batch"], one["choice"]) == (1, "chain 3")
    assert (four["batch"], four["choice"]) == (4, "plain")
    assert [way["way"] for way in one["ways"]] == ["plain", "chain 1", "chain 2", "chain 3"]
    assert 3 < one["ways"][3]["tau"] <= 4
    saved = SavedPlan.load(out / "plan.json")
    assert saved.for_batch(1).tree == TreeShape.chain(3)
    assert saved.for_batch(4).tree is None
    json.dumps(report, allow_nan=False)
    shown = render(report)
    assert "choice: chain 3, predicted" in shown
    assert "choice: plain decoding, no way to draft is faster" in shown
    # Paths are as long as they are.
    lines = [line for line in shown.splitlines() if not line.startswith(("How to", "written"))]
    assert max(map(len, lines)) <= 80


def test_stored_greedy_replies_are_walked(flags, tiny, tiny_path, tmp_path, injected):
    """What the report says of each way is the walk of its tree over the store's own rows."""
    store = stored(tmp_path, tiny_path, 0.0)
    report = plan(flags, store=str(tmp_path / "store"), batch=1, max_draft=3)
    head = load_head(flags["head"]).bind(tiny.readout)
    rows = store.rows("heldout")
    assert rows
    conversations = measure(tiny, head, store, {0.0: rows}, 3)[0.0]
    assert report["ranks"] == rank_table(conversations, 3)
    assert report["conversations"] == len(rows)
    assert report["tau_from"] == "walks"
    tau = walked(conversations)
    for way in report["batches"][0]["ways"]:
        assert way["tau"] == pytest.approx(tau(TreeShape(paths=way["paths"])))
    # The plan lies in the head's folder, and the head can still be loaded from there.
    saved = SavedPlan.beside(tmp_path / "head", tiny)
    assert saved.unfit(tiny) is None
    assert load_head(flags["head"]).config == head.config


def test_replies_that_were_sampled_are_not_walked(flags, tiny_path, tmp_path, injected):
    """The text is another than greedy decoding would give; only the conditionals are taken."""
    stored(tmp_path, tiny_path, 1.0)
    report = plan(flags, store=str(tmp_path / "store"), batch=1, max_draft=2)
    assert report["tau_from"] == "product"
    first = report["ranks"]["accepted"][0][0]
    assert report["batches"][0]["ways"][1]["tau"] == pytest.approx(1 + first)
    assert "no reply was written greedily" in " ".join(render(report).split())


def test_it_runs_with_measured_costs_and_writes_what_it_says(flags, prompts, tmp_path):
    """No timing is asserted; the choice in the file is the report's."""
    report = plan(flags | prompts, batch=[2], repeats=1, limit=3)
    (measured,) = report["batches"]
    (best,) = [way for way in measured["ways"] if way["way"] == measured["choice"]]
    saved = SavedPlan.load(tmp_path / "head" / "plan.json")
    tree = saved.for_batch(2).tree
    assert (tree.paths if tree else ()) == tuple(map(tuple, best["paths"]))
    assert report["conversations"] == 3
    assert best["speedup"] >= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": None}, "either --store FOLDER or --prompts FILE"),
        ({"batch": [1, 1]}, "different batch sizes"),
        ({"batch": [0]}, "each 1 or more"),
        ({"context": 600}, "do not fit into the 512 that the target reads"),
        ({"head": "smollm2-135m"}, "no folder to put the plan"),
    ],
)
def test_what_cannot_be_planned_is_refused(flags, prompts, changes, message):
    with pytest.raises(SpectrainError, match=message):
        plan(flags | prompts, **changes)


def test_a_draft_longer_than_the_heads_is_refused(flags, prompts, tiny, tmp_path):
    save_head(KINDS["medusa"](tiny, 120), tmp_path / "head")
    with pytest.raises(SpectrainError, match="the longest draft of this head"):
        plan(flags | prompts, max_draft=5)


def test_without_two_tokens_of_reply_there_is_nothing_to_measure(flags, tmp_path, tiny, injected):
    """The prompt leaves room for one token, which the prompt's own forward brings."""
    words, size = 480, 0
    while size < tiny.max_length - 1:
        path = write(tmp_path / "long.jsonl", [prompt("x" * words)])
        (conversation,) = read_conversations(path, "last")
        size = len(prompt_ids(tiny.tokenizer, conversation, 10_000))
        words += tiny.max_length - 1 - size
    assert size == tiny.max_length - 1
    with pytest.raises(SpectrainError, match="no reply has two tokens or more"):
        plan(flags, prompts=str(path))
    long = write(tmp_path / "longer.jsonl", [prompt("x" * 2000)])
    with pytest.raises(SpectrainError, match="prompt 1 cannot be used"):
        plan(flags, prompts=str(long))

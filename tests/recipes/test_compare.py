"""`compare`: one budget for all, every number from a measurement, an interrupted run goes on."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from preparing import PROMPTS, prompt, write
from safetensors.torch import load_file
from tiny_models import SENTENCES

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.data.store import FeatureStore
from spectrain.evaluation.comparison import markdown, rows
from spectrain.generator.speculate import Completion, Generator
from spectrain.heads.io import load_head
from spectrain.recipes import compare, evaluate, prepare, train


@pytest.fixture(scope="module")
def store(tiny_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    prepare.run(
        prepare.PrepareConfig(
            target=str(tiny_path),
            prompts=write(folder / "prompts.jsonl", PROMPTS),
            store=folder / "store",
            heldout=0.4,
            max_new_tokens=12,
            dtype="float32",
        )
    )
    return folder / "store"


@pytest.fixture
def config(store, tiny_path, tmp_path):
    def make(**changes):
        settings = {
            "target": str(tiny_path),
            "store": store,
            "out": tmp_path / "out",
            "common": {"steps": 3, "batch_size": 2, "head": {"draft_vocab_size": 60}},
            "entries": {
                "two": {"family": "eagle3", "head": {"steps": 2}},
                "three": {"family": "eagle3", "head": {"steps": 3}},
            },
            "draft_tokens": 3,
            "prompts": 3,
            "max_new_tokens": 8,
        }
        return compare.CompareConfig(**settings | changes)

    return make


def test_table_numbers_are_those_of_the_single_commands(config, store, tiny_path, tmp_path):
    report = compare.run(config())
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == report
    assert (tmp_path / "out" / "compare.png").read_bytes()[:4] == b"\x89PNG"
    for name, entry in report["entries"].items():
        head = load_head(tmp_path / "out" / name)
        assert head.config.steps == {"two": 2, "three": 3}[name]  # the entry's own
        assert head.config.draft_vocab_size == 60  # common to all
        alone = evaluate.run(
            evaluate.EvalConfig(
                target=str(tiny_path),
                store=store,
                head=tmp_path / "out" / name / "head",
                temperature=[0.0],
                max_draft=3,
                out=tmp_path / "eval",
            )
        )["temperatures"][0]
        assert entry["tau"] == alone["tau"]
        assert entry["positions"] == alone["positions"]
        race = report["race"]["methods"][name]
        assert race["identical"] == report["race"]["prompts"] == 3
    header, cells = rows(report)
    assert {len(row) for row in cells} == {len(header)}
    assert [row[0] for row in cells][-2:] == ["spectrain-plain", "transformers"]
    assert all(name in markdown(report) for name in report["entries"])


def test_a_second_call_trains_nothing_again(config, monkeypatch):
    first = compare.run(config())
    monkeypatch.setattr(train, "train", None)  # would be called by any training
    again = compare.run(config())
    assert again["entries"] == first["entries"]


def test_a_head_that_exists_is_compared_without_training(config, tmp_path):
    compare.run(config(families=["two"]))
    entries = {"old": {"load": str(tmp_path / "out" / "two" / "head")}}
    report = compare.run(config(entries=entries, out=tmp_path / "other"))
    assert report["entries"]["old"]["trained_tokens"] is None
    assert report["entries"]["old"]["tau"][0]["value"] >= 1


def test_bad_entries_are_told_before_any_training(config, tmp_path):
    entries = {"a": {"family": "eagle3"}, "b": {"family": "eagle3", "head": {"stepz": 1}}}
    with pytest.raises(SpectrainError, match=r"unknown key head\.stepz"):
        compare.run(config(entries=entries))
    with pytest.raises(SpectrainError, match="no entry c"):
        compare.run(config(families=["c"]))
    assert not (tmp_path / "out" / "a").exists()


# ── several families at once ─────────────────────────────────────────────────

TUNED = {"mode": "lora", "rank": 4, "heads_first": 0.0, "lr": 2e-2}
FOUR = {
    "eagle3": {"family": "eagle3", "head": {"steps": 3, "draft_vocab_size": 200}},
    "eagle1": {"family": "eagle1"},
    "medusa": {"family": "medusa", "head": {"steps": 2}},
    "tuned": {"family": "medusa", "head": {"steps": 4}, "trunk": TUNED},
}
COMMON = {"steps": 20, "batch_size": 2, "lr": 5e-3}


@pytest.fixture(scope="module")
def other_store(tiny_path, tmp_path_factory):
    """Held-out rows alone, of other prompts, and rounded features."""
    folder = tmp_path_factory.mktemp("other")
    rows = [prompt(f"Tell me {n} words about {text}") for n, text in enumerate(SENTENCES)]
    prepare.run(
        prepare.PrepareConfig(
            target=str(tiny_path),
            prompts=write(folder / "prompts.jsonl", rows),
            store=folder / "store",
            heldout=1,
            max_new_tokens=16,
        )
    )
    return folder / "store"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def four(store, other_store, tiny_path, out):
    """The report of four heads, one with its target tuned, measured on another store."""
    return compare.run(
        compare.CompareConfig(
            target=str(tiny_path),
            store=store,
            heldout_store=other_store,
            out=out,
            entries=FOUR,
            common=COMMON,
            draft_tokens=3,
            race_draft_tokens=1,
            prompts=5,
            max_new_tokens=16,
        )
    )


@pytest.fixture(scope="module")
def greedy(other_store):
    """The store, its held-out rows that were answered greedily, and their prompts."""
    opened = FeatureStore.open(other_store)
    rows = [row for row in opened.rows("heldout") if row.temperature == 0]
    return opened, rows, [opened.prompt(row) for row in rows]


def decode(target, head, gamma, prompts, longest):
    return Generator(target, head, gamma).generate(prompts, longest)


def load(folder, target):
    head = load_head(folder)
    head.check_target(target, str(folder))
    return head.bind(target.readout).eval()


def test_all_are_measured_at_the_longest_draft_that_each_can(four):
    assert four["draft_tokens"] == 2  # asked for 3, the Medusa head has 2
    for entry in four["entries"].values():
        assert [one["draft"] for one in entry["tau"]] == [1, 2]
        assert [one["position"] for one in entry["positions"]] == [1, 2]


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "medusa"])
def test_numbers_are_those_of_the_other_store(four, store, other_store, tiny_path, out, name):
    def alone(where):
        return evaluate.run(
            evaluate.EvalConfig(
                target=str(tiny_path),
                store=where,
                head=out / name / "head",
                temperature=[0.0],
                max_draft=2,
                out=out / "eval",
            )
        )["temperatures"][0]

    entry, expected = four["entries"][name], alone(other_store)
    assert four["heldout_conversations"] == len(SENTENCES) == expected["conversations"]
    for key in ("tau", "positions", "tokens"):
        assert entry[key] == expected[key]
    assert entry["tau"] != alone(store)["tau"]
    assert entry["tau"][-1]["value"] > 1  # something is accepted


def test_the_race_drafts_as_many_tokens_as_asked(four, greedy, tiny_path, out):
    target, prompts = Target.load(str(tiny_path)), greedy[2][:5]
    differ = []
    for name in ("eagle3", "eagle1", "medusa"):
        head, raced = load(out / name / "head", target), four["race"]["methods"][name]
        runs = {
            gamma: sum((c.runs for c in decode(target, head, gamma, prompts, 16)), Counter())
            for gamma in (1, 2)
        }
        assert raced["runs"] == {str(run): runs[1][run] for run in sorted(runs[1])}
        differ.append(runs[1] != runs[2])
    assert any(differ)
    assert four["race_draft_tokens"] == 1


def test_the_race_drafts_no_deeper_than_a_head_can(config, out, four, monkeypatch):
    made = []

    class Watched(Generator):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self.gamma)

    monkeypatch.setattr(compare, "Generator", Watched)
    entries = {name: {"load": str(out / name / "head")} for name in ("eagle3", "medusa")}
    compare.run(config(entries=entries, race_draft_tokens=3, prompts=1))
    assert made == [3, 2, 0]  # the last is plain decoding


def test_bytes_per_token_are_those_that_a_store_of_the_features_alone_has(
    four, store, tiny_path, tmp_path
):
    """What each head reads and nothing else, prepared anew; the bytes of its tensors."""
    wanted = {
        "eagle3": {"last_states": "replies"},
        "eagle1": {"aux_layers": (), "last_states": "everywhere"},
        "medusa": {"aux_layers": (), "last_states": "replies"},
    }
    sizes = {}
    for name, features in wanted.items():
        folder = tmp_path / name
        prepare.run(
            prepare.PrepareConfig(
                target=str(tiny_path),
                prompts=store.parent / "prompts.jsonl",
                store=folder,
                heldout=0.4,
                max_new_tokens=12,
                dtype="float32",
                **features,
            )
        )
        tensors = [load_file(file) for file in folder.glob("*.safetensors")]
        stored = sum(t[key].nbytes for t in tensors for key in ("aux", "last") if key in t)
        sizes[name] = stored / sum(len(t["tokens"]) for t in tensors)
    assert len(set(sizes.values())) == 3
    for name, size in sizes.items():
        assert four["entries"][name]["bytes_per_token"] == pytest.approx(size)


def test_a_tuned_target_is_what_its_head_is_measured_on(four, greedy, tiny_path, out):
    """τ is the tokens per forward of the generator with that target, and with no other."""
    _, rows, prompts = greedy
    longest = max(row.supervised for row in rows)
    tuned, original = Target.load(str(out / "tuned" / "adapter")), Target.load(str(tiny_path))
    head, entry = load(out / "tuned" / "head", tuned), four["entries"]["tuned"]
    assert entry["target"] == str(out / "tuned" / "adapter")
    assert four["entries"]["medusa"]["target"] == str(tiny_path)

    def tau(target, gamma):
        done = decode(target, head, gamma, prompts, longest)
        return sum(c.committed for c in done) / sum(c.forwards for c in done)

    for gamma in (1, 2):
        assert entry["tau"][gamma - 1]["value"] == pytest.approx(tau(tuned, gamma))
    other = head.bind(original.readout) and tau(original, 2)
    assert entry["tau"][1]["value"] != pytest.approx(other)
    head.bind(tuned.readout)
    # The race, too: its replies are the tuned target's, by fewer forwards than tokens.
    raced = four["race"]["methods"]["tuned"]
    done = decode(tuned, head, 1, prompts[:5], 16)
    assert raced["target_forwards"] == sum(c.forwards for c in done)
    assert raced["tokens"] == sum(len(c.tokens) for c in done)
    # Its replies are those of the tuned target's plain decoding, and not the original's.
    assert raced["identical"] == 5
    plain = [Generator(model).generate(prompts[:5], 16) for model in (tuned, original)]
    assert [c.tokens for c in plain[0]] != [c.tokens for c in plain[1]]
    assert four["race"]["methods"]["medusa"]["identical"] == 5


def test_what_tuning_did_to_the_target_is_measured_on_the_held_out_store(four, out, other_store):
    """Token by token: −log p of every held-out reply token, from the model's own logits."""
    opened = FeatureStore.open(other_store)
    rows = opened.rows("heldout")
    quality = four["entries"]["tuned"]["quality"]
    adapter = out / "tuned" / "adapter"
    for name, when in ((four["entries"]["medusa"]["target"], "before"), (str(adapter), "after")):
        model = Target.load(name).model
        losses = []
        for row in rows:
            batch = opened.batch([row], with_aux=False)
            with torch.no_grad():
                told = model(batch.tokens).logits[0].log_softmax(-1)
            for place in range(1, row.length):
                if batch.reply[0, place]:
                    losses.append(-told[place - 1, batch.tokens[0, place]].item())
        assert quality["heldout_tokens"] == len(losses) > 20
        assert quality[f"loss_{when}"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert quality["perplexity_before"] != quality["perplexity_after"]
    assert four["entries"]["medusa"]["quality"] is None
    assert f"tuned tunes its target: perplexity of {quality['heldout_tokens']}" in markdown(four)


def test_costs_of_training_are_those_of_the_runs(four, out):
    for name, entry in four["entries"].items():
        own = json.loads((out / name / "report.json").read_text())["report"]
        assert entry["seconds"] == own["seconds"]
        assert entry["trained_tokens"] == own["supervised_tokens"]
        assert entry["trained_parameters"] == own["trained_parameters"]
        stored = load_file(out / name / "head" / "model.safetensors")
        weights = [v for v in stored.values() if v.is_floating_point()]
        assert entry["parameters"] == sum(v.numel() for v in weights)
    assert len({entry["trained_tokens"] for entry in four["entries"].values()}) == 1


def test_a_head_of_a_tuned_target_is_loaded_with_it_and_refused_without(
    config, four, other_store, out, tmp_path
):
    saved = {"load": str(out / "tuned" / "head")}
    both = saved | {"target": str(out / "tuned" / "adapter")}
    asked = {"heldout_store": other_store, "draft_tokens": 2}
    entry = compare.run(config(entries={"old": both}, **asked))["entries"]["old"]
    for key in ("tau", "positions", "target", "parameters"):
        assert entry[key] == four["entries"]["tuned"][key]
    with pytest.raises(SpectrainError, match=r"the head was trained for .*adapter") as caught:
        compare.run(config(entries={"old": saved}, out=tmp_path / "not", **asked))
    assert "\n" not in str(caught.value)


# ── numbers of the race, refusals ────────────────────────────────────────────


def test_speedups_are_own_tokens_per_second_over_the_baselines(config, four, out, monkeypatch):
    """40 tokens in 2 s; the baselines 40 in 5 s and 20 in 10 s: 20 / 8 and 20 / 2."""

    def race(methods, prompts, clocks):
        sizes = {"eagle3": (20, 1.0), "spectrain-plain": (20, 2.5), "transformers": (10, 5.0)}
        assert set(methods) == set(sizes)
        assert len(prompts) == 2
        return {
            name: {"done": [Completion([7] * n, "length", n - 1)] * 2, "seconds": [s, s]}
            for name, (n, s) in sizes.items()
        }

    monkeypatch.setattr(compare, "race", race)
    entries = {"eagle3": {"load": str(out / "eagle3" / "head")}}
    methods = compare.run(config(entries=entries, prompts=2))["race"]["methods"]
    speeds = {
        name: [method[f"speedup over {b}"]["value"] for b in ("spectrain-plain", "transformers")]
        for name, method in methods.items()
    }
    assert speeds["eagle3"] == pytest.approx([2.5, 10])
    assert speeds["spectrain-plain"] == pytest.approx([1, 4])
    assert speeds["transformers"] == pytest.approx([0.25, 1])
    assert methods["eagle3"]["tokens_per_second"] == pytest.approx(20)


@pytest.mark.parametrize("other", [{"batch_size": 3}, {"steps": 4}])
def test_unequal_budgets_are_refused_before_any_training(config, tmp_path, other):
    entries = {"a": {"family": "eagle3"}, "b": {"family": "eagle3", **other}}
    with pytest.raises(SpectrainError, match="different numbers of tokens"):
        compare.run(config(entries=entries))
    assert not (tmp_path / "out" / "a").exists()


def test_held_out_rows_have_to_be_greedy(config, four, tiny_path, out, tmp_path):
    prepare.run(
        prepare.PrepareConfig(
            target=str(tiny_path),
            prompts=write(tmp_path / "prompts.jsonl", PROMPTS[:3]),
            store=tmp_path / "sampled",
            heldout=1,
            heldout_temperatures=(1.0,),
            max_new_tokens=6,
        )
    )
    entries = {"old": {"load": str(out / "eagle3" / "head")}}
    with pytest.raises(SpectrainError, match="no held-out rows that were answered at") as caught:
        compare.run(config(entries=entries, heldout_store=tmp_path / "sampled"))
    assert "\n" not in str(caught.value)
    assert "temperature 0" in str(caught.value)

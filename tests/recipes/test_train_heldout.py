"""Held-out rows are measured on the way: as eval-alpha does, without a trace in the training."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from spectrain.evaluation import measure
from spectrain.evaluation.heldout import told
from spectrain.evaluation.summary import summarise
from spectrain.heads.eagle3 import Eagle3Head, Eagle3Options
from spectrain.heads.io import load_head
from spectrain.heads.registry import FAMILIES
from spectrain.recipes import evaluate, prepare, train
from spectrain.recipes.heldout import Heldout, read_best
from spectrain.trainer import loop
from spectrain.trainer.metrics import read_heldout, read_metrics

# The command, with small batches of held-out rows.
SMALL = """
from spectrain.evaluation import measure
measure._BATCH_TOKENS = 100
from spectrain.cli import main
main()
"""
WORDS = ["apple", "dog", "two", "word", "letter", "seven", "fox", "quick", "lazy", "question"]
TIMED = {"tokens_per_second"}


@pytest.fixture(scope="module")
def make_store(tiny_path, tmp_path_factory):
    """make_store(**settings) → a store of 40 conversations, half of them held out."""

    def make(**settings):
        folder = tmp_path_factory.mktemp("store")
        draw = random.Random(0)
        prompts = folder / "prompts.jsonl"
        with prompts.open("w") as file:
            for number in range(40):
                words = " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))
                turns = [("user", f"{number} {words}"), ("assistant", words.upper())]
                messages = [{"role": role, "content": text} for role, text in turns]
                file.write(json.dumps({"messages": messages}) + "\n")
        chosen = {"regenerate": False, "heldout": 0.5, "dtype": "float32"} | settings
        store = folder / "store"
        prepare.run(
            prepare.PrepareConfig(target=str(tiny_path), prompts=prompts, store=store, **chosen)
        )
        return store

    return make


@pytest.fixture(scope="module")
def store(make_store):
    return make_store()


@pytest.fixture
def config(store, tiny_path, tmp_path):
    """config(**changes) → a short training that is measured every other step and at its end."""

    def make(**changes):
        settings = {
            "target": str(tiny_path),
            "store": store,
            "out": tmp_path / "run",
            "head": {"steps": 3, "draft_vocab_size": 60},
            "steps": 5,
            "batch_size": 4,
            "save_every": 2,
            "log_every": 1,
            "lr": 1e-2,
            "eval_every": 2,
        }
        return train.TrainConfig(**{**settings, **changes})

    yield make
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def untimed(rows):
    return [{k: v for k, v in row.items() if k not in TIMED} for row in rows]


def same_head(one, two):
    pairs = zip(one.state_dict().items(), two.state_dict().items(), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def measured_by_eval_alpha(asked, head, tmp_path):
    given = {"target": asked.target, "store": asked.store, "head": head, "out": tmp_path / "plot"}
    found = evaluate.run(evaluate.EvalConfig(**given, temperature=[0.0], max_draft=3))
    return found["temperatures"][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_are_those_of_eval_alpha(config, make_store, tmp_path, family):
    """Of the last head and of the best one; every family, and the loss is there, too."""
    options = {} if family == "draft" else {"draft_vocab_size": 60}
    store = make_store(last_states="everywhere") if family == "eagle1" else config().store
    asked = config(family=family, head={"steps": 3, **options}, eval_rows=99, store=store)
    report = train.run(asked)
    rows = read_heldout(asked.out)
    assert [row["step"] for row in rows] == [2, 4, 5]
    best = read_best(asked.out)
    for head, step in ((asked.out, 5), (asked.out / "best", best["step"])):
        (mine,) = [row["heldout"] for row in rows if row["step"] == step]
        theirs = measured_by_eval_alpha(asked, head, tmp_path)
        assert (mine["rows"], mine["tokens"]) == (theirs["conversations"], theirs["tokens"])
        for key in ("marginal", "conditional"):
            expected = [position[key]["value"] for position in theirs["positions"]]
            assert mine[key] == pytest.approx(expected)
        assert mine["draft"] == 3 == theirs["tau"][-1]["draft"]
        assert mine["tau"] == pytest.approx(theirs["tau"][-1]["value"])
    assert best["tau"] == max(row["heldout"]["tau"] for row in rows)
    assert report["best"] == best
    assert rows[-1]["heldout"]["loss"] > 0


def test_a_running_mean_is_what_is_measured_and_kept(config, tmp_path):
    """The last evaluation is of the head that is written, and the best one is a mean, too."""
    asked = config(ema=0.5, eval_rows=99, lr=3e-2)
    train.run(asked)
    rows, best = read_heldout(asked.out), read_best(asked.out)
    for head, step in ((asked.out, 5), (asked.out / "best", best["step"])):
        (mine,) = [row["heldout"] for row in rows if row["step"] == step]
        theirs = measured_by_eval_alpha(asked, head, tmp_path)
        assert mine["tau"] == pytest.approx(theirs["tau"][-1]["value"])
    head, stored = load_head(asked.out), train.FeatureStore.open(asked.store)
    head.bind(train.Target.load(asked.target, pack_weights=False).readout)
    sums = head.objective(stored.batch(stored.rows("heldout")))  # τ alone may be equal by chance
    terms = (sums.loss / sums.count).tolist()
    assert rows[-1]["heldout"]["loss_terms"] == pytest.approx(terms, rel=1e-5)


def test_what_a_later_step_said_is_forgotten_when_a_run_goes_back_behind_it(config):
    """Its checkpoint was damaged, say; metrics.jsonl drops its rows as well."""
    asked = config()
    train.run(asked)
    facts = asked.out / "best" / "best.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"step": 5, "tau": 9.0}))
    shutil.rmtree(asked.out / "checkpoints" / "step-00000005")
    (asked.out / "report.json").unlink()
    report = train.run(asked)
    (last,) = [row["heldout"] for row in read_heldout(asked.out) if row["step"] == 5]
    assert (report["best"]["step"], report["best"]["tau"]) == (5, last["tau"])


def test_measuring_changes_nothing_of_the_training(config, tmp_path):
    """Weights and curve bit for bit. EAGLE-1, for its noise would show a draw too many."""
    head = {"steps": 2, "draft_vocab_size": 60}
    common = {"family": "eagle1", "head": head, "online": True}
    plain = config(out=tmp_path / "plain", eval_every=0, **common)
    measured = config(**common)
    for asked in (plain, measured):
        train.run(asked)
    assert same_head(load_head(plain.out), load_head(measured.out))
    assert untimed(read_metrics(plain.out)) == untimed(read_metrics(measured.out))
    assert not (plain.out / "best").exists()
    assert read_heldout(plain.out) == []


def test_the_loss_is_that_of_the_objective(config, store):
    """Over all held-out rows in one batch, by the head's own sums, weighed as at the end."""
    asked = config(eval_rows=99)
    train.run(asked)
    stored = train.FeatureStore.open(store)
    head = load_head(asked.out)
    head.bind(train.Target.load(asked.target, pack_weights=False).readout)
    sums = head.objective(stored.batch(stored.rows("heldout")))
    terms = (sums.loss / sums.count).tolist()
    found = read_heldout(asked.out)[-1]["heldout"]
    assert found["loss_terms"] == pytest.approx(terms, rel=1e-5)
    weighed = sum(w * t for w, t in zip(head.weights(1.0), terms, strict=True))
    assert found["loss"] == pytest.approx(weighed, rel=1e-5)


def test_what_cannot_be_told_is_none():
    """No row with an anchor, or a loss that is not finite: JSON takes neither NaN nor infinity."""
    zeros = {name: np.zeros(2) for name in ("anchors", "beta", "reached", "reached_beta")}
    zeros |= {"tokens": np.zeros(2), "forwards": np.zeros(2)}
    sums = zeros | {"loss": np.array([np.nan, 1.0]), "count": np.array([2.0, 0.0])}
    found = told(sums, [1.0, 1.0])
    assert found["tau"] is None
    assert found["loss"] is None
    assert found["loss_terms"] == found["marginal"] == found["conditional"] == [None, None]


def dying_at(monkeypatch, step, when):
    """A context in which the run dies at an evaluation, before or after what it does."""
    whole = Heldout.__call__

    def call(self, now):
        if now == step and when == "before":
            raise RuntimeError("killed")
        found = whole(self, now)
        if now == step:
            raise RuntimeError("killed")
        return found

    context = monkeypatch.context()
    patch = context.__enter__()
    patch.setattr(Heldout, "__call__", call)
    return context


@pytest.mark.parametrize(
    ("step", "save_every", "when"),
    [(4, 2, "before"), (4, 3, "after"), (5, 2, "before"), (2, 4, "after")],
)
def test_a_continued_run_is_measured_like_an_uninterrupted_one(
    config, tmp_path, monkeypatch, step, save_every, when
):
    """Killed in an evaluation, with the checkpoint of that very step or an earlier one behind it
    or none at all: every evaluation is told once, and the best is the same."""
    whole = config(out=tmp_path / "whole", save_every=save_every)
    expected = train.run(whole)
    asked = config(save_every=save_every)
    context = dying_at(monkeypatch, step, when)
    with pytest.raises(RuntimeError, match="killed"):
        train.run(asked)
    context.__exit__(None, None, None)
    report = train.run(asked)
    assert read_heldout(asked.out) == read_heldout(whole.out)
    assert untimed(read_metrics(asked.out)) == untimed(read_metrics(whole.out))
    assert read_best(asked.out) == read_best(whole.out)
    assert same_head(load_head(asked.out / "best"), load_head(whole.out / "best"))
    assert report["best"] == expected["best"]


def test_the_best_is_kept_though_the_head_gets_worse(config, monkeypatch):
    """τ 1.5 at the first evaluation and less from there on, then equal: the earliest stays."""
    taus = {2: 1.5, 4: 1.2, 5: 1.5}
    original = Heldout.__call__.__globals__["told"]
    steps = iter(taus)

    def worse(sums, weights):
        return original(sums, weights) | {"tau": taus[next(steps)]}

    monkeypatch.setitem(Heldout.__call__.__globals__, "told", worse)
    asked = config()
    text = train.render(train.run(asked))
    assert read_best(asked.out)["step"] == 2
    assert not same_head(load_head(asked.out / "best"), load_head(asked.out))
    assert "drafts of 3: τ 1.500" in text
    assert f"best τ 1.500 after step 2: {asked.out / 'best'}" in text
    folder = {path.name for path in (asked.out / "best").iterdir()}
    assert folder == {"config.json", "model.safetensors", "provenance.json", "best.json"}


def test_a_best_of_other_rows_does_not_compare(config):
    """Fewer rows may have any τ; what was measured on others is replaced, whatever its number."""
    asked = config(steps=2)
    train.run(asked)
    facts = asked.out / "best" / "best.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"tau": 99.0}))
    train.run(config(steps=4, extend=True))
    assert read_best(asked.out)["tau"] == 99.0
    train.run(config(steps=6, extend=True, eval_rows=5))
    assert read_best(asked.out)["rows"] == 5


def test_another_run_in_the_folder_leaves_no_best(config):
    """Neither one that was thrown away nor one that was killed before its first checkpoint."""
    asked = config(save_every=99)
    train.run(asked)
    half = asked.out / ".best.1-abc.tmp"
    half.mkdir()
    train.run(config(eval_every=0, overwrite=True))
    assert not (asked.out / "best").exists()
    assert not half.exists()
    train.run(config(overwrite=True))
    shutil.rmtree(asked.out / "checkpoints")
    (asked.out / "report.json").unlink()
    train.run(config(eval_every=0))
    assert not (asked.out / "best").exists()


def test_without_heldout_rows_it_is_said_and_training_goes_on(config, make_store, capsys):
    report = train.run(config(store=make_store(heldout=0.0)))
    assert "no held-out rows: nothing is measured on the way" in capsys.readouterr().err
    assert report["best"] is report["heldout"] is None
    assert "best" not in train.render(report)


@pytest.mark.parametrize("mode", ["lora", "scratch"])
def test_a_head_with_a_trunk_is_measured_under_the_trunk_of_the_moment(config, mode, monkeypatch):
    """And no head is kept without the trunk that it belongs to."""
    seen = []
    whole = Heldout.__call__

    def call(self, step):
        batch = self._source.batch(self._rows[:1], True)
        seen.append(batch.last)
        return whole(self, step)

    monkeypatch.setattr(Heldout, "__call__", call)
    head = {"steps": 2, "draft_vocab_size": 60}
    asked = config(family="medusa", head=head, trunk={"mode": mode, "heads_first": 0.0})
    report = train.run(asked)
    assert [row["step"] for row in read_heldout(asked.out)] == [2, 4, 5]
    assert not torch.equal(seen[0], seen[1])
    assert report["heldout"]["heldout"]["tau"] >= 1
    assert report["best"] is None
    assert not (asked.out / "best").exists()


def test_time_of_measuring_is_no_training_time(config, monkeypatch):
    """Each evaluation takes 0.3 s longer; the run's seconds do not know of it."""
    clock = loop.Stopwatch.lap.__globals__["time"]
    whole, now = Heldout.__call__, [0.0]
    real = clock.perf_counter
    monkeypatch.setattr(clock, "perf_counter", lambda: real() + now[0])

    def call(self, step):
        now[0] += 1000.0
        return whole(self, step)

    monkeypatch.setattr(Heldout, "__call__", call)
    report = train.run(config())
    assert now[0] == 3000.0
    assert report["seconds"] < 900


def test_two_processes_measure_what_one_does(config, tmp_path, monkeypatch):
    """They deal the batches, sums are reduced: the same numbers to rounding, each row told once."""
    monkeypatch.setattr(measure, "_BATCH_TOKENS", 100)
    one = config(out=tmp_path / "one", batch_size=8)
    train.run(one)
    rows = train.FeatureStore.open(one.store).rows("heldout")
    assert len(list(measure.batches(rows, load_head(one.out)))) > 4  # both have something to add
    two = tmp_path / "two"
    settings = {"batch_size": 8, "save_every": 2, "log_every": 1, "lr": 1e-2, "eval_every": 2}
    settings |= {"head.steps": 3, "head.draft_vocab_size": 60, "steps": 5}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + ["--no-python", sys.executable, "-c", SMALL]
        + ["train-eagle", "--target", one.target, "--store", str(one.store)]
        + ["--out", str(two)]
        + [part for key, value in settings.items() for part in ("--set", f"{key}={value}")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    expected, rows = read_heldout(one.out), read_heldout(two)
    assert [row["step"] for row in rows] == [2, 4, 5]
    for mine, other in zip(rows, expected, strict=True):
        for key in ("rows", "tokens", "draft"):
            assert mine["heldout"][key] == other["heldout"][key]
        assert mine["heldout"]["loss_terms"] == pytest.approx(
            other["heldout"]["loss_terms"], rel=1e-4
        )
        assert mine["heldout"]["tau"] == pytest.approx(other["heldout"]["tau"], abs=0.05)
    assert read_best(two)["tau"] == max(row["heldout"]["tau"] for row in rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_dealt_in_batches_and_measured_in_the_targets_own_type(
    store, tiny_path, dtype, monkeypatch
):
    """Ranks of five that add up to one alone, with fewer batches than ranks; and a head trained in
    float32 is measured as it will be used, beside a target of whatever type."""
    target = train.Target.load(str(tiny_path), dtype=dtype, pack_weights=False)
    stored = train.FeatureStore.open(store)
    options = Eagle3Options(steps=3, draft_vocab_size=60, aux_layers=(0, 2, 3))
    counts = stored.token_counts("train", target.vocab_size)
    head = Eagle3Head.create(options, target, counts).float()
    rows = stored.rows("heldout")
    monkeypatch.setattr(measure, "_BATCH_TOKENS", sum(row.length for row in rows) // 2)

    def sums(rank, world):
        one = {"process_index": rank, "num_processes": world, "is_main_process": rank == 0}
        alone = SimpleNamespace(**one, device=target.device, reduce=lambda value, _: value)
        measuring = Heldout(head, stored, rows, alone)
        assert 1 < len(measuring._parts) < 5
        return measuring._sums()

    whole, parts = sums(0, 1), [sums(rank, 5) for rank in range(5)]
    for name, value in whole.items():
        assert value == pytest.approx(sum(part[name] for part in parts))
    assert not parts[4]["tokens"].any()
    assert head.dtype == torch.float32
    same = type(head)(head.config)
    same.load_state_dict(head.state_dict())
    same.bind(target.readout).to(target.dtype).eval()
    conversations = measure.measure(target, same, stored, {0.0: rows}, 3)[0.0]
    expected = summarise(conversations, 3, 0)
    assert told(whole, head.weights(1.0))["tau"] == expected["tau"][-1]["value"]

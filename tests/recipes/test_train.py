"""`train-eagle` from a real store to a head on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState
from tiny_models import save_tiny

from spectrain.core import config as config_module
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.data.capture import capture
from spectrain.data.shard import Row
from spectrain.data.writer import StoreWriter
from spectrain.heads.io import load_head
from spectrain.heads.registry import FAMILIES, family
from spectrain.recipes import train, train_report
from spectrain.trainer.metrics import read_metrics


@pytest.fixture
def config(store, tiny_path, tmp_path):
    """config(**changes) → a short training of a small head in a folder of its own."""

    def make(**changes):
        settings = {
            "target": str(tiny_path),
            "store": store,
            "out": tmp_path / "run",
            "head": {"steps": 3, "draft_vocab_size": 40},
            "steps": 6,
            "batch_size": 4,
            "micro_batch": 2,
            "save_every": 3,
            "log_every": 1,
            "lr": 1e-2,
        }
        return train.TrainConfig(**{**settings, **changes})

    yield make
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_a_run_leaves_a_head_its_history_and_a_report(config, tiny):
    asked = config()
    report = train.run(asked)
    head = load_head(asked.out / "head")
    assert head.config.steps == 3
    assert head.config.target.fingerprint == tiny.fingerprint
    assert report["steps"] == 6
    assert report["head"] == str(asked.out / "head")
    assert len(report["acceptance"]) == 3
    assert report["supervised_tokens"] == read_metrics(asked.out)[-1]["supervised_tokens"] > 0

    provenance = json.loads((asked.out / "head" / "provenance.json").read_text())
    assert provenance["seed"] == 0
    assert provenance["arguments"]["lr"] == 1e-2
    assert provenance["store"] == report["store"]
    training = json.loads((asked.out / "head" / "training.json").read_text())
    assert [row["step"] for row in training["curve"]] == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_says_so_and_gives_its_report(config, capsys):
    report = train.run(config())
    assert f"{report['steps']} steps" in train.render(report)
    before = (config().out / "head" / "model.safetensors").stat().st_mtime_ns
    assert train.run(config()) == report
    assert "this run is finished" in capsys.readouterr().err
    assert (config().out / "head" / "model.safetensors").stat().st_mtime_ns == before


def test_the_loss_is_shown_beside_that_of_the_first_steps(config):
    """The steps of the first logged row; where it is a part of the end already, it says nothing."""
    report = train.run(config(steps=12, log_every=2))
    rows = read_metrics(config().out)
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert report["first_loss"] == pytest.approx(rows[0]["loss"])
    assert report["first_loss"] > report["loss"] == rows[-1]["loss"]
    shown = f"loss {rows[-1]['loss']:.3f} ({rows[0]['loss']:.3f} in the first 2 steps)"
    assert shown in train.render(report)
    report = train.run(config(steps=12, log_every=50, overwrite=True))
    assert report["first_loss"] is None
    assert f"loss {report['loss']:.3f}, greedy" in train.render(report)


def test_the_first_loss_is_weighed_like_the_last(config):
    """λ falls to a third after 0.67 of an MTP run: that is no progress."""
    head = {"steps": 2, "draft_vocab_size": 40}
    report = train.run(config(family="mtp-sequential", head=head))
    assert report["first_loss"] == pytest.approx(read_metrics(config().out)[0]["loss"] / 3)


def test_the_last_line_measures_the_head(config, make_store):
    """With the store's own held-out rows; without any it says so, and how to get some."""
    asked = config()
    last = train.render(train.run(asked)).splitlines()[-1]
    assert last == (
        f"what it is worth: spectrain eval-alpha --target {asked.target} --store {asked.store} "
        f"--head {asked.out / 'head'}"
    )
    bare = make_store(0, heldout=0.0)
    for report in [train.run(config(store=bare, overwrite=True)), train.run(config(store=bare))]:
        last = train.render(report).splitlines()[-1]
        assert last.startswith(f"what it is worth: {bare} has no held-out rows; spectrain prepare")
        assert f"--store {bare}" not in last
        for part in ("--heldout 1 --store HELDOUT", "eval-alpha", "--store HELDOUT --head"):
            assert part in last


def test_another_target_is_named_before_its_layers(config, tokenizer, tmp_path):
    """With more layers its auxiliary ones are others too."""
    other = save_tiny(tmp_path / "other", tokenizer, num_hidden_layers=8)
    with pytest.raises(SpectrainError, match=r"the store holds features of .* not of this target"):
        train.run(config(target=str(other)))


def test_another_run_in_the_same_folder_is_refused(config, make_store):
    train.run(config())
    with pytest.raises(SpectrainError, match=r"lr = 0\.01, now it is 0\.02.*overwrite"):
        train.run(config(lr=0.02))
    with pytest.raises(SpectrainError, match=r"started with head\.steps = 3, now it is 2"):
        train.run(config(head={"steps": 2, "draft_vocab_size": 40}))
    with pytest.raises(SpectrainError, match="started with store = "):
        train.run(config(store=make_store(1)))
    assert train.run(config(lr=0.02, overwrite=True))["steps"] == 6
    assert train.run(config(lr=0.02, steps=8, extend=True))["steps"] == 8


def test_interrupted_after_the_loop_writes_the_head_of_the_last_checkpoint(config, monkeypatch):
    def fail(*_):
        raise RunFailed("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(train, "save_head", fail)
        with pytest.raises(RunFailed):
            train.run(config())
    assert train.run(config())["steps"] == 6
    assert (config().out / "head" / "config.json").is_file()


def test_a_head_to_start_from_keeps_its_vocabulary(config, make_store, tmp_path):  # case 28
    train.run(config())
    first = load_head(config().out / "head")
    other = make_store(7, answer=str.title)
    train.run(config(store=other, init=config().out / "head", head={}, out=tmp_path / "warm"))
    warm = load_head(tmp_path / "warm" / "head")
    assert torch.equal(first.d2t, warm.d2t)
    assert warm.config == first.config
    # The folder of the run stands for its head, as everywhere.
    train.run(config(store=other, init=config().out, head={}, out=tmp_path / "run folder"))
    same = load_head(tmp_path / "run folder").state_dict()
    assert all(torch.equal(value, same[name]) for name, value in warm.state_dict().items())
    # A head made for the other store guesses other tokens: the map would have changed.
    train.run(config(store=other, out=tmp_path / "new"))
    assert not torch.equal(load_head(tmp_path / "new" / "head").d2t, first.d2t)


def test_options_of_the_head_are_checked_all_at_once(config):
    with pytest.raises(SpectrainError) as caught:
        train.run(config(head={"stepss": 3, "step_decay": 7}))
    assert "unknown key head.stepss, did you mean 'steps'?" in str(caught.value)
    assert "head.step_decay: 7 refused" in str(caught.value)
    with pytest.raises(SpectrainError, match="cannot change the head given by init"):
        train.run(config(init="somewhere"))
    with pytest.raises(SpectrainError, match="unknown head family 'eagle9'"):
        train.run(config(family="eagle9"))


def test_the_example_of_a_configuration_file_is_valid():
    example = yaml.safe_load(textwrap.dedent(config_module.__doc__.partition("::\n")[2]))
    chosen = train.TrainConfig(**example["train"])
    family(chosen.family).Options(**chosen.head)


def test_features_of_other_layers_are_refused(config):
    with pytest.raises(SpectrainError, match=r"layers \[0, 2, 3\], the head reads \[0, 1, 2\]"):
        train.run(config(head={"aux_layers": [0, 1, 2]}))


def test_rows_without_an_anchor_are_refused(config, tiny, tmp_path):
    """A store that says so much, and not "train longer" after all the steps."""
    row = Row(
        id="0" * 16,
        split="train",
        tokens=torch.arange(3, 10, dtype=torch.int32),
        reply=torch.tensor([0, 0, 1, 0, 2, 0, 3], dtype=torch.int16),
    )
    layers = (0, 2, 3)
    ((_, found),) = capture(tiny, [row], layers, torch.float32, 64)
    settings = {"dtype": "float32", "aux_layers": list(layers)}
    settings["target"] = {"fingerprint": tiny.fingerprint}
    with StoreWriter.claim(tmp_path / "short", settings, {"target": tiny.name}) as writer:
        writer.write_shard(0, "all", [(row, found.states)])
        writer.finish(1)
    with pytest.raises(SpectrainError, match="no training row has a reply of two tokens"):
        train.run(config(store=tmp_path / "short"))


def test_steps_and_epochs(config):
    assert config(steps=None, epochs=1.5).total_steps(20) == 8
    assert config(steps=None).total_steps(20) == 20
    with pytest.raises(ValueError, match="steps and epochs are both given"):
        config(epochs=1)


def test_a_tracker_gets_the_metrics_too(config):
    pytest.importorskip("tensorboard")
    train.run(config(tracker="tensorboard"))
    assert list(config().out.rglob("events.out.tfevents.*"))
    assert len(read_metrics(config().out)) == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_train_what_single_ones_do(config, tmp_path, family):
    """CASE 22, from the store to the curve."""
    options = {} if family == "draft" else {"draft_vocab_size": 40}
    common = {"family": family, "head": {"steps": 2, **options}, "batch_size": 8, "lr": 1e-3}
    runs = []
    for pack_length in (0, 90):
        asked = config(out=tmp_path / str(pack_length), pack_length=pack_length, **common)
        report = train.run(asked)
        runs.append((read_metrics(asked.out), report["acceptance"]))
    (expected, accepted), (rows, got) = runs
    assert [r["padding"] for r in rows] != [r["padding"] for r in expected]
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in expected], rel=1e-4)
    assert [r["seen"] for r in rows] == [r["seen"] for r in expected]
    assert got == pytest.approx(accepted, abs=0.05)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2", "--cpu"]


@pytest.mark.parametrize(
    ("launcher", "pack_length"), [(TORCHRUN, 0), (ACCELERATE, 90)], ids=["torchrun", "accelerate"]
)
def test_two_processes_train_what_one_does(config, tmp_path, launcher, pack_length):
    """Through the command line, over gloo; the single-letter replies have no later draft steps."""
    one = config(out=tmp_path / "one", micro_batch=1, batch_size=8)
    train.run(one)
    two = tmp_path / "two"
    settings = {"micro_batch": 1, "batch_size": 8, "save_every": 3, "log_every": 1, "lr": 1e-2}
    settings |= {"head.steps": 3, "head.draft_vocab_size": 40, "steps": 6}
    settings |= {"pack_length": pack_length}
    done = subprocess.run(
        [sys.executable, *launcher]
        + ["-m", "spectrain", "train-eagle", "--target", one.target, "--store", str(one.store)]
        + ["--out", str(two), "--json", str(tmp_path / "report.json")]
        + [part for key, value in settings.items() for part in ("--set", f"{key}={value}")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["processes"] == 2
    expected, rows = read_metrics(one.out), read_metrics(two)
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in expected], rel=1e-5)
    assert [r["seen"] for r in rows] == [r["seen"] for r in expected]


def test_the_loss_of_a_report_is_a_mean_over_all_that_counts():
    """Not over rows of metrics, of which the last may stand for fewer steps; terms that nothing
    counts are left out, and so are rows of which every step was skipped."""
    rows = [
        {"loss_terms": [1.0, 4.0], "counts": [30, 10]},
        {"loss_terms": [2.0, None], "counts": [10, 0]},
        {"loss_terms": [], "counts": []},
    ]
    assert train_report._loss(rows, [1.0, 0.5]) == pytest.approx((30 + 20) / 40 + 0.5 * 4.0)
    assert train_report._loss(rows[2:], [1.0, 0.5]) is None

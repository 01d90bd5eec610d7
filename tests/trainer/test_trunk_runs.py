"""Runs that train the target along: from a store to a tuned target and its head."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.data.store import FeatureStore
from spectrain.generator.speculate import Generator
from spectrain.heads.io import load_head
from spectrain.heads.registry import FAMILIES, family
from spectrain.recipes import prepare, train
from spectrain.trainer.metrics import read_metrics

WORDS = ["apple", "dog", "two", "word", "letter", "seven", "fox", "quick", "lazy", "question"]


@pytest.fixture(scope="module")
def store(tiny_path, tmp_path_factory):
    """24 conversations, a quarter of them held out."""
    folder = tmp_path_factory.mktemp("store")
    draw = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(24):
            words = " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))
            turns = [("user", f"{number} {words}"), ("assistant", words.upper())]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    prepare.run(
        prepare.PrepareConfig(
            target=str(tiny_path),
            prompts=folder / "prompts.jsonl",
            store=folder / "store",
            regenerate=False,
            heldout=0.25,
            dtype="float32",
        )
    )
    return folder / "store"


@pytest.fixture
def config(store, tiny_path, tmp_path):
    """config(mode, **changes) → a short joint training in a folder of its own."""

    def make(mode, **changes):
        trunk = {"mode": mode, "rank": 4, **changes.pop("trunk", {})}
        settings = {
            "target": str(tiny_path),
            "store": store,
            "out": tmp_path / "run",
            "family": "medusa",
            "head": {"steps": 3},
            "trunk": trunk,
            "steps": 6,
            "batch_size": 4,
            "micro_batch": 2,
            "save_every": 2,
            "log_every": 1,
            "lr": 1e-2,
        }
        return train.TrainConfig(**{**settings, **changes})

    yield make
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def slow_loss(target, store) -> tuple[int, float]:
    """Mean −log p of the held-out replies' tokens, row by row by the library's own forward."""
    opened, total, count = FeatureStore.open(store), 0.0, 0
    for row in opened.rows("heldout"):
        batch = opened.batch([row])
        with torch.no_grad():
            logits = target.model(input_ids=batch.tokens).logits[0].double().log_softmax(-1)
        for t in range(row.length - 1):
            if batch.reply[0, t + 1] > 0:
                total -= float(logits[t, batch.tokens[0, t + 1]])
                count += 1
    return count, total / count


@pytest.mark.parametrize("mode", ["lora", "full", "scratch"])
def test_a_run_leaves_a_tuned_target_and_a_head_for_it(config, store, tiny, mode):
    asked = config(mode, seed=5)
    report = train.run(asked)
    folder = asked.out / ("adapter" if mode == "lora" else "target")
    assert report["tuned_target"] == str(folder)
    assert train.tuned_target(asked.out) == folder
    assert len(report["acceptance"]) == 3
    first = read_metrics(asked.out)[0]
    assert len(first["loss_terms"]) == 4
    assert first["acceptance"][0] is None
    # Nothing but safetensors and JSON, each readable by whom the others are.
    names = {path.name for path in folder.iterdir()}
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    assert len({path.stat().st_mode & 0o777 for path in folder.iterdir()}) == 1

    tuned = Target.load(str(folder), pack_weights=False)
    head = load_head(asked.out)
    head.check_target(tuned, "head")
    assert head.config.target.name == str(folder)
    assert head.config.target.fingerprint == tuned.fingerprint != tiny.fingerprint
    with pytest.raises(SpectrainError, match="the head was trained for"):
        head.check_target(tiny, "head")

    quality = report["quality"]
    count, after = slow_loss(tuned, store)
    assert quality["heldout_tokens"] == count > 50
    assert quality["loss_after"] == pytest.approx(after, rel=1e-5)
    assert quality["perplexity_after"] == pytest.approx(math.exp(after), rel=1e-4)
    before = math.exp(slow_loss(tiny, store)[1])
    if mode == "scratch":
        # A new model: about as good as guessing among 392 tokens, and it learns.
        assert 200 < quality["perplexity_before"] != pytest.approx(before, rel=0.01)
        assert quality["perplexity_after"] < quality["perplexity_before"]
    else:
        assert quality["perplexity_before"] == pytest.approx(before, rel=1e-4)
    shown = train.render(report)
    assert f"{quality['perplexity_before']:.3f} before, {quality['perplexity_after']:.3f}" in shown
    assert f"prepare --target {folder}" in shown

    # Its report is given again; another way to train the trunk is refused.
    assert train.run(asked) == report
    with pytest.raises(SpectrainError, match=r"started with trunk\.lr = None"):
        train.run(config(mode, seed=5, trunk={"lr": 1e-3}))


@pytest.mark.parametrize("mode", ["lora", "full", "scratch"])
def test_interrupted_and_resumed_is_uninterrupted(config, tmp_path, monkeypatch, mode):
    """In either stage, bit for bit: head, trunk, curve and report."""
    first = {"heads_first": 0.0 if mode == "scratch" else 0.5}
    train.run(config(mode, trunk=first, out=tmp_path / "whole"))
    load = FeatureStore.packed
    for crash_at in (3, 9):  # two loads a step: in step 2 and in step 5
        loads = iter(range(1000))

        def crash(self, bins, with_aux=True, at=crash_at, loads=loads):
            if any(row.split == "train" for (row,) in bins) and next(loads) == at + 1:
                raise RuntimeError("crash")
            return load(self, bins, with_aux)

        with monkeypatch.context() as patch:
            patch.setattr(FeatureStore, "packed", crash)
            with pytest.raises(RuntimeError, match="crash"):
                train.run(config(mode, trunk=first, out=tmp_path / "cut"))
    train.run(config(mode, trunk=first, out=tmp_path / "cut"))
    part = "adapter/adapter_model" if mode == "lora" else "target/model"
    for name in ("head/model", part):
        whole, cut = (load_file(tmp_path / o / f"{name}.safetensors") for o in ("whole", "cut"))
        assert whole.keys() == cut.keys()
        assert all(torch.equal(value, cut[key]) for key, value in whole.items())
    whole, cut = (read_metrics(tmp_path / out) for out in ("whole", "cut"))
    assert [r["loss"] for r in whole] == [r["loss"] for r in cut]
    whole, cut = (json.loads((tmp_path / out / "report.json").read_text()) for out in
                  ("whole", "cut"))  # fmt: skip
    assert whole["report"]["quality"] == cut["report"]["quality"]


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_trunk_rests_while_the_heads_learn_alone(config, mode, optimizer):
    asked = config(mode, trunk={"heads_first": 0.5}, save_every=1, keep=9, optimizer=optimizer)
    train.run(asked)
    states = [
        load_file(asked.out / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
        for step in range(1, 7)
    ]
    names = [name for name in states[0] if name.startswith("trunk.")]
    assert len(names) > 20
    for step in (1, 2):
        assert all(torch.equal(states[0][name], states[step][name]) for name in names)
    assert all(not torch.equal(states[2][n], states[5][n]) for n in names)
    heads = [n for n in states[0] if n.startswith("head.heads.")]
    for step in range(5):
        assert all(not torch.equal(states[step][n], states[step + 1][n]) for n in heads)
    kinds = {name.partition("/")[0] for name in load_file(
        asked.out / "checkpoints" / "step-00000003" / "optimizer.safetensors")}  # fmt: skip
    assert kinds == {"adamw", "muon"} & {"adamw", optimizer}


def test_a_running_mean_is_that_of_the_head_and_its_target(config):
    """Both are written as the mean; the checkpoint keeps it beside the weights of the last step."""
    asked = config("full", ema=0.5, lr_factors={"trunk.*": 0.5})
    train.run(asked)
    folder = asked.out / "checkpoints" / "step-00000006"
    means, last = (load_file(folder / f"{n}.safetensors") for n in ("ema", "model"))
    written = {
        f"{part}.{name}": value
        for part, file in (("head", "head/model"), ("trunk", "target/model"))
        for name, value in load_file(asked.out / f"{file}.safetensors").items()
    }
    assert {name.partition(".")[0] for name in means} == {"head", "trunk"}
    for name, mean in means.items():
        assert torch.equal(written[name], mean), name
        assert not torch.equal(last[name], mean), name


def test_steps_that_leave_the_trunk_none_are_refused(config):
    with pytest.raises(SpectrainError, match=r"heads_first 0\.9 of 6 steps none is left"):
        train.run(config("lora", trunk={"heads_first": 0.9}))


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_greedy_speculation_is_plain_greedy_decoding_of_the_tuned_target(config, tiny_path, mode):
    """Against the library's own model and generate, without anything of ours in between."""
    asked = config(mode, trunk={"lr": 5e-3})
    train.run(asked)
    folder = train.tuned_target(asked.out)
    if mode == "lora":
        base = AutoModelForCausalLM.from_pretrained(tiny_path)
        stock = PeftModel.from_pretrained(base, folder)
    else:
        stock = AutoModelForCausalLM.from_pretrained(folder)
    target = Target.load(str(folder))
    head = load_head(asked.out).bind(target.readout)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 380, (n,), generator=generator) for n in (4, 9, 6)]
    completed = Generator(target, head).generate(prompts, 24)
    original = AutoModelForCausalLM.from_pretrained(tiny_path)
    differs = 0
    for prompt, done in zip(prompts, completed, strict=True):
        options = {"max_new_tokens": 24, "do_sample": False}
        expected = stock.generate(input_ids=prompt[None], **options)[0, len(prompt) :].tolist()
        assert done.tokens == expected
        plain = original.generate(input_ids=prompt[None], **options)[0, len(prompt) :].tolist()
        differs += plain != expected
    assert differs  # the tuned target is not the original one
    assert any(sum(done.runs.values()) for done in completed)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", ["lora", "scratch"])
def test_every_family_trains_with_its_target(config, name, mode):
    """Also heads that read other layers' outputs or all last states, which the store lacks."""
    options = {"steps": 2, "draft_vocab_size": 60, "aux_layers": [0, 1, 2]}
    known = family(name).Options.model_fields
    head = {key: value for key, value in options.items() if key in known}
    asked = config(mode, family=name, head=head, steps=4)
    report = train.run(asked)
    tuned = Target.load(report["tuned_target"], pack_weights=False)
    found = load_head(asked.out)
    found.check_target(tuned, "head")
    assert report["quality"]["perplexity_after"] > 0


def test_bf16_products_leave_float32_weights(config):
    asked = config("full", mixed_precision="bf16")
    report = train.run(asked)
    saved = load_file(asked.out / "target" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert report["loss"] > 0


def test_medusa_2_starts_from_medusa_1(config, tmp_path, tiny):
    train.run(config("frozen", out=tmp_path / "one"))
    one = load_head(tmp_path / "one")
    one.check_target(tiny, "head")
    asked = config("lora", init=tmp_path / "one", head={}, trunk={"heads_first": 0.0})
    train.run(asked)
    two = load_head(asked.out)
    assert torch.equal(one.d2t, two.d2t)
    assert two.config.target.name == str(asked.out / "adapter")
    assert not torch.equal(one.heads[0][0].linear.weight, two.heads[0][0].linear.weight)


def test_two_processes_train_what_one_does_in_both_stages(config, tmp_path):
    """`train-medusa --stage 2`, over gloo; the trunk joins after half of the steps."""
    changes = {"micro_batch": 1, "batch_size": 8, "trunk": {"heads_first": 0.5}}
    one = config("lora", out=tmp_path / "one", **changes)
    train.run(one)
    settings = {"micro_batch": 1, "batch_size": 8, "save_every": 2, "log_every": 1, "lr": 1e-2}
    settings |= {"head.steps": 3, "steps": 6, "trunk.rank": 4, "trunk.heads_first": 0.5}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + ["-m", "spectrain", "train-medusa", "--stage", "2", "--target", one.target]
        + ["--store", str(one.store), "--out", str(tmp_path / "two")]
        + [part for key, value in settings.items() for part in ("--set", f"{key}={value}")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    expected, rows = read_metrics(one.out), read_metrics(tmp_path / "two")
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in expected], rel=1e-4)
    reports = [json.loads((tmp_path / o / "report.json").read_text()) for o in ("one", "two")]
    one, two = (report["report"]["quality"] for report in reports)
    assert two == pytest.approx(one, rel=1e-3)

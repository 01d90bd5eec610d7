"""A target trained along with its head: losses by slow code, runs from a store to the result."""

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
from head_kinds import create
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import make_batch, random_rows
from transformers import AutoModelForCausalLM

from spectrain.core.batch import Batch, predicting
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.core.target import Target
from spectrain.data.store import FeatureStore
from spectrain.generator.speculate import Generator
from spectrain.heads.io import load_head
from spectrain.heads.registry import FAMILIES, family
from spectrain.recipes import prepare, train
from spectrain.trainer import optim
from spectrain.trainer.changes import digests, require_changes
from spectrain.trainer.metrics import read_metrics
from spectrain.trainer.settings import TrainerSettings, TrunkSettings
from spectrain.trainer.trunk import JointHead, from_scratch

WORDS = ["apple", "dog", "two", "word", "letter", "seven", "fox", "quick", "lazy", "question"]


# ── the objective ────────────────────────────────────────────────────────────


def joint(path, *, seed=0, kind="medusa", options=None, **trunk):
    """A joint head of the target in `path`, everything trainable moved off its start."""
    target = Target.load(str(path), pack_weights=False)
    if trunk.get("mode") == "scratch":
        target = from_scratch(target)
    head = create(target, kind, **(options or {"steps": 2}))
    made = JointHead(head, target, TrunkSettings(**trunk))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in made.named_parameters():
            if name.startswith("trunk.") and value.requires_grad:
                value += 0.05 * torch.randn(value.shape, generator=generator)
    return made


def stored(tiny, seed=8) -> Batch:
    """Rows with what the original target says of them."""
    tokens, reply = random_rows(torch.Generator().manual_seed(seed))
    return make_batch(tiny, create(tiny, "medusa", steps=1), tokens, reply)


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("loss", ["distil", "text"])
def test_objective_and_gradients_equal_the_slow_reference(tiny, tiny_path, mode, loss):
    """The library's own forward and loss, row by row; and the parts add up as the paper says."""
    made = joint(tiny_path, mode=mode, loss=loss)
    batch = stored(tiny)
    fast = made(batch)
    weights = torch.tensor(made.weights(0.9))
    assert weights.tolist() == pytest.approx([1, 0.2, 0.2 * 0.8])
    (fast.loss * weights).sum().backward()
    named = {n: p for n, p in made.named_parameters() if p.requires_grad}
    gradients = {name: value.grad.clone() for name, value in named.items()}
    made.zero_grad()

    made.trunk.set_attn_implementation("eager")
    out = made.trunk(input_ids=batch.tokens, output_hidden_states=True)
    original = AutoModelForCausalLM.from_pretrained(tiny_path)(batch.tokens).logits.log_softmax(-1)
    trunk, heads = torch.zeros(()), [torch.zeros(()) for _ in range(2)]
    counts, hits = [0, 0, 0], [0, 0]
    for b in range(len(batch.tokens)):
        tokens, reply = batch.tokens[b].tolist(), batch.reply[b].tolist()
        for t in range(len(tokens) - 1):
            own = out.logits[b, t].log_softmax(-1)
            if reply[t + 1] > 0:
                counts[0] += 1
                if loss == "text":
                    trunk = trunk - own[tokens[t + 1]]
                else:
                    p = original[b, t].exp()
                    trunk = trunk + (p * (original[b, t] - own)).sum()
            for k in range(2):
                inside = reply[t + 1 : t + 3 + k]
                if len(inside) == 2 + k and inside[0] and len(set(inside)) == 1:
                    block, output = made.head.heads[k]
                    logits = output(block(out.hidden_states[-1][b, t]))
                    ids = made.head.draft_ids.tolist()
                    heads[k] = heads[k] - logits.log_softmax(-1)[ids.index(tokens[t + 2 + k])]
                    counts[1 + k] += 1
                    live = int(out.logits[b, t + 1 + k].argmax())
                    hits[k] += ids[int(logits.argmax())] == live
    slow = torch.stack([trunk, *heads])
    (slow * weights).sum().backward()
    assert fast.count.tolist() == counts == made.counts(batch).tolist()
    assert fast.hits.tolist() == [0, *hits]
    torch.testing.assert_close(fast.loss, slow, atol=1e-3, rtol=1e-4)
    assert fast.loss[0] > 0.1
    assert len(gradients) == len(named) > 20
    for name, value in named.items():
        torch.testing.assert_close(
            gradients[name], value.grad, atol=2e-4, rtol=2e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert name.endswith("lora_A.default.weight") or gradients[name].any(), name


def test_before_training_the_trunk_is_the_original_target(tiny, tiny_path):
    """No distance to it, and the heads' terms are those of the heads alone."""
    target = Target.load(str(tiny_path), pack_weights=False)
    head = create(target, "medusa", steps=2)
    batch = stored(tiny)
    alone = head.objective(batch)
    found = JointHead(head, target, TrunkSettings(mode="lora"))(batch)
    assert found.loss[0].abs() < 1e-3
    torch.testing.assert_close(found.loss[1:], alone.loss)
    assert torch.equal(found.hits[1:], alone.hits)
    assert torch.equal(found.seen[1:], alone.seen)


def test_many_small_parts_of_the_logits_sum_to_one_large(tiny, tiny_path, monkeypatch):
    batch = stored(tiny)
    made = joint(tiny_path, mode="full")
    whole = made(batch)
    monkeypatch.setattr("spectrain.trainer.trunk._LOGITS", 3 * 392)
    parts = made(batch)
    torch.testing.assert_close(parts.loss, whole.loss)
    assert torch.equal(parts.hits, whole.hits)


@pytest.mark.parametrize("loss", ["distil", "text"])
def test_nothing_to_learn_is_a_zero_with_a_graph(tiny, tiny_path, loss):
    batch = stored(tiny)
    batch.reply.zero_()
    made = joint(tiny_path, mode="full", loss=loss)
    found = made(batch)
    assert not found.loss.any()
    assert not found.count.any()
    found.loss.sum().backward()
    assert not any(p.grad.any() for p in made.parameters() if p.grad is not None)


def test_bf16_autocast(tiny, tiny_path):
    batch = stored(tiny)
    made = joint(tiny_path, mode="lora")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = made(batch)
    low.loss.sum().backward()
    torch.testing.assert_close(low.loss, made(batch).loss, atol=1.0, rtol=0.1)
    assert low.loss.dtype == torch.float32
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


def test_the_heads_weight_rises_when_the_trunk_begins_to_learn(tiny_path):
    def of(progress, **settings):
        made = joint(tiny_path, mode="lora", **settings)
        one, first, second = made.weights(progress)
        assert one == 1
        assert second == pytest.approx(0.8 * first)
        return first

    assert of(0.0) == of(0.99) == pytest.approx(0.2)
    assert of(0.5, heads_weight=3) == pytest.approx(3)
    ramp = {"heads_first": 0.2, "ramp": 0.4}
    values = [of(p, **ramp) for p in (0.0, 0.19, 0.2, 0.3, 0.4, 0.6, 0.9)]
    assert values == pytest.approx([0.2, 0.2, 0, 0.05, 0.1, 0.2, 0.2])
    # Families whose own terms are weighed already come in as they are.
    eagle = {"kind": "eagle3", "options": {"steps": 2, "draft_vocab_size": 60}}
    assert of(0.5, **eagle) == pytest.approx(1)


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="scratch has none"):
        TrunkSettings(mode="scratch", loss="distil")
    assert [TrunkSettings(mode=m).share(1.0) for m in ("lora", "full", "scratch")] == [
        0.25,
        0.25,
        1.0,
    ]
    assert TrunkSettings(mode="lora", lr=1e-4).share(1e-3) == pytest.approx(0.1)
    assert [TrunkSettings(mode=m).first for m in ("lora", "scratch")] == [0.25, 0.0]


# ── optimisers and what changes ──────────────────────────────────────────────


@pytest.mark.parametrize("name", ["tiny", "whole"])
def test_tables_of_the_trunk_are_not_muon_s_and_its_rates_are_its_own(request, name):
    path = request.getfixturevalue(name).name
    made = joint(path, mode="full", lr=1e-4)
    settings = TrainerSettings(optimizer="muon", lr=1e-3, trunk=made.settings)
    parts = optim.build(made, settings, {made.config.vocab_size, made.config.draft_vocab_size})
    assert {kind: (part.lr, part.rests) for kind, part in parts.items()} == {
        "trunk-muon": (pytest.approx(0.002), 0.25),
        "trunk-adamw": (pytest.approx(1e-4), 0.25),
        "muon": (0.02, 0.0),
        "adamw": (1e-3, 0.0),
    }
    where = {name: kind for kind, part in parts.items() for name in part.names}
    assert set(where) == {name for name, _ in made.named_parameters()}
    assert where["trunk.model.embed_tokens.weight"] == "trunk-adamw"
    assert where.get("trunk.lm_head.weight", "trunk-adamw") == "trunk-adamw"
    assert where["trunk.model.layers.0.mlp.up_proj.weight"] == "trunk-muon"
    assert where["trunk.model.norm.weight"] == "trunk-adamw"
    assert where["head.heads.0.0.linear.weight"] == "muon"
    assert where["head.heads.0.1.weight"] == "adamw"


def test_a_frozen_tensor_of_the_trunk_that_moves_is_found(tiny_path):
    made = joint(tiny_path, mode="lora")
    before = digests(made.everything())
    assert set(digests(made)) < set(before)
    with torch.no_grad():
        for value in made.parameters():
            if value.requires_grad:
                value += 0.1
    require_changes(made.everything(), before, "run")
    with torch.no_grad():
        made.trunk.get_input_embeddings().weight[0, 0] += 1
    with pytest.raises(RunFailed, match=r"frozen but changed: trunk\.model\.embed_tokens\.weight"):
        require_changes(made.everything(), before, "run")


def test_the_trunk_has_no_dropout_while_it_is_trained(tiny_path):
    made = joint(tiny_path, mode="full").train()
    assert made.head.training
    assert not any(module.training for module in made.trunk.modules())


@pytest.mark.parametrize("name", ["tiny", "whole"])
def test_a_saved_trunk_loads_as_it_was(request, name, tmp_path):
    """Tied embeddings (tiny) and untied ones; generation settings and tokenizer go along."""
    original = request.getfixturevalue(name)
    made = joint(original.name, mode="full")
    folder = made.save_trunk(tmp_path, original.name)
    again = Target.load(str(folder), pack_weights=False)
    tokens = torch.randint(3, 380, (1, 9))
    logits = again.logits(again.forward(tokens).last)
    torch.testing.assert_close(logits, made.trunk(input_ids=tokens).logits, atol=1e-5, rtol=1e-5)
    assert made.config.target.fingerprint == again.fingerprint != original.fingerprint
    assert again.stop_ids == original.stop_ids
    assert again.tokenizer.chat_template == original.tokenizer.chat_template
    tied = again.model.get_input_embeddings().weight is again.readout.weight
    assert tied == (name == "tiny")


# ── runs ─────────────────────────────────────────────────────────────────────


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
    load = FeatureStore.batch
    for crash_at in (3, 9):  # two loads a step: in step 2 and in step 5
        loads = iter(range(1000))

        def crash(self, rows, with_aux=True, at=crash_at, loads=loads):
            if any(row.split == "train" for row in rows) and next(loads) == at + 1:
                raise RuntimeError("crash")
            return load(self, rows, with_aux)

        with monkeypatch.context() as patch:
            patch.setattr(FeatureStore, "batch", crash)
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


# ── the command ──────────────────────────────────────────────────────────────


@pytest.fixture
def asked(monkeypatch):
    """asked(*arguments) → the settings that `train-medusa` would train with."""
    from typer.testing import CliRunner

    from spectrain import cli

    def ask(*arguments):
        seen = []
        monkeypatch.setattr(train, "run", lambda config: seen.append(config) or {"done": True})
        monkeypatch.setattr(train, "render", lambda report: "done")
        result = CliRunner().invoke(cli.app, ["train-medusa", *arguments])
        return seen[0] if result.exit_code == 0 else result.output

    return ask


def test_the_stage_chooses_how_the_trunk_is_trained(asked, tmp_path):
    assert asked().trunk.mode == "frozen"
    assert asked("--stage", "2").trunk.mode == "lora"
    assert asked("--stage", "2").family == "medusa"
    assert asked("--stage", "2", "--set", "trunk.rank=8").trunk == TrunkSettings(
        mode="lora", rank=8
    )
    # What the user has said about the trunk wins.
    full = "--set", "trunk.mode=full"
    assert asked("--stage", "2", *full).trunk.mode == "full"
    assert asked(*full).trunk.mode == "full"
    file = tmp_path / "full.yaml"
    file.write_text("train: {family: medusa, trunk: {mode: full}}")
    assert asked("--stage", "2", "--config", str(file)).trunk.mode == "full"
    assert "--stage 1 does not go with trunk.mode = 'full'" in asked("--stage", "1", *full)
    frozen = asked("--stage", "2", "--set", "trunk.mode=frozen")
    assert "--stage 2 does not go with trunk.mode = 'frozen'" in frozen


def test_predicting_rows_are_the_trunk_s(tiny, tiny_path):
    """By hand: x = p r r p r: the rows before the replies' tokens, 0 1 3."""
    reply = torch.tensor([[0, 1, 1, 0, 2]])
    assert predicting(reply)[0].nonzero().flatten().tolist() == [0, 1, 3]
    batch = make_batch(
        tiny, create(tiny, "medusa", steps=1), torch.tensor([[5, 6, 7, 8, 9]]), reply
    )
    made = joint(tiny_path, mode="full", loss="text")
    assert made.counts(batch).tolist() == [3, 1, 0]
    logits = made.trunk(input_ids=batch.tokens).logits[0].log_softmax(-1)
    expected = -(logits[0, 6] + logits[1, 7] + logits[3, 9])
    torch.testing.assert_close(made(batch).loss[0], expected)
    changed = Batch(batch.tokens, batch.reply, None, batch.last + 1, batch.argmax)
    assert torch.equal(made(changed).loss, made(batch).loss)  # the store's features play no part


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_what_is_summed_is_what_is_counted_when_the_vocabulary_is_reduced(tiny, tiny_path, kind):
    """A trunk that has moved chooses other tokens than the store says; the rows in the loss are
    those of the denominators all the same."""
    options = {"steps": 2, "draft_vocab_size": 60}
    made = joint(tiny_path, kind=kind, mode="full", options=options)
    batch = stored(tiny)
    live = made(batch)
    assert live.count.tolist() == made.counts(batch).tolist()
    # Rows that the store's argmax leaves out have no influence on the loss.
    bare = made.head.guessable(batch.argmax)
    assert 0 < (bare & predicting(batch.reply)).sum() < predicting(batch.reply).sum()

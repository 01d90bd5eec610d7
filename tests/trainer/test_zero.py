"""DeepSpeed's ZeRO over two processes learns and remembers what one process without it does."""

from __future__ import annotations

import shutil
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from ranks import run_on_ranks
from safetensors.torch import load_file
from same_runs import require_same

from spectrain.core.batch import Batch
from spectrain.core.errors import SpectrainError
from spectrain.trainer import optim, zero
from spectrain.trainer.loop import train
from spectrain.trainer.metrics import read_metrics
from spectrain.trainer.settings import TrainerSettings
from spectrain.trainer.update import Plain

pytestmark = pytest.mark.deepspeed
IDENTITY = {"test": "zero"}
# Two micro-batches a process and step; gradients are cut to a seventh of their norm.
OPTIONS = {"steps": 4, "batch_size": 4, "micro_batch": 1, "log_every": 1, "save_every": 2}
OPTIONS |= {"lr": 1e-3, "clip": 0.5, "ema": 0.9, "lr_factors": {"lm_head.*": 0.1, "*norm*": 3}}
LAST = "checkpoints/step-00000004"


@pytest.fixture
def run(monkeypatch, tmp_path, make_head):
    """run(data, out, stage, keys={}, make=make_head, **settings) → what each process of two sees
    after training in the folder `out` of this test; stage 0: without DeepSpeed, None: and alone."""

    def run(data, out, stage, keys=None, make=make_head, seen=lambda head, state: None, **changes):
        settings = TrainerSettings(**{**OPTIONS, **changes})
        asked = {"zero_optimization.stage": stage, **(keys or {})} if stage else None

        def work():
            accelerator = Accelerator(cpu=True, mixed_precision=settings.mixed_precision)
            way, head = zero.way(asked, settings), make()
            own = data(accelerator.process_index) if callable(data) else data
            state = train(head, own, settings, accelerator, tmp_path / out, IDENTITY, way=way)
            seen(head, state)
            accelerator.end_training()

        run_on_ranks(work, monkeypatch, 1 if stage is None else 2)
        return tmp_path / out

    return run


def cut_off(source, target):
    """The first half of a run."""
    shutil.copytree(source, target)
    shutil.rmtree(target / LAST)
    return target.name


def files(run):
    return {p.relative_to(run): p.read_bytes() for p in run.rglob("*.safetensors")}


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_learns_what_one_process_does_and_goes_on_from_anywhere(
    run, make_data, tmp_path, stage
):
    """Losses, norms, weights, means and moments; a run that was cut off goes on with DeepSpeed bit
    for bit as if it had not been, and to rounding with it after one process and without it."""
    one = run(make_data(), "one", None)
    assert read_metrics(one)[0]["grad_norm"] > 2 * OPTIONS["clip"]
    two = run(make_data(), "two", stage)
    require_same(one, two)
    again = run(make_data(), cut_off(two, tmp_path / "again"), stage)
    assert files(again) == files(two)
    require_same(one, run(make_data(), cut_off(one, tmp_path / "with"), stage))
    require_same(one, run(make_data(), cut_off(two, tmp_path / "without"), None))


@pytest.mark.parametrize(
    "keys",
    [
        {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000},
        {"overlap_comm": True, "reduce_bucket_size": 40_000},
        {"contiguous_gradients": False, "reduce_scatter": False},
        {"parameter_alignment": True, "use_multi_rank_bucket_allreduce": False},
    ],
    ids=lambda keys: next(iter(keys)),
)
@pytest.mark.parametrize("stage", [1, 2])
def test_how_deepspeed_does_its_work_changes_nothing(run, make_data, stage, keys):
    one = run(make_data(), "one", None)
    keys = {f"zero_optimization.{key}": value for key, value in keys.items()}
    require_same(one, run(make_data(), "two", stage, keys))


def unsupervised(batch):
    return Batch(batch.tokens, torch.zeros_like(batch.reply), batch.aux, batch.last, batch.argmax)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_process_without_supervised_rows_adds_nothing_to_other_tensors(
    run, make_data, corpus, stage, micro_batch
):
    """Its graph is another."""
    rows = sorted(corpus, key=lambda row: row.tokens.shape[1])[:4]
    rows = [rows[0], unsupervised(rows[1]), rows[2], unsupervised(rows[3])]
    options = {"micro_batch": micro_batch}
    one = run(make_data(rows=rows), "one", None, **options)
    require_same(one, run(make_data(rows=rows), "two", stage, **options))


class Crossing(torch.nn.Module):
    """Two matrices of one shape; which one has its gradient first depends on the process."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (torch.nn.Linear(6, 6, bias=False) for _ in range(2))

    def forward(self, x, rank):
        parts = [self.one, self.two]
        return sum(i * part(x).square().sum() for i, part in enumerate(parts[:: 1 - 2 * rank], 1))


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_meet_in_one_order_whatever_the_graphs(monkeypatch, stage):
    def work():
        accelerator, settings = Accelerator(cpu=True), TrainerSettings(steps=2)
        rank, nets = accelerator.process_index, []
        keys = {"zero_optimization.stage": stage, "zero_optimization.overlap_comm": True}
        for way in (Plain, partial(zero.Zero, keys)):
            torch.manual_seed(0)
            net = Crossing()
            update = way(net, optim.build(net, settings, ()), settings, accelerator)
            with update.micro_batch(last=True):
                accelerator.backward(update.model(torch.eye(6) * (1 + rank), rank))
            update.join()
            nets.append((net, update.clip()))
            update.step()
        with update.micro_batch(last=True):
            accelerator.backward(update.model(torch.eye(6), rank))
        assert update.reached() == {"one.weight", "two.weight"}
        update.clear()  # of a step that is dropped nothing stays in memory
        joined = [
            *update._zero.averaged_gradients.values(),
            *update._zero.all_grad_tensors.values(),
        ]
        assert all(gradients is None for gradients in joined)
        (plain, norm), (cut, same) = nets
        torch.testing.assert_close(same, norm)
        for name, value in plain.named_parameters():
            torch.testing.assert_close(cut.get_parameter(name), value)
        accelerator.end_training()

    run_on_ranks(work, monkeypatch)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("what", ["features", "gradient", "loss"])
def test_a_bad_step_of_one_process_is_skipped_by_both(run, make_data, make_head, stage, what):
    """As without DeepSpeed: nothing of it is left, in weights, moments, mean or gradients. A loss
    may be infinite beside gradients that are not."""

    def poisoned(rank):
        loads = iter(range(100))

        def poison(batch):
            if next(loads) == 2 and rank == 1:
                batch.aux[:, 3] = float("nan")

        return make_data(before_load=poison if what == "features" else lambda batch: None)

    def make():
        head, calls = make_head(), iter(range(100))
        rank = torch.distributed.get_rank()
        if what == "gradient":
            nan = float("nan")
            head.fc.weight.register_hook(
                lambda grad: grad * nan if next(calls) == 2 and rank == 1 else grad
            )
        if what == "loss":
            forward = head.forward

            def spoilt(*given):
                told = forward(*given)
                if next(calls) == 2 and rank == 1:
                    told.loss = told.loss * float("inf")
                return told

            head.forward = spoilt
        return head

    plain, cut = (run(poisoned, f"stage {s}", s, make=make, save_every=1) for s in (0, stage))
    require_same(plain, cut)
    assert [row["skipped"] for row in read_metrics(cut)] == [0, 1, 0, 0]


def test_a_bad_step_leaves_everything_as_it_was(run, make_data, make_head):
    def make():
        head, calls = make_head(), iter(range(100))
        head.fc.weight.register_hook(lambda g: g * float("nan") if next(calls) == 4 else g)
        return head

    cut = run(make_data(), "two", 2, make=make, save_every=1, keep=9)
    one, two, three, four = (
        {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}
        for folder in sorted((cut / "checkpoints").iterdir())
    )
    assert two == three
    assert all(one[name] != two[name] and three[name] != four[name] for name in one)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_tensor_that_no_gradient_reaches_is_found(run, make_data, make_head, stage):
    def make():
        head = make_head()
        head.unused = torch.nn.Linear(8, 8, bias=False)
        return head

    def seen(head, state):
        assert state.unreached == ["unused.weight"]

    run(make_data(), "two", stage, make=make, seen=seen)


@pytest.mark.parametrize("stage", [1, 2])
def test_products_in_bfloat16_and_weights_in_float32(run, make_data, stage):
    """The same as DDP, whose gradients cross in float32, too."""
    options = {"mixed_precision": "bf16"}
    plain, cut = (run(make_data(), f"stage {s}", s, **options) for s in (0, stage))
    require_same(plain, cut)
    exact = run(make_data(), "float32", stage)
    losses = [[row["loss"] for row in read_metrics(out)] for out in (cut, exact)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)
    assert {
        v.dtype
        for v in load_file(cut / LAST / "model.safetensors").values()
        if v.is_floating_point()
    } == {torch.float32}


def test_tensors_of_a_group_have_made_equally_many_steps(monkeypatch, make_head):
    """DeepSpeed keeps one number for all of them."""

    def work():
        accelerator, head = Accelerator(cpu=True), make_head()
        settings = TrainerSettings(steps=2)
        parts = optim.build(head, settings, optim.head_tables(head))
        stage = {"zero_optimization.stage": 1}
        update = zero.Zero(stage, head, parts, settings, accelerator)
        assert update.memory(True) == {}  # before the first step, as without DeepSpeed
        memory = {}
        for name in parts["adamw"].names:
            value = head.get_parameter(name)
            memory |= {f"adamw/{name}/{key}": value for key in ("exp_avg", "exp_avg_sq")}
            memory[f"adamw/{name}/step"] = torch.tensor(3.0)
        update.restore(memory)
        memory[f"adamw/{parts['adamw'].names[-1]}/step"] = torch.tensor(2.0)
        with pytest.raises(SpectrainError, match="2 steps, others of its group 3; "):
            update.restore(memory)
        accelerator.end_training()

    run_on_ranks(work, monkeypatch)


def test_the_package_is_asked_for_by_name_and_version(monkeypatch):
    monkeypatch.setattr(zero, "version", lambda name: "0.18.0")
    with pytest.raises(
        SpectrainError, match=r"0\.18\.0 is not supported; pip install 'deepspeed>="
    ):
        zero._require_package()
    asked = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert asked["project"]["optional-dependencies"]["deepspeed"] == [f"deepspeed{zero.VERSIONS}"]

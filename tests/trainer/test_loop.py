"""The loop: the same step however it is cut, and nothing that poisons the weights."""

from __future__ import annotations

import pytest
import torch

from spectrain.core.batch import Batch
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.trainer import checkpoint
from spectrain.trainer.changes import digests, require_changes


def losses(rows):
    return [row["loss"] for row in rows]


def largest_gap(one, two):
    pairs = zip(one.state_dict().items(), two.state_dict().items(), strict=True)
    return max((a.float() - b.float()).abs().max().item() for (_, a), (_, b) in pairs)


def test_a_batch_is_the_same_however_it_is_cut(make_head, make_data, fit, tmp_path):
    """CASE 22: eight conversations at once, two, one at a time, in rows of several of them."""
    results = {}
    ways = {"8": (8, 0), "2": (2, 0), "1": (1, 0), "packed": (2, 70), "one row": (8, 999)}
    for name, (micro_batch, pack_length) in ways.items():
        head = make_head()
        _, rows = fit(
            head,
            make_data(),
            tmp_path / name,
            steps=4,
            batch_size=8,
            micro_batch=micro_batch,
            pack_length=pack_length,
            lr=1e-2,
        )
        results[name] = head, rows
    assert results["one row"][1][0]["padding"] == 0 < results["8"][1][0]["padding"]
    whole, rows = results.pop("8")
    for other, other_rows in results.values():
        assert losses(other_rows) == pytest.approx(losses(rows), rel=1e-5)
        assert [r["hits"] for r in other_rows] == [r["hits"] for r in rows]
        assert [r["seen"] for r in other_rows] == [r["seen"] for r in rows]
        assert [r["grad_norm"] for r in other_rows] == pytest.approx(
            [r["grad_norm"] for r in rows], rel=1e-4
        )
        # Adam divides by the gradient's size: rounding shows where that is near zero.
        assert largest_gap(whole, other) < 1e-3


def test_every_step_has_a_seed_of_its_own_and_its_share_of_the_run(
    make_head, make_data, fit, tmp_path, monkeypatch
):
    """What noise and λ(progress) hang on; and the same again when the run is repeated."""
    told = []
    for name in ("one", "two"):
        head, seen = make_head(), []
        weights = head.weights
        monkeypatch.setattr(
            head,
            "weights",
            lambda progress, seen=seen, weights=weights: (
                seen.append((progress, torch.initial_seed())) or weights(progress)
            ),
        )
        fit(head, make_data(), tmp_path / name, steps=4, batch_size=4)
        told.append(seen)
    assert [progress for progress, _ in told[0]] == [0, 0.25, 0.5, 0.75]
    assert len({seed for _, seed in told[0]}) == 4
    assert told[0] == told[1]


def test_padding_changes_nothing(make_head, make_data, fit, tmp_path):  # case 22
    _, tight = fit(make_head(), make_data(), tmp_path / "tight")
    _, wide = fit(make_head(), make_data(padding=9), tmp_path / "wide")
    assert losses(wide) == pytest.approx(losses(tight), rel=1e-5)
    assert [r["hits"] for r in wide] == [r["hits"] for r in tight]


def unsupervised(batch: Batch) -> Batch:
    return Batch(batch.tokens, torch.zeros_like(batch.reply), batch.aux, batch.last, batch.argmax)


def test_rows_without_supervision_change_nothing(make_head, make_data, corpus, fit, tmp_path):
    """Case 21. A micro-batch without supervised rows adds 0, and the step equals one without it."""
    with_, without = make_head(), make_head()
    mixed = [corpus[0], unsupervised(corpus[1])]
    _, mixed_rows = fit(
        with_, make_data(rows=mixed), tmp_path / "a", batch_size=2, micro_batch=1, steps=3
    )
    _, rows = fit(without, make_data(rows=corpus[:1]), tmp_path / "b", batch_size=1, steps=3)
    assert losses(mixed_rows) == pytest.approx(losses(rows), rel=1e-6)
    assert largest_gap(with_, without) < 1e-5


def test_a_batch_without_any_supervision_leaves_the_weights_whole(
    make_head, make_data, corpus, fit, tmp_path
):
    head = make_head()
    empty = [unsupervised(row) for row in corpus[:4]]
    state, rows = fit(head, make_data(rows=empty), tmp_path, weight_decay=0.0)
    assert state.skipped == 0
    assert losses(rows) == [None] * 6
    assert all(torch.isfinite(value).all() for value in head.parameters())
    assert largest_gap(head, make_head()) == 0


def poison(steps):
    """Makes the features of the given loads not finite."""
    count = iter(range(1000))

    def before_load(batch):
        if next(count) in steps:
            batch.aux[0, 3] = float("nan")

    return before_load


def test_a_step_that_is_not_finite_is_skipped_and_counted(make_head, make_data, fit, tmp_path):
    head = make_head()
    data = make_data(before_load=poison({2}))
    state, rows = fit(head, data, tmp_path, steps=5)
    assert (state.skipped, state.step) == (1, 5)
    assert [row["skipped"] for row in rows] == [0, 0, 1, 0, 0]
    assert rows[2]["loss"] is None
    assert all(torch.isfinite(value).all() for value in head.parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_moves_nothing(
    make_head, make_data, fit, tmp_path, optimizer
):
    """Case 29. Of one tensor, with a loss that is finite: weights, moments and mean stay as they
    were before the step, of all tensors."""
    head, calls = make_head(), iter(range(100))
    head.fc.weight.register_hook(lambda grad: grad * float("nan") if next(calls) == 3 else grad)
    options = {"steps": 6, "save_every": 1, "keep": 9, "ema": 0.9, "optimizer": optimizer}
    state, rows = fit(head, make_data(), tmp_path, **options)
    assert (state.skipped, [row["skipped"] for row in rows]) == (1, [0, 0, 0, 1, 0, 0])
    saved = [
        {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
        for folder in sorted((tmp_path / "checkpoints").iterdir())
    ]
    assert saved[2] == saved[3]
    for before, after in ((1, 2), (3, 4)):
        assert all(saved[before][name] != saved[after][name] for name in saved[0])


def test_too_many_bad_steps_end_the_run_and_the_checkpoint_stays(
    make_head, make_data, fit, tmp_path
):
    data = make_data(before_load=poison(range(3, 99)))
    with pytest.raises(RunFailed, match=r"3 steps in a row, up to step 6.*step-00000004"):
        fit(make_head(), data, tmp_path, steps=20, max_bad_steps=3, save_every=2, keep=1)
    # Step 4 was saved with a bad step behind it, but its weights are those of step 3.
    _, state = checkpoint.newest(tmp_path)
    assert state["skipped"] == 1
    again = make_head()
    fit(again, make_data(), tmp_path, steps=20, max_bad_steps=3)
    assert all(torch.isfinite(value).all() for value in again.parameters())


def test_a_batch_that_the_processes_cannot_share_is_refused(make_data):
    from spectrain.trainer.loop import _check_batch
    from spectrain.trainer.settings import TrainerSettings

    with pytest.raises(SpectrainError, match="batch_size 9 cannot be shared by 2"):
        _check_batch(TrainerSettings(steps=1, batch_size=9), make_data(), 2)


@pytest.mark.parametrize("train_lm_head", [True, False])
def test_trainable_tensors_change_and_frozen_ones_do_not(
    make_head, make_data, fit, tmp_path, train_lm_head
):  # case 34
    head = make_head(train_lm_head=train_lm_head)
    before = digests(head)
    fit(head, make_data(), tmp_path)
    require_changes(head, before, "here")
    now = digests(head)
    assert (now["lm_head.weight"] == before["lm_head.weight"]) is not train_lm_head
    assert now["d2t"] == before["d2t"]


def test_a_tensor_that_no_gradient_reaches_is_named(make_head):
    head = make_head(train_lm_head=False)
    before = digests(head)
    with torch.no_grad():
        head.lm_head.weight += 1
        for name, value in head.named_parameters():
            if name != "fc.weight":
                value += 1
    with pytest.raises(RunFailed, match=r"not trained: fc.weight; frozen but changed: lm_head"):
        require_changes(head, before, "here")


def test_an_unused_tensor_is_found_though_weight_decay_moves_it(
    make_head, make_data, fit, tmp_path, corpus
):
    """Also where a row of two reply tokens gives every tensor a gradient of zero."""
    head = make_head()
    head.unused = torch.nn.Linear(8, 8, bias=False)
    short = Batch(
        **{name: value.clone() for name, value in vars(corpus[0]).items() if value is not None}
    )
    short.reply[:] = 0
    short.reply[:, 3:5] = 1
    before = digests(head)
    data = make_data(rows=[short, *corpus[1:]])
    state, _ = fit(head, data, tmp_path, batch_size=12, micro_batch=1, weight_decay=0.5)
    assert digests(head)["unused.weight"] != before["unused.weight"]
    assert state.unreached == ["unused.weight"]
    with pytest.raises(RunFailed, match=r"not trained: unused\.weight"):
        require_changes(head, before, "here", state.unreached)


def test_muon_trains_every_tensor(make_head, make_data, fit, tmp_path):
    head = make_head()
    before = digests(head)
    _, rows = fit(head, make_data(), tmp_path, steps=12, optimizer="muon")
    require_changes(head, before, "here")
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_run_that_ends_on_bad_steps_has_failed(make_head, make_data, fit, tmp_path):
    """Fewer than max_bad_steps, but nothing after them shows that the weights are whole."""
    data = make_data(before_load=poison({3, 4}))
    with pytest.raises(RunFailed, match="not finite in the last 2 steps"):
        fit(make_head(), data, tmp_path, steps=5)
    with pytest.raises(RunFailed, match="extend=true --steps 10"):
        fit(make_head(), make_data(), tmp_path, steps=5)
    state, _ = fit(make_head(), make_data(), tmp_path, steps=10, extend=True)
    assert (state.step, state.skipped, state.skipped_in_row) == (10, 2, 0)


def test_a_batch_larger_than_the_data_is_refused(make_head, make_data, fit, corpus, tmp_path):
    with pytest.raises(SpectrainError, match=r"batch_size 100 is more than the \d+ training rows"):
        fit(make_head(), make_data(), tmp_path, batch_size=100)

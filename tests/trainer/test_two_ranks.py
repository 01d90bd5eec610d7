"""Two processes over gloo, forked: the loop with real exchanges of gradients."""

from __future__ import annotations

import shutil

import pytest
import torch
from accelerate import Accelerator
from ranks import run_on_ranks

from spectrain.core.batch import Batch
from spectrain.trainer import order
from spectrain.trainer.loop import train
from spectrain.trainer.metrics import read_metrics
from spectrain.trainer.order import share
from spectrain.trainer.settings import TrainerSettings


@pytest.fixture
def on_two_ranks(monkeypatch):
    """on_two_ranks(work) runs work(accelerator) in two processes; fails when one of them does."""

    def run(work):
        def begin():
            accelerator = Accelerator(cpu=True)
            assert accelerator.num_processes == 2
            work(accelerator)
            accelerator.end_training()

        run_on_ranks(begin, monkeypatch)

    return run


def unsupervised(batch: Batch) -> Batch:
    return Batch(batch.tokens, torch.zeros_like(batch.reply), batch.aux, batch.last, batch.argmax)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_rank_without_supervised_rows_waits_for_nobody(
    make_head, make_data, corpus, fit, tmp_path, on_two_ranks, micro_batch
):
    """Case 21: at every step one of the processes has no supervised row; the result is that of one
    process that sees all rows. Case 27: nor does it matter when one process finishes the work."""
    # Sorted by length and dealt in turns: the rows at odd places go to rank 1.
    rows = sorted(corpus, key=lambda row: row.tokens.shape[1])[:4]
    rows = [rows[0], unsupervised(rows[1]), rows[2], unsupervised(rows[3])]
    options = {"steps": 4, "batch_size": 4, "log_every": 1, "micro_batch": micro_batch}
    options |= {"save_every": 2}
    identity = {"test": "two ranks"}
    single = make_head()
    _, expected = fit(single, make_data(rows=rows), tmp_path / "one", **options)

    def work(accelerator):
        head = make_head()
        settings = TrainerSettings(**options)
        train(head, make_data(rows=rows), settings, accelerator, tmp_path / "two", identity)
        gap = max(
            (a - b).abs().max().item()
            for a, b in zip(head.parameters(), single.parameters(), strict=True)
        )
        assert gap < 1e-4, gap  # on both ranks

    on_two_ranks(work)
    two_ranks = read_metrics(tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-00000004")
    resumed = make_head(seed=1)
    _, one_rank = fit(resumed, make_data(rows=rows), tmp_path / "two", identity=identity, **options)
    for got in (two_ranks, one_rank):
        assert [r["loss"] for r in got] == pytest.approx([r["loss"] for r in expected], rel=1e-5)
        assert [r["hits"] for r in got] == [r["hits"] for r in expected]


def test_ranks_whose_conversations_fit_into_unequal_numbers_of_packed_rows(
    make_head, make_data, corpus, fit, tmp_path, on_two_ranks
):
    """CASE 22: of the two shares of a batch one fits into fewer rows, and is cut into as many."""
    rows = sorted(corpus, key=lambda row: row.tokens.shape[1])[:6]
    lengths = [row.tokens.shape[1] for row in rows]
    options = {"steps": 4, "batch_size": 6, "log_every": 1, "micro_batch": 1, "pack_length": 58}
    parts = [share(range(6), lengths, rank, 2, 1, 58) for rank in range(2)]
    assert [len(order._packed([*range(rank, 6, 2)], lengths, 58)) for rank in range(2)] == [1, 2]
    assert [len(own) for own in parts] == [2, 2]
    single = make_head()
    alone = options | {"pack_length": 0}
    _, expected = fit(single, make_data(rows=rows), tmp_path / "one", **alone)

    def work(accelerator):
        head = make_head()
        settings = TrainerSettings(**options)
        loads = []
        data = make_data(rows=rows, before_load=loads.append)
        train(head, data, settings, accelerator, tmp_path / "two", {})
        assert len(loads) == 4 * len(parts[accelerator.process_index])
        gap = max(
            (a - b).abs().max().item()
            for a, b in zip(head.parameters(), single.parameters(), strict=True)
        )
        assert gap < 1e-4, gap  # on both ranks

    on_two_ranks(work)
    got = read_metrics(tmp_path / "two")
    assert [r["loss"] for r in got] == pytest.approx([r["loss"] for r in expected], rel=1e-5)
    assert [r["hits"] for r in got] == [r["hits"] for r in expected]


def test_a_bad_step_of_one_rank_is_skipped_by_both(make_head, make_data, tmp_path, on_two_ranks):
    def work(accelerator):
        loads = iter(range(100))

        def poison(batch):
            if next(loads) == 1 and accelerator.process_index == 1:
                batch.aux[:, 3] = float("nan")

        settings = TrainerSettings(steps=4, batch_size=4, micro_batch=2, log_every=1)
        head = make_head()
        data = make_data(before_load=poison)
        state = train(head, data, settings, accelerator, tmp_path, {})
        assert (state.skipped, state.step) == (1, 4)
        assert all(torch.isfinite(value).all() for value in head.parameters())

    on_two_ranks(work)

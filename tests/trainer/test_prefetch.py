"""Reading ahead changes when rows are read, and nothing else."""

from __future__ import annotations

import os
import signal
import threading
import weakref

import pytest
import torch

from spectrain.core.errors import SpectrainError
from spectrain.trainer import checkpoint
from spectrain.trainer.prefetch import reading


def readers():
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_steps_come_in_order_and_none_behind_the_end():
    asked = []

    def read(step):
        asked.append((step, threading.current_thread() is threading.main_thread()))
        return [step]

    with reading(read, 5, ahead=True, pin=False) as get:
        assert [get(step) for step in range(2, 5)] == [[2], [3], [4]]
    assert asked == [(2, False), (3, False), (4, False)]
    with reading(read, 5, ahead=False, pin=False) as get:
        assert get(1) == [1]
    assert asked[3:] == [(1, True)]
    assert not readers()


def test_the_next_step_is_read_while_this_one_is_at_work():
    begun = threading.Event()

    def read(step):
        if step == 1:
            begun.set()
        return []

    with reading(read, 9, ahead=True, pin=False) as get:
        get(0)
        assert begun.wait(30)  # nobody has asked for step 1


def test_a_run_that_reads_ahead_is_the_same_bit_for_bit(make_head, make_data, fit, tmp_path):
    heads = []
    for ahead in (False, True):
        head = make_head()
        options = {"steps": 8, "micro_batch": 2, "lr": 1e-2}  # three epochs
        _, rows = fit(head, make_data(ahead=ahead), tmp_path / str(ahead), **options)
        heads.append((head.state_dict(), [(row["loss"], row["hits"]) for row in rows]))
    (plain, expected), (ahead, got) = heads
    assert got == expected
    assert all(torch.equal(value, ahead[name]) for name, value in plain.items())


def test_a_fault_of_the_reader_is_raised_at_its_own_step(make_head, make_data, fit, tmp_path):
    """With its place, after the steps before it; and no thread is left."""
    loads = iter(range(100))

    def fail(_batch):
        if next(loads) == 4:
            raise SpectrainError("damaged", where="shard-7")

    with pytest.raises(SpectrainError, match="shard-7: damaged"):
        fit(make_head(), make_data(before_load=fail, ahead=True), tmp_path, save_every=1)
    assert checkpoint.newest(tmp_path)[1]["step"] == 4
    assert not readers()


def test_ctrl_c_leaves_no_thread(make_head, make_data, fit, tmp_path, ctrl_c_interrupts):
    loads = iter(range(100))

    def interrupt(_batch):
        if next(loads) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(make_head(), make_data(before_load=interrupt, ahead=True), tmp_path)
    assert not readers()


def test_an_exception_in_the_loop_leaves_no_thread(make_head, make_data, fit, tmp_path):
    head = make_head()
    head.fc.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(head, make_data(ahead=True), tmp_path)
    assert not readers()


@pytest.mark.parametrize("ahead", [False, True])
def test_two_steps_at_most_are_in_memory(make_head, make_data, fit, tmp_path, ahead):
    """Counted whenever one more micro-batch is read: with two a step, three others at most (one,
    where a step is read after the one before it has gone)."""
    alive, most = weakref.WeakSet(), []

    def count(batch):
        most.append(len(alive))
        alive.add(batch.tokens)

    data = make_data(before_load=count, ahead=ahead)
    fit(make_head(), data, tmp_path, micro_batch=2, steps=10)
    assert len(most) == 20
    assert max(most) <= (3 if ahead else 1)

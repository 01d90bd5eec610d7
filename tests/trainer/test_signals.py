"""Asked to stop, a run finishes its step and saves; asked again, it leaves at once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from spectrain.core.errors import Terminated
from spectrain.core.failures import one_line_errors
from spectrain.trainer import checkpoint, signals

ENDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}


def sent(numbers, at):
    """Sends signals to this process, one after the other, when the given load (from 0) begins."""
    loads = iter(range(1000))

    def before_load(_batch):
        if next(loads) == at:
            for number in numbers:
                os.kill(os.getpid(), number)

    return before_load


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_finishes_the_step_and_saves(
    make_head, make_data, fit, tmp_path, capsys, ctrl_c_interrupts, number
):
    before = [signal.getsignal(known) for known in ENDS]
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(make_head(), make_data(before_load=sent([number], 2)), tmp_path, save_every=100)
    assert caught.type is ENDS[number]
    assert checkpoint.newest(tmp_path)[1]["step"] == 3
    assert "checkpoint of step 3 of 6 written" in capsys.readouterr().err
    assert [signal.getsignal(known) for known in ENDS] == before


@pytest.mark.parametrize("number", ENDS)
def test_a_second_signal_stops_at_once(
    make_head, make_data, fit, tmp_path, monkeypatch, ctrl_c_interrupts, number
):
    """In the middle of its step, of which nothing is kept."""
    monkeypatch.setattr(signals, "ECHO_SECONDS", -1.0)
    with pytest.raises(ENDS[number]):
        fit(make_head(), make_data(before_load=sent([number] * 2, 3)), tmp_path, save_every=2)
    assert checkpoint.newest(tmp_path)[1]["step"] == 2


def test_one_request_that_arrives_twice_is_one(
    make_head, make_data, fit, tmp_path, ctrl_c_interrupts
):
    """From the batch system and from the launcher, which passes on what it got itself."""
    numbers = [signal.SIGTERM, signal.SIGTERM]
    with pytest.raises(Terminated):
        fit(make_head(), make_data(before_load=sent(numbers, 2)), tmp_path, save_every=100)
    assert checkpoint.newest(tmp_path)[1]["step"] == 3


@pytest.mark.parametrize("number", ENDS)
def test_an_ignored_signal_stays_ignored(
    make_head, make_data, fit, tmp_path, ctrl_c_interrupts, number
):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        state, _ = fit(make_head(), make_data(before_load=sent([number], 2)), tmp_path)
        assert signal.getsignal(number) is signal.SIG_IGN
    except KeyboardInterrupt:  # would end the whole session
        pytest.fail("interrupted")
    finally:
        signal.signal(number, before)
    assert state.step == 6


def test_outside_the_main_thread_nothing_is_touched():
    seen = []

    def work():
        with signals.interrupts() as stop:
            seen.append(stop.flags())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[False, False]]


def test_the_processes_agree_on_what_it_was():
    """Counts over all processes, in the order of `flags`."""
    assert signals.wanted([0, 0]) is None
    assert signals.wanted([0, 2]) is signals.wanted([0, 1]) is Terminated
    assert signals.wanted([1, 0]) is KeyboardInterrupt
    assert signals.Stop(signal.SIGTERM).flags() == [False, True]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_exit_codes(error, code, capsys):
    with pytest.raises(SystemExit) as caught, one_line_errors(goes_on=True):
        raise error
    assert caught.value.code == code
    assert capsys.readouterr().err == "error: interrupted; the same command goes on where it was\n"

"""The server backend against real HTTP on loopback: when what is asked, and stopping."""

import itertools
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from chat_server import ChatServer, ask_of, backend, echo, keys, said, unit

pytestmark = pytest.mark.usefixtures("bare_environment")


def test_every_unit_comes_back_with_its_replies_in_order():
    """Answers arrive in a shuffled order; each must land at its own question."""

    def shuffled(body):
        time.sleep(sum(map(ord, ask_of(body))) * 5 % 7 / 500)
        return echo(body)

    units = [unit(number, questions=1 + number % 4) for number in range(9)]
    with ChatServer(shuffled) as server:
        asking = backend(server)
        answered = list(asking.answer(units))
    assert sorted(one.key for one, _ in answered) == sorted(keys(*units))
    for one, replies in answered:
        texts = [f"re: {part.messages[0]['content']}" for part in one.questions]
        assert [reply.text for reply in replies] == texts
        assert {(reply.finish, reply.tokens, reply.reasoning) for reply in replies} == {
            ("stop", None, None)
        }
    total = sum(len(one.questions) for one in units)
    assert len(server.asked) == total
    assert asking.facts == {
        "replies": total,
        "prompt_tokens": sum(len(part.ids) for one in units for part in one.questions),
        "completion_tokens": 3 * total,
    }


def test_the_bound_is_reached_and_never_passed():
    """Nobody is answered before `bound` are waiting, so that fewer would never be answered; what
    comes on top in the meantime would raise the peak."""
    bound = 5
    barrier = threading.Barrier(bound)

    def together(body):
        if body["max_tokens"] > 1:
            barrier.wait(timeout=30)
            time.sleep(0.05)
        return echo(body)

    units = [unit(number, questions=3) for number in range(5)]  # 15 questions, 3 rounds
    with ChatServer(together) as server:
        answered = list(backend(server, concurrency=bound).answer(units))
    assert len(answered) == 5
    assert server.peak == bound


def test_units_are_read_as_they_are_needed():
    """Of a long lazy sequence at most `concurrency` units are open besides those handed over."""
    taken = 0

    def endless():
        nonlocal taken
        for number in itertools.count():
            taken += 1
            yield unit(number, questions=2)

    with ChatServer(echo) as server:
        answers = backend(server, concurrency=4).answer(endless())
        for handed_over, _ in enumerate(itertools.islice(answers, 30)):
            assert taken <= handed_over + 1 + 4
        answers.close()
    assert taken <= 30 + 4


def test_a_unit_is_handed_over_while_others_are_still_asked():
    """The first unit is answered only once the second one has arrived."""
    arrived = threading.Event()

    def first_waits(body):
        if ask_of(body) == "question 100" and body["max_tokens"] > 1:
            assert arrived.wait(timeout=30)
        return echo(body)

    with ChatServer(first_waits) as server:
        answers = backend(server).answer([unit(1, 1), unit(2, 2)])
        assert next(answers)[0] == unit(2, 2)
        arrived.set()
        assert next(answers)[0] == unit(1, 1)


def test_nothing_to_ask_asks_nothing():
    with ChatServer(echo, models=()) as server:
        assert list(backend(server).answer([])) == []
    assert not server.asked + server.trials


def test_one_server_answers_round_after_round_and_is_met_once():
    with ChatServer(echo) as server:
        asking = backend(server)
        for number in range(3):
            assert [one for one, _ in asking.answer([unit(number)])] == [unit(number)]
    assert len(server.trials) == 1


# ── stopping ─────────────────────────────────────────────────────────────────


def test_who_stops_listening_does_not_wait():
    """Closing the iterator drops what is being asked, although no answer will come for a minute."""
    hang = threading.Event()

    def first_only(body):
        if ask_of(body) != "question 100":
            hang.wait(60)
        return echo(body)

    with ChatServer(first_only) as server:
        answers = backend(server, timeout=600).answer([unit(1, 1), unit(2), unit(3)])
        next(answers)
        start = time.monotonic()
        answers.close()
        assert time.monotonic() - start < 10
        hang.set()


def test_ctrl_c_ends_the_process_at_once(tmp_path, ctrl_c_interrupts):
    """Questions hang at the server, with a timeout of ten minutes and retries."""
    hang = threading.Event()
    program = """
        import sys
        from spectrain.data.questions import Question, Reply, Unit
        from spectrain.data.server import Server
        ask = Question([1, 2], 0.0, ({"role": "user", "content": "hi"},), None, 0, "7" * 16)
        server = Server(sys.argv[1], "tiny", target="f", max_new_tokens=9, top_p=1, seed=0)
        try:
            list(server.answer([Unit((ask,) * 8)]))
        except KeyboardInterrupt:
            print("interrupted")
    """

    def trial_only(body):
        if body["max_tokens"] > 1:
            hang.wait(60)
        return said("yes", 2)

    with ChatServer(trial_only) as server:
        command = [sys.executable, "-c", textwrap.dedent(program), server.url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while server.open < 8 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.open == 8
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        hang.set()
    assert out == "interrupted\n"
    assert process.returncode == 0

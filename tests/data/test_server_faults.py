"""What goes wrong with a server: each is one line, found as early as can be."""

import sys
import threading

import pytest
from chat_server import (
    ChatServer,
    ask_of,
    backend,
    echo,
    failing,
    gather,
    keys,
    said,
    unit,
)

from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.data.finishes import REFUSED
from spectrain.data.questions import Reply
from spectrain.data.server import Server

pytestmark = pytest.mark.usefixtures("bare_environment")


# ── the prompt that the server read ──────────────────────────────────────────


def test_another_template_is_found_before_anything_is_asked():
    """A default system prompt adds 20 tokens."""
    more = ChatServer(lambda body: said("yes", len(ask_of(body)) + 20))
    with more as server, pytest.raises(SpectrainError) as error:
        list(backend(server).answer([unit(1), unit(2)]))
    line = failing(error)
    assert "reads 32 tokens where the target reads 12" in line
    assert "question 100 ('question 100')" in line
    assert "template" in line
    assert "system prompt" in line
    assert len(server.trials) == 1
    assert not server.asked


def test_a_template_that_differs_later_is_found_there():
    def odd(body):
        return said("yes", len(ask_of(body)) + (ask_of(body) == "question 202"))

    with ChatServer(odd) as server, pytest.raises(SpectrainError) as error:
        list(backend(server, concurrency=1).answer([unit(1), unit(2), unit(3)]))
    assert "question 202" in failing(error)
    assert "reads 13 tokens where the target reads 12" in failing(error)


def test_other_ids_of_the_same_number_are_found():
    def other(body):
        ids = list(range(len(ask_of(body))))
        return said("yes", len(ids)) | {"prompt_token_ids": [*ids[:5], 77, *ids[6:]]}

    with ChatServer(other) as server, pytest.raises(SpectrainError) as error:
        list(backend(server).answer([unit(1)]))
    assert "token 77 at 5, the target 5" in failing(error)


@pytest.mark.parametrize("usage", [None, {}])
def test_a_server_that_does_not_count_is_asked_only_on_request(usage):
    with ChatServer(lambda body: echo(body) | {"usage": usage}) as server:
        with pytest.raises(SpectrainError, match="check_prompts=false"):
            list(backend(server).answer([unit(1)]))
        assert len(list(backend(server, check_prompts=False).answer([unit(1)]))) == 1


# ── what goes wrong ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("fault", [500, 503, 429, None, b'{"choices": [{"mess'])
def test_what_passes_is_tried_again(fault):
    """The first try of each question fails, once with a connection that is cut in the middle."""
    seen = set()

    def once(body):
        if body["max_tokens"] == 1 or body["seed"] in seen:
            return echo(body)
        seen.add(body["seed"])
        return (fault, {"error": {"message": "busy"}}) if isinstance(fault, int) else fault

    with ChatServer(once) as server:
        [(_, replies)] = backend(server).answer([unit(1)])
    assert [reply.text for reply in replies] == [f"re: question {n}" for n in (100, 101, 102)]
    assert len(server.asked) == 6


@pytest.mark.parametrize(
    ("fault", "told"),
    [(503, "503: busy"), (429, "429: busy"), (None, "no connection"), (b"{", "no connection")],
)
def test_what_does_not_pass_ends_the_run_in_one_line(fault, told):
    """Units finished by then were handed over, and the command may be repeated."""

    def broken(body):
        if ask_of(body) != "question 201":
            return echo(body)
        return (fault, {"error": {"message": "busy"}}) if isinstance(fault, int) else fault

    got: list[str] = []
    with ChatServer(broken) as server, pytest.raises(RunFailed) as error:
        gather(backend(server, retries=1, concurrency=1).answer([unit(1), unit(2), unit(3)]), got)
    assert got == keys(unit(1))
    line = failing(error)
    assert told in line
    assert "question 201" in line
    assert "asked 2 times" in line
    assert "the same command goes on" in line
    assert sum(ask_of(body) == "question 201" for body in server.asked) == 2


def test_units_that_finish_beside_a_failure_are_handed_over(monkeypatch):
    """Nothing here waits for anything, so that all of them are done at once, in any order."""

    async def ask(self, openai, client, question, trial=False):
        if question.place == 400:
            raise RunFailed("this one")
        return Reply("yes", "stop", None)

    monkeypatch.setattr(Server, "_ask", ask)
    units = [unit(number, 1) for number in range(8)]
    got: list[str] = []
    with ChatServer(echo) as server, pytest.raises(RunFailed, match="this one"):
        gather(backend(server).answer(units), got)
    assert sorted(got) == sorted(keys(*units[:4], *units[5:]))


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (400, "refuses the request (400: this is wrong)"),
        (401, "refuses the key (401: this is wrong)"),
        (404, "does not know this (404: this is wrong)"),
        (422, "refuses the request (422: this is wrong)"),
    ],
)
@pytest.mark.parametrize("shape", ["error", "message", "detail"])
def test_what_the_user_can_mend_is_told_at_once(status, told, shape):
    """After one try, before anything is asked in earnest; bodies differ from server to server."""
    body = {
        shape: {"message": "this is\nwrong", "code": status}
        if shape == "error"
        else "this is\nwrong"
    }
    with ChatServer(lambda _: (status, body)) as server, pytest.raises(SpectrainError) as error:
        list(backend(server).answer([unit(1)]))
    assert not isinstance(error.value, RunFailed)
    assert told in failing(error)
    assert len(server.trials) == 1
    assert not server.asked


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_question_that_is_refused_alone_ends_nothing(status, monkeypatch, capsys):
    """Of a prompt too long for the server: the others are answered, its words are told once."""
    monkeypatch.delenv("SPECTRAIN_QUIET", raising=False)

    def short(body):
        refused = (status, {"error": {"message": "maximum context length is 9 tokens"}})
        return refused if ask_of(body) in ("question 101", "question 102") else echo(body)

    with ChatServer(short) as server:
        asking = backend(server, concurrency=1)
        [(_, replies)] = asking.answer([unit(1)])
    assert [reply.finish for reply in replies] == ["stop", REFUSED, REFUSED]
    assert asking.facts["refused"] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "question 101" in line
    assert f"({status}: maximum context length is 9 tokens); such prompts are left out" in line


def test_a_model_that_the_server_has_not():
    listing = ChatServer(echo, models=("tinny", "large"))
    with listing as server, pytest.raises(SpectrainError, match="mean 'tinny'") as error:
        list(backend(server).answer([unit(1)]))
    assert "it has: tinny, large" in failing(error)
    assert not server.asked + server.trials


def test_of_many_models_some_are_named():
    listing = ChatServer(echo, models=[f"model-{n}" for n in range(300)])
    with listing as server, pytest.raises(SpectrainError, match="and 290 more") as error:
        list(backend(server).answer([unit(1)]))
    failing(error)


@pytest.mark.parametrize("models", [None, ()])
def test_a_server_without_a_list_is_asked_all_the_same(models):
    with ChatServer(echo, models=models) as server:
        assert len(list(backend(server).answer([unit(1)]))) == 1


def test_an_address_without_v1():
    with ChatServer(echo) as server:
        asking = Server(
            server.url.removesuffix("/v1"), "tiny", target="f", max_new_tokens=9, top_p=1, seed=0
        )
        with pytest.raises(SpectrainError, match="ends with /v1") as error:
            list(asking.answer([unit(1)]))
    failing(error)


def test_no_server_there():
    with ChatServer(echo) as server:
        gone = backend(server, retries=0)
    with pytest.raises(RunFailed, match=r"no connection .* is it running\?") as error:
        list(gone.answer([unit(1)]))
    failing(error)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000/v1",
        "ftp://host/v1",
        "http://",
        "my server",
        "http://host:port/v1",
        "http://[::1",
        "",
    ],
)
def test_what_is_no_address(url):
    with pytest.raises(SpectrainError, match="http://host:port/v1"):
        Server(url, "tiny", target="f", max_new_tokens=9, top_p=1, seed=0)


def test_own_settings_are_not_set_in_passing():
    with pytest.raises(SpectrainError, match="seed, top_p cannot be set there"):
        Server(
            "http://a",
            "b",
            target="f",
            max_new_tokens=9,
            top_p=1,
            seed=0,
            extra={"top_p": 1, "seed": 3},
        )


@pytest.mark.parametrize(
    "answer",
    [{}, {"choices": []}, {"choices": [{}]}, {"choices": [{"message": 5}]}, [], "{oops", "", "5"],
)
def test_what_is_no_chat_completion(answer):
    odd = ChatServer(lambda _: answer)
    with odd as server, pytest.raises(SpectrainError, match="no chat completion") as error:
        list(backend(server).answer([unit(1)]))
    assert not isinstance(error.value, RunFailed)
    failing(error)


def test_a_slow_server_runs_out_of_time():
    hang = threading.Event()
    with ChatServer(lambda body: hang.wait(30) and None) as server:
        with pytest.raises(RunFailed, match=r"no answer within 0\.3 s, asked 2 times"):
            list(backend(server, timeout=0.3, retries=1).answer([unit(1)]))
        hang.set()
    assert len(server.trials) == 2


def test_without_the_client_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(SpectrainError, match=r"pip install 'spectrain\[server\]'"):
        list(
            Server("http://a", "b", target="f", max_new_tokens=9, top_p=1, seed=0).answer([unit(1)])
        )


# ── the key ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("given", [True, False])
def test_the_key_is_sent_and_shown_nowhere(given, monkeypatch, caplog):
    """Given or from the environment; not even where the server repeats it."""
    if not given:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    refused = (401, {"error": {"message": "wrong key: sk-secret"}})
    with caplog.at_level("DEBUG"), ChatServer(lambda _: refused) as server:
        asking = backend(server, api_key="sk-secret" if given else None)
        with pytest.raises(SpectrainError, match="wrong key: …") as error:
            list(asking.answer([unit(1)]))
    assert server.headers["authorization"] == "Bearer sk-secret"
    assert "secret" not in failing(error) + repr(asking) + asking.identity
    assert "secret" not in caplog.text


def test_a_password_in_the_address_is_not_shown():
    with ChatServer(lambda _: (400, {"detail": "no"})) as server:
        url = server.url.replace("//", "//me:hidden@")
        with pytest.raises(SpectrainError) as error:
            list(
                Server(url, "tiny", target="f", max_new_tokens=9, top_p=1, seed=0).answer([unit(1)])
            )
    assert "hidden" not in failing(error)
    assert server.url in failing(error)

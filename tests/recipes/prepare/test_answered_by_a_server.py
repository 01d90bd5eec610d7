"""prepare with a server: the way over HTTP ends in the store that the target alone would make."""

import pytest
from preparing import PROMPTS, content, talk, write
from target_server import serve
from tiny_models import save_tiny

from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.data.store import FeatureStore
from spectrain.generator import answering
from spectrain.recipes import prepare

pytestmark = pytest.mark.usefixtures("bare_environment")


@pytest.fixture
def settings(tmp_path):
    rows = [*PROMPTS, talk("hello", "x", "and then?", "y")]
    return {
        "prompts": write(tmp_path / "talks.jsonl", rows),
        "regenerate": True,
        "temperature": 0.0,
        "heldout_temperatures": 0.0,
        "dtype": "float32",
    }


def shards(folder) -> dict[str, bytes]:
    return {name: data for name, data in content(folder).items() if name.startswith("shard-")}


def test_the_store_is_that_of_the_target_itself(config, settings, tiny, tmp_path, monkeypatch):
    """A server that tells the ids of its replies; the target here is asked for nothing."""
    prepare.run(config(**settings, store=tmp_path / "here"))
    monkeypatch.setattr(answering, "complete", None)
    with serve(tiny, tell_ids=True) as server:
        told = {"url": server.url, "model": "tiny"}
        there = config(**settings, store=tmp_path / "there", server=told)
        report = prepare.run(there)
        asked = len(server.asked)
        again = prepare.run(there)
        assert len(server.asked) == asked  # kept, not asked again
    assert shards(tmp_path / "there") == shards(tmp_path / "here")
    assert again["kept"]["replies"] == asked
    assert report["kept"] == {"replies": 0, "shards": 0}


def test_replies_as_text_are_read_with_the_template(config, settings, tiny):
    """A server that tells no ids: rows of the text it said, its temperature and finish kept."""
    with serve(tiny, tell_ids=False) as server:
        told = {"url": server.url, "model": "tiny"}
        prepare.run(config(**settings, server=told))
    store = FeatureStore.open(config().store, verify=True)
    rows = [row for split in ("train", "heldout") for row in store.rows(split)]
    assert {row.temperature for row in rows} == {0.0}
    assert {row.finish for row in rows} <= {"stop", "length"}
    for row in rows:
        text = tiny.tokenizer.decode(store.batch([row]).tokens[0])
        assert text.startswith("<|im_start|>user\n")


def test_a_given_history_is_not_learnt(config, tmp_path, tiny):
    """Also where a reply comes as text: what somebody else said before is context."""
    rows = [talk("hello", "said by somebody", f"and {n}?", "y") for n in range(6)]
    settings = {"prompts": write(tmp_path / "talks.jsonl", rows), "regenerate": "last"}
    settings |= {"temperature": 0.0, "heldout": 0.0}
    with serve(tiny, tell_ids=False) as server:
        told = {"url": server.url, "model": "tiny"}
        prepare.run(config(**settings, server=told))
    store = FeatureStore.open(config().store)
    assert store.rows("train")
    for row in store.rows("train"):
        tokens, reply = store.text(row)
        said = tiny.tokenizer.decode(tokens[reply > 0])
        assert "somebody" in tiny.tokenizer.decode(tokens)
        assert "somebody" not in said
        assert reply.max() == 1


def test_a_server_that_dies_loses_only_what_was_open(config, settings, tiny):
    """The rerun asks for the units that have no file, and for no other."""
    with serve(tiny, tell_ids=True) as server:
        reply, count = server.reply, 0

        def dying(body):
            nonlocal count
            count += body["max_tokens"] > 1
            return (500, {}) if count > 11 else reply(body)

        server.reply = dying
        told = {"url": server.url, "model": "tiny", "retries": 0, "concurrency": 1}
        with pytest.raises(RunFailed, match="same command"):
            prepare.run(config(**settings, server=told))
        server.reply = reply
        server.asked.clear()
        report = prepare.run(config(**settings, server=told))
        assert report["kept"]["replies"] == 10  # two units of five
        assert len(server.asked) < 11


def test_a_prompt_too_long_for_the_server_is_left_out_and_asked_again(config, settings, tiny):
    """Counted and named as other dropped rows are; a server with more room answers it later. A
    talk whose later turn is refused keeps those before it."""
    told, first = {"url": "", "model": "tiny"}, PROMPTS[0]["messages"][0]["content"]
    with serve(tiny, tell_ids=True) as server:
        told["url"], says = server.url, server.reply

        def reply(body):
            answer = says(body)
            if body["messages"][-1]["content"] == "hello":  # a whole reply: the talk goes on
                answer["choices"][0] |= {"finish_reason": "stop", "token_ids": None}
                answer["choices"][0]["message"]["content"] = "yes"
            return answer

        def narrow(body):
            texts = [message["content"] for message in body["messages"]]
            refused = body["max_tokens"] > 1 and (texts[0] == first or "and then?" in texts)
            return (400, {"error": {"message": "too long"}}) if refused else reply(body)

        server.reply = narrow
        less = prepare.run(config(**settings, server=told))
        asked = len(server.asked)
        server.reply = reply
        more = prepare.run(config(**settings, server=told))
    dropped = less["counts"]["dropped"]
    assert dropped["finish-request-refused"] == 1
    assert dropped["later-turn-finish-request-refused"] == 1
    assert less["dropped_at"]["finish-request-refused"][0].startswith(str(settings["prompts"]))
    assert "1 finish-request-refused" in prepare.render(less)
    assert len(server.asked) == asked + 2  # and nothing else
    assert not [reason for reason in more["counts"]["dropped"] if "refused" in reason]
    assert sum(more["counts"]["rows"].values()) > sum(less["counts"]["rows"].values())


def test_new_weights_under_the_same_name_are_asked_anew(
    config, settings, tiny, tokenizer, tmp_path
):
    """The server tells no more than a name: whose replies they are, the target here says."""
    new = save_tiny(tmp_path / "new", tokenizer, seed=7)
    with serve(tiny, tell_ids=True) as server:
        told = {"url": server.url, "model": "tiny"}
        prepare.run(config(**settings, server=told))
        same = prepare.run(config(**settings, server=told, overwrite=True))
        report = prepare.run(config(**settings, server=told, overwrite=True, target=str(new)))
    assert same["kept"]["replies"] > 0
    assert report["kept"]["replies"] == 0


def test_another_model_is_another_store(config, settings, tiny):
    with serve(tiny, tell_ids=True) as server:
        server.models = ("tiny", "other")
        prepare.run(config(**settings, server={"url": server.url, "model": "tiny"}))
        with pytest.raises(SpectrainError, match="prepared with backend"):
            prepare.run(config(**settings, server={"url": server.url, "model": "other"}))

"""Every assistant turn answered anew, in order: what the target said before is its history."""

import pytest
import torch
from preparing import talk, write
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from spectrain.core.target import Target
from spectrain.data.store import FeatureStore
from spectrain.generator import answering
from spectrain.recipes import prepare

USERS = [[f"hello {n}", "and then?", "why?"] for n in range(16)]


def greedy(target, ids: list[int], longest: int) -> list[int]:
    """Slow and plain: one full forward of the stock model for each token."""
    made: list[int] = []
    while len(made) < longest and not (made and made[-1] in target.stop_ids):
        logits = target.model(input_ids=torch.tensor([ids + made]), use_cache=False).logits
        made.append(int(logits[0, -1].argmax()))
    return made


def expected_rows(target, users: list[str], longest: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and reply numbers of the rows of a conversation with these user turns, at temperature
    0. Where a reply, read again as text, has other tokens, a new row begins."""
    rows: list[tuple[list[int], list[int]]] = []
    messages = []
    for user in users:
        messages.append({"role": "user", "content": user})
        prompt = target.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        reply = greedy(target, prompt, longest)
        ended = reply[-1] in target.stop_ids
        text = target.tokenizer.decode(reply[:-1] if ended else reply)
        if len(reply) == ended:
            break  # nothing was said
        ids, mask = rows[-1] if rows and prompt[: len(rows[-1][0])] == rows[-1][0] else ([], [])
        if ids:
            rows.pop()
        number = max(mask, default=0) + 1
        mask = mask + [0] * (len(prompt) - len(ids)) + [number] * len(reply)
        rows.append((prompt + reply, mask))
        if not ended or not text.strip():
            break
        messages.append({"role": "assistant", "content": text})
    return [(ids, mask) for ids, mask in rows if max(map(mask.count, range(1, 4))) > 1]


@pytest.fixture(scope="module")
def talkative(tokenizer, tmp_path_factory):
    """A target that ends its turns: its end-of-turn row is longer than the others."""
    folder = save_tiny(
        tmp_path_factory.mktemp("talkative") / "t", tokenizer, seed=2, tie_word_embeddings=False
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 3
    model.save_pretrained(folder)
    target = Target.load(str(folder), pack_weights=False)
    rows = [expected_rows(target, talk, 24) for talk in USERS]
    turns = [sum(max(mask) for _, mask in talk) for talk in rows]
    assert {1, 2, 3} <= set(turns), turns  # ended early, and answered to the end
    assert any(len(talk) > 1 for talk in rows)  # read again with other tokens
    assert any(max(mask) > 1 for talk in rows for _, mask in talk)  # and with the same
    return folder, [row for talk in rows for row in talk]


def test_each_reply_answers_the_replies_before_it(config, tmp_path, talkative):
    folder, expected = talkative
    rows = [talk(u[0], "not mine", u[1], "nor this", u[2], "nor that") for u in USERS]
    settings = {
        "target": str(folder),
        "prompts": write(tmp_path / "talks.jsonl", rows),
        "regenerate": True,
        "heldout": 0.0,
        "temperature": 0.0,
        "max_new_tokens": 24,
    }
    report = prepare.run(config(**settings))
    store = FeatureStore.open(config().store)
    found = {}
    for row in store.rows("train"):
        batch = store.batch([row])
        found[tuple(batch.tokens[0].tolist())] = batch.reply[0].tolist()
    wanted = {tuple(ids): mask for ids, mask in expected}
    assert {ids: found.get(ids) for ids in wanted} == wanted
    assert len(found) == len(wanted)
    assert report["counts"]["rows"]["train"] == len(wanted)
    # `last` keeps the history as it was given
    prepare.run(config(**settings | {"regenerate": "last", "store": tmp_path / "last"}))
    store = FeatureStore.open(tmp_path / "last")
    for row in store.rows("train"):
        batch = store.batch([row])
        assert batch.reply.max() == 1
        assert "nor this" in store_text(folder, batch)


def store_text(folder, batch) -> str:
    return AutoTokenizer.from_pretrained(folder).decode(batch.tokens[0])


def test_a_rerun_asks_for_nothing_in_later_rounds(config, tmp_path, talkative, monkeypatch):
    folder, _ = talkative
    rows = [talk(u[0], "x", u[1], "y", u[2]) for u in USERS]
    settings = {
        "target": str(folder),
        "prompts": write(tmp_path / "talks.jsonl", rows),
        "regenerate": True,
        "heldout": 0.0,
        "temperature": 0.0,
        "max_new_tokens": 24,
    }
    first = prepare.run(config(**settings))
    monkeypatch.setattr(answering, "complete", None)
    again = prepare.run(config(**settings))
    assert again["fingerprint"] == first["fingerprint"]
    assert again["kept"]["replies"] > len(USERS)  # of more than one round
    assert first["kept"] == {"replies": 0, "shards": 0}

"""`chat`: every turn sees the conversation so far, and what goes wrong in one does not end it."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_head

from spectrain.core.config import load_config
from spectrain.data.conversations import Conversation
from spectrain.data.tokenise import prompt_ids
from spectrain.generator.decode import complete
from spectrain.generator.run import Run
from spectrain.heads.io import save_head
from spectrain.recipes.chat import ChatConfig, render, run


@pytest.fixture
def talk(tiny, tiny_path, tmp_path, capsys):
    save_head(make_head(tiny, wild=False), tmp_path / "head")

    def talking(lines, **changes):
        flags = {"target": str(tiny_path), "head": str(tmp_path / "head"), "max_new_tokens": 8}
        report = run(load_config(ChatConfig, "chat", flags=flags | changes), iter(lines))
        return report, capsys.readouterr()

    return talking


def reply(tiny, messages):
    ids = prompt_ids(tiny.tokenizer, Conversation("x", "x", tuple(messages)), 500)
    done = complete(tiny, [torch.tensor(ids)], 8)[0]
    return tiny.tokenizer.decode(done.tokens[:-1] if done.finish == "stop" else done.tokens)


def test_turns_are_the_target_s_replies_to_all_that_was_said(talk, tiny):
    report, shown = talk(["one two", "and three?", "/reset", "one two"], system="be brief")
    messages = [{"role": "system", "content": "be brief"}]
    replies = []
    for text in ("one two", "and three?"):
        messages.append({"role": "user", "content": text})
        replies.append(reply(tiny, messages))
        messages.append({"role": "assistant", "content": replies[-1]})
    assert shown.out == "".join(text + "\n" for text in [*replies, replies[0]])
    assert report["replies"] == 3
    assert "3 replies" in render(report)


def test_a_turn_reads_what_is_new(talk, tiny, monkeypatch):
    """Not the conversation from its beginning: from the end of the last prompt, whose last
    position is read again. After /reset the prompt is another one."""
    reads = []
    admit = Run.admit

    def admitted(self, places, prompts, keys, memory):
        forward = self.target.forward
        self.target.forward = lambda tokens, **more: (
            reads.append((len(prompts[0]), tokens.shape[1])) or forward(tokens, **more)
        )
        try:
            return admit(self, places, prompts, keys, memory)
        finally:
            del self.target.forward

    monkeypatch.setattr(Run, "admit", admitted)
    talk(["one two", "and three?", "and four?", "/reset", "two one"])
    (first, one), (second, two), (third, three), (again, four) = reads
    assert (one, four) == (first, again)
    assert (two, three) == (second - first + 1, third - second + 1)


def test_commands_and_mistakes_do_not_end_it(talk, tiny):
    long = "one " * 600
    report, shown = talk(["/stats", "/dance", "", long, "one two", "/stats", "/exit", "never"])
    assert "no reply yet" in shown.err
    assert "unknown command '/dance'" in shown.err
    assert "too-long-prompt" in shown.err
    assert "or /reset" in shown.err
    assert shown.out == reply(tiny, [{"role": "user", "content": "one two"}]) + "\n"
    assert report["replies"] == 1
    assert "1 replies" in shown.err


def test_nothing_said(talk):
    report, _ = talk([])
    assert render(report) == "no reply was asked for"

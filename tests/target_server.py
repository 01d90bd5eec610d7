"""A chat server that is a tiny target: what it says can be compared with what the target says."""

from __future__ import annotations

import threading

import torch
from chat_server import ChatServer, said

from spectrain.generator.decode import complete


def text_of(target, done) -> str:
    """As servers give it: without the end-of-turn token."""
    tokens = done.tokens[: len(done.tokens) - (done.finish == "stop")]
    return target.tokenizer.decode(tokens, skip_special_tokens=True)


def serve(target, tell_ids: bool, system: str = "") -> ChatServer:
    """A server with the target's template and, if told so, a system prompt of its own."""
    one_at_a_time = threading.Lock()

    def reply(body: dict) -> dict:
        messages = body["messages"]
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        text = target.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
        with one_at_a_time:
            [done] = complete(
                target,
                [torch.tensor(ids)],
                body["max_tokens"],
                temperature=body["temperature"],
                top_p=body["top_p"],
                seed=body["seed"],
            )
        answer = said(text_of(target, done), len(ids), done.finish)
        answer["usage"]["completion_tokens"] = len(done.tokens)
        if tell_ids:
            answer["prompt_token_ids"] = ids
            answer["choices"][0]["token_ids"] = list(done.tokens)
        return answer

    return ChatServer(reply)

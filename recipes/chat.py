"""`spectrain chat`: a conversation in the terminal, with a head in front or without."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from pydantic import Field

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.data.conversations import Conversation
from spectrain.data.tokenise import require_template
from spectrain.evaluation.race import summary
from spectrain.generator.completion import Completion
from spectrain.generator.memory import Memory
from spectrain.generator.speculate import Generator
from spectrain.generator.text import Growing, text_of
from spectrain.recipes.drafting import DraftingConfig, SamplingConfig
from spectrain.recipes.generate import ids_of

HELP = (
    "/reset begins anew, /stats shows the last reply's numbers, /exit ends (so does Ctrl-D); "
    "Ctrl-C cuts a reply, what is there stays"
)


class ChatConfig(SamplingConfig, DraftingConfig):
    """What `spectrain chat` is told."""

    max_new_tokens: int = Field(512, ge=1, description="longest reply in tokens")
    system: str | None = Field(None, description="system message that opens the conversation")


def run(config: ChatConfig, lines: Iterator[str] | None = None) -> dict[str, Any]:
    """Talk until the input ends; returns what was decoded altogether.

    lines: what the user says, by default what is typed. Ctrl-C ends a reply, not the conversation.
    """
    target, head = config.load()
    require_template(target.tokenizer)
    way = config.way(target, head)
    generator = config.generator(target, head, way)
    lossy = "; LOSSY: typical acceptance" if config.typical and config.temperature else ""
    print(f"{target.name}, {way}{lossy}. {HELP}", file=sys.stderr)
    opening = [{"role": "system", "content": config.system}] if config.system else []
    messages, done, seconds = list(opening), [], []
    memory = Memory()  # of what was read: a turn reads no more than is new
    for line in _typed() if lines is None else lines:
        line = line.strip()
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            messages = list(opening)
        elif line == "/stats":
            print(_stats(done[-1:], seconds[-1:]), file=sys.stderr)
        elif line == "/help":
            print(HELP, file=sys.stderr)
        elif line.startswith("/"):
            print(f"unknown command {line.split()[0]!r}. {HELP}", file=sys.stderr)
        elif line:
            turn = [*messages, {"role": "user", "content": line}]
            started = time.perf_counter()
            try:
                reply, text = _reply(config, target, generator, memory, turn, len(done))
            except SpectrainError as error:
                # The turn is taken back; the conversation can go on.
                print(f"{error}; or /reset", file=sys.stderr)
                continue
            seconds.append(time.perf_counter() - started)
            done.append(reply)
            messages = [*turn, {"role": "assistant", "content": text}]
    return {"replies": len(done), **(summary(done, seconds, None) if done else {})}


def render(report: dict[str, Any]) -> str:
    if not report["replies"]:
        return "no reply was asked for"
    tau = "" if report["tau"] is None else f", τ {report['tau']:.2f}"
    return (
        f"{report['replies']} replies, {report['tokens']} tokens, "
        f"{report['tokens_per_second']:.1f} tokens/s{tau}"
    )


def _reply(
    config: ChatConfig,
    target: Target,
    generator: Generator,
    memory: Memory,
    messages: list[dict[str, str]],
    number: int,
) -> tuple[Completion, str]:
    """Print the target's reply while it grows."""
    prompt = ids_of(target, Conversation("chat", "chat", tuple(messages)))
    stops = (*target.stop_ids, *config.stop_ids)
    growing, reply = Growing(target.tokenizer.decode, stops, config.stop), Completion()
    asked = config.sampling(), None, [number], memory
    work = generator.stream([prompt], config.max_new_tokens, *asked)
    try:
        for state in work:
            reply = state.completion
            print(growing.more(reply), end="", flush=True)
    except KeyboardInterrupt:
        reply.finish = "interrupted"
        print(growing.more(reply), end="")
    print()
    if reply.finish == "length":
        print(f"[cut after {len(reply.tokens)} tokens]", file=sys.stderr)
    return reply, text_of(reply, target.tokenizer.decode, stops)


def _stats(done: list[Completion], seconds: list[float]) -> str:
    if not done:
        return "no reply yet"
    return render({"replies": 1, **summary(done, seconds, None)})


def _typed(ask: Callable[[str], str] = input) -> Iterator[str]:
    """Lines from the terminal, or from a pipe, until the input ends."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # editing and history, where the platform has it
            import readline  # noqa: F401
    while True:
        try:
            yield ask("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return

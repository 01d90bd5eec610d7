"""Replies from a server that speaks the OpenAI chat API (vLLM, SGLang, llama.cpp …), a Backend.

At most `concurrency` questions are asked at a time, over all units; the units are read as they are
needed and handed over as soon as they are whole. Everything that draws a reply is sent with every
question, and its seed follows from the question's key: a rerun asks the same.
What the server read is compared with what the target would read, see `chat_api.check_prompt`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from spectrain.core.config import nearest
from spectrain.core.errors import SpectrainError
from spectrain.core.progress import say
from spectrain.data.chat_api import (
    NEUTRAL,
    REFUSALS,
    RESERVED,
    TELL_IDS,
    check_prompt,
    explain,
    messages_of,
    name_of,
    reply_of,
    tools_of,
)
from spectrain.data.finishes import REFUSED
from spectrain.data.questions import Question, Reply, Unit

CONNECT_SECONDS = 15.0


@dataclass
class Server:
    """A model behind an OpenAI-compatible API.

    url: of the API, `http://host:8000/v1` · model: its name there
    target: fingerprint of the target that it should be; the server itself only tells a name
    top_p, max_new_tokens, seed: of the replies · extra: further fields of each request, which win
    over `chat_api.NEUTRAL`; None leaves a field out
    concurrency: questions asked at a time · retries: of a question, each after a longer wait, when
    the server is busy, fails or is out of reach · timeout: seconds that one answer may take
    api_key: default OPENAI_API_KEY of the environment · check_prompts: refuse to go on where the
    server reads another prompt than the target
    facts: what was asked in this run: replies, prompt_tokens and completion_tokens as the server
    counts them (its count of a reply differs from the target's by the end-of-turn token at most,
    or its tokenizer is another); refused
    """

    url: str
    model: str
    _: KW_ONLY
    target: str
    max_new_tokens: int
    top_p: float
    seed: int
    concurrency: int = 16
    retries: int = 5
    timeout: float = 600
    api_key: str | None = field(default=None, repr=False)
    check_prompts: bool = True
    extra: dict = field(default_factory=dict)
    facts: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    _met: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self.api_key = self.api_key or os.environ.get("OPENAI_API_KEY")
        if not _is_address(self.url):
            raise SpectrainError(
                f"{self.url!r} is no address of a server", fix="give http://host:port/v1"
            )
        if self.concurrency < 1:
            raise SpectrainError(f"{self.concurrency} questions at a time", where="concurrency")
        if taken := sorted(set(self.extra) & set(RESERVED)):
            raise SpectrainError(
                f"{', '.join(taken)} cannot be set there", where="extra", fix="use its own setting"
            )

    @property
    def identity(self) -> str:
        """All that shapes the replies besides the questions. The address does not: the same model
        elsewhere goes on."""
        sampling = [self.max_new_tokens, self.top_p, self.seed, NEUTRAL | self.extra]
        return f"server/{json.dumps([self.target, self.model, *sampling], sort_keys=True)}"

    def answer(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, list[Reply]]]:
        """Finished units, in any order. Where there is one, the model's name and the first prompt
        are checked before anything is asked in earnest.

        Raises SpectrainError where the request, the key or the model is wrong or the server reads
        other prompts; RunFailed where it goes on failing. Units finished by then were handed over.
        A single question that the server refuses has a reply without a text that says so.
        """
        units = iter(units)
        if (first := next(units, None)) is None:
            return
        openai = _openai()
        with asyncio.Runner() as runner:
            client = self._client(openai)
            try:
                if not self._met:
                    runner.run(self._meet(openai, client, first))
                    self._met = True
                yield from self._answer(runner, openai, client, chain([first], units))
            finally:
                runner.run(_hang_up(client))

    def _answer(
        self, runner: asyncio.Runner, openai: ModuleType, client: Any, units: Iterable[Unit]
    ) -> Iterator[tuple[Unit, list[Reply]]]:
        waiting = (
            (part, number)
            for part in map(_Part, units)
            for number in range(len(part.unit.questions))
        )
        asked: dict[asyncio.Task, tuple[_Part, int]] = {}

        async def some() -> set[asyncio.Task]:
            while len(asked) < self.concurrency and (item := next(waiting, None)):
                part, number = item
                question = part.unit.questions[number]
                ask = self._ask(openai, client, question)
                asked[asyncio.create_task(ask)] = item
            if not asked:
                return set()
            return (await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED))[0]

        while done := runner.run(some()):
            failures = []
            for task in done:
                part, number = asked.pop(task)
                if error := task.exception():
                    failures.append(error)
                    continue
                part.replies[number] = task.result()
                if len(part.replies) == len(part.unit.questions):
                    yield part.unit, [part.replies[place] for place in sorted(part.replies)]
            if failures:
                raise failures[0]

    async def _meet(self, openai: ModuleType, client: Any, unit: Unit) -> None:
        """Raise SpectrainError unless the server has the model and reads the first prompt right."""
        try:
            listed = (await client.models.list()).data
            names = [model.id for model in listed]
        except openai.APIStatusError as error:
            if error.status_code not in (404, 405, 501):  # a server may have no list
                raise self._explained(error) from None
            names = []
        except openai.OpenAIError as error:
            raise self._explained(error) from None
        except (AttributeError, TypeError, ValueError):  # not the list that the API promises
            names = []
        if names and self.model not in names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            raise SpectrainError(
                f"the server has no model {self.model!r}{nearest(self.model, names)}",
                where=self._shown_url,
                fix=f"it has: {', '.join(names[:10])}{more}; name one with --set server.model=…",
            )
        await self._ask(openai, client, unit.questions[0], trial=True)

    async def _ask(
        self,
        openai: ModuleType,
        client: Any,
        question: Question,
        trial: bool = False,
    ) -> Reply:
        """One question; a trial asks for one token and is not counted."""
        more = {"tools": tools} if (tools := tools_of(question)) else {}
        body = NEUTRAL | TELL_IDS | self.extra
        try:
            answer = await client.chat.completions.create(
                model=self.model,
                messages=messages_of(question),
                temperature=question.temperature,
                top_p=self.top_p,
                max_tokens=1 if trial else self.max_new_tokens,
                seed=question.seed,
                extra_body={key: value for key, value in body.items() if value is not None},
                **more,
            )
            return self._reply(answer, question, trial)
        except SpectrainError as error:
            raise self._placed(error, question) from None
        except (openai.OpenAIError, ValueError) as error:
            explained = self._explained(error, question)
            if trial or getattr(error, "status_code", None) not in REFUSALS:
                raise explained from None
            if not self.facts["refused"]:  # what the server says is worth a line, once
                say(f"{explained.where}: {explained.what}; such prompts are left out and counted")
            self.facts["refused"] += 1
            return Reply("", REFUSED, None)

    def _reply(self, answer: Any, question: Question, trial: bool) -> Reply:
        try:
            whole = answer.to_dict(warnings=False)
            reply = reply_of(whole, question)
        except (AttributeError, TypeError, KeyError, IndexError):
            raise ValueError(str(answer) or "empty") from None
        if self.check_prompts:
            check_prompt(whole, question)
        if not trial:
            usage = whole.get("usage") or {}
            self.facts["replies"] += 1
            for name in ("prompt_tokens", "completion_tokens"):
                self.facts[name] += usage.get(name) or 0
        return reply

    def _explained(self, error: Exception, question: Question | None = None) -> SpectrainError:
        return self._placed(explain(error, self.retries, self.timeout), question)

    def _placed(self, error: SpectrainError, question: Question | None) -> SpectrainError:
        """The same error with the address and the question; a key is not repeated."""
        where = self._shown_url + (f", {name_of(question)}" if question else "")
        what = error.what.replace(self.api_key, "…") if self.api_key else error.what
        return type(error)(what, where=where, fix=error.fix)

    @property
    def _shown_url(self) -> str:
        """The address without a password that may be in it."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def _client(self, openai: ModuleType) -> Any:
        return openai.AsyncOpenAI(
            base_url=self.url,
            # a server of one's own wants none, the client insists on one
            api_key=self.api_key or "none",
            timeout=openai.Timeout(self.timeout, connect=min(self.timeout, CONNECT_SECONDS)),
            max_retries=self.retries,
        )


class _Part:
    """A unit and the replies that it has so far, by number."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.replies = unit, {}


async def _hang_up(client: Any) -> None:
    """Drop what is still being asked (the server stops working at it) and every connection."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        return bool(known) and url.isprintable()
    except ValueError:  # of the port
        return False


def _openai() -> ModuleType:
    try:
        import openai
    except ImportError:
        raise SpectrainError(
            "a server is asked through the openai client, which is not installed",
            fix="pip install 'spectrain[server]'",
        ) from None
    return openai

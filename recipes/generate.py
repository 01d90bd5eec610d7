"""`spectrain generate`: replies by the target, with a head in front or without; and the comparison.

With `compare` the same prompts are decoded three ways in one run, prompt by prompt in turn:
with the head, by the same engine without it, and by `transformers` itself.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.core.progress import main_process, progress
from spectrain.core.target import Target
from spectrain.data.conversations import Conversation
from spectrain.data.fates import Fates
from spectrain.data.reading import read_conversations
from spectrain.data.tokenise import Refused, prompt_ids, require_template
from spectrain.evaluation.race import of_generator, race, speedup, stock, summary
from spectrain.generator.completion import Completion
from spectrain.generator.speculate import Clock, Generator
from spectrain.generator.text import Growing, text_of
from spectrain.heads.base import DraftHead
from spectrain.recipes.drafting import DraftingConfig, SamplingConfig
from spectrain.recipes.generate_report import DEFINITIONS, render
from spectrain.recipes.reply_file import ReplyFile

__all__ = ["GenerateConfig", "ids_of", "render", "run"]


PLAIN = "spectrain-plain"
# Settings that change no reply; `drawn` in the identity speaks for the ways to draft.
_NO_MATTER = {
    *("out", "rows", "stats", "limit", "prompts", "compare", "overwrite", "on_bad_row"),
    *("draft_tokens", "tree", "tree_top_k", "tree_depth", "tree_nodes", "lookup", "proposal"),
}


class GenerateConfig(SamplingConfig, DraftingConfig):
    """What `spectrain generate` is told."""

    prompts: Path | None = Field(None, description="JSONL of prompts; last replies are left out")
    prompt: str | None = Field(None, description="one prompt as text")
    limit: int | None = Field(None, ge=1, description="only the first so many prompts of the file")
    out: Path | None = Field(None, description="folder for replies.jsonl")
    rows: int = Field(1, ge=1, description="prompts decoded at the same time")
    stats: bool = Field(False, description="also show acceptance by depth and time by stage")
    compare: bool = Field(False, description="also decode without the head, and compare")
    on_bad_row: Literal["stop", "skip"] = Field("stop", description="at a line that is no prompt")
    overwrite: bool = Field(False, description="replace finished replies in `out`")

    @model_validator(mode="after")
    def _one_source(self) -> GenerateConfig:
        if (self.prompts is None) == (self.prompt is None):
            raise ValueError("give either --prompts FILE or --prompt TEXT")
        if self.compare and self.head is None and self.lookup is None:
            raise ValueError("--compare needs a --head or --lookup to compare with plain decoding")
        if self.compare and self.rows > 1:
            raise ValueError("--compare decodes one prompt at a time: leave out --rows")
        return self


def run(config: GenerateConfig) -> dict[str, Any]:
    """Decode and return the report; with `out` the replies are written there as JSONL.

    A single prompt's reply is printed while it grows.
    """
    conversations = _conversations(config)
    target, head = config.load()
    require_template(target.tokenizer)
    conversations, prompts = _usable(config, target, conversations)
    way = config.way(target, head, min(config.rows, len(prompts)))
    generator = config.generator(target, head, way)
    name = PLAIN if not config.compare else "planned"
    if generator.gamma:
        name = head.family if head else "prompt-lookup"
    file = None
    if config.out:
        identity = {
            "target": target.fingerprint,
            "dtype": str(target.dtype),
            # Drawn children depend on how it is drafted; how many rows changes no reply.
            "drawn": str(way) if generator.drawn and config.temperature else None,
            **config.model_dump(mode="json", exclude=_NO_MATTER),
        }
        file = ReplyFile(config.out, identity, prompts, config.overwrite)

    if config.compare:
        methods = _race(config, target, head, generator, name, prompts)
        done = methods[name]["done"]
        if file:
            for index, completion in enumerate(done):
                file.add(index, completion)
        report = {"methods": {key: value["summary"] for key, value in methods.items()}}
        report |= _comparison(methods, name, config.seed, config.temperature == 0, config.quantize)
    else:
        done, new, seconds, clock = _decode(config, target, generator, prompts, file)
        report = {"methods": {name: summary(new, [seconds], clock)}}
    stops = (*target.stop_ids, *config.stop_ids)
    texts = [text_of(completion, target.tokenizer.decode, stops) for completion in done]
    shape = way.options.get("tree")
    report |= {
        "target": target.name,
        "quantisation": target.quantisation,
        "head": str(config.head) if config.head else None,
        "prompts": len(prompts),
        "rows": config.rows,
        "temperature": config.temperature,
        "max_new_tokens": config.max_new_tokens,
        "way": str(way),
        "promised": way.promised,
        "draft_tokens": way.options.get("draft_tokens"),
        "tree": None if shape is None else shape.model_dump(mode="json"),
        "lookup": config.lookup,
        "rule": config.rule(generator),
        "lossy": config.typical and config.temperature > 0,
        "stats": config.stats,
        "not_compared": "replies are sampled: ids differ by nature, transformers is asked greedily"
        if config.compare and config.temperature
        else None,
        "beyond_the_draft": {
            "positions": head.positions,
            "prompts": sum(
                len(prompt) + len(completion.tokens) > head.positions
                for prompt, completion in zip(prompts, done, strict=True)
            ),
        }
        if head is not None and head.positions
        else None,
        "cut_by_context": sum(
            len(prompt) + config.max_new_tokens > target.max_length for prompt in prompts
        ),
        "definitions": DEFINITIONS,
    }
    if file:
        file.finish(conversations, texts, config.temperature)
        report["replies"] = str(file.path)
    if config.prompt is not None:
        report |= {"text": texts[0], "stopped_by": done[0].stopped_by or None}
        report |= {"shown": not config.compare and main_process()}
    return report


def _decode(
    config: GenerateConfig,
    target: Target,
    generator: Generator,
    prompts: list[Tensor],
    file: ReplyFile | None,
) -> tuple[list[Completion], list[Completion], float, Clock]:
    """Replies to all prompts, `rows` at a time, and those of them made now: what the file has is
    not made again."""
    done = dict(file.done) if file else {}
    left = [index for index in range(len(prompts)) if index not in done]
    if done:
        print(f"going on: {len(done)} of {len(prompts)} replies are there", file=sys.stderr)
    live = None
    if config.prompt is not None and main_process():
        stops = (*target.stop_ids, *config.stop_ids)
        live = Growing(target.tokenizer.decode, stops, config.stop)
    started = time.perf_counter()
    work = generator.stream(
        [prompts[index] for index in left],
        config.max_new_tokens,
        config.sampling(),
        config.rows,
        left,
    )
    with nullcontext() if live else progress(len(prompts), "generate", "replies", len(done)) as bar:
        for state in work:
            if live:
                print(live.more(state.completion), end="", flush=True)
            if state.completion.finish:
                done[left[state.index]] = state.completion
                if file:
                    file.add(left[state.index], state.completion)
                if bar:
                    bar.update(1)
    if live:
        print()
    seconds = time.perf_counter() - started
    everything = [done[index] for index in range(len(prompts))]
    return everything, [done[index] for index in left], seconds, generator.clock


def _race(
    config: GenerateConfig,
    target: Target,
    head: DraftHead | None,
    generator: Generator,
    name: str,
    prompts: list[Tensor],
) -> dict[str, dict[str, Any]]:
    """The chosen way, plain decoding and `transformers`, prompt by prompt in turn."""
    sampling, longest = config.sampling(), config.max_new_tokens
    generators = {name: generator, PLAIN: Generator(target)}
    clocks = {key: Clock() for key in generators}
    methods = {
        key: of_generator(own, longest, sampling, clocks[key]) for key, own in generators.items()
    }
    # What the library cannot be asked the same way is not compared with it.
    alike = not (config.stop or config.stop_ids or config.suppress or config.min_new_tokens)
    if sampling.greedy and longest and alike and config.repetition_penalty == 1:
        methods["transformers"] = stock(target, longest)
    results = race(methods, prompts, clocks)
    for key, result in results.items():
        result["summary"] = summary(result["done"], result["seconds"], clocks.get(key))
    return results


def _comparison(
    results: dict[str, dict[str, Any]], own: str, seed: int, greedy: bool, quantised: str | None
) -> dict[str, Any]:
    """Speed of the chosen way over each other, and in how many prompts the ids agree (sampled
    replies differ by nature: they are compared in speed only)."""
    others = [name for name in results if name != own]
    return {
        "speedup": [
            {"baseline": name, "method": own, **speedup(results[own], results[name], seed)}
            for name in others
        ],
        "identical": {
            name: sum(
                mine.tokens == theirs.tokens
                for mine, theirs in zip(results[own]["done"], results[name]["done"], strict=True)
            )
            # The library runs the target as it was before it was quantised.
            for name in (others if greedy else ())
            if not (quantised and name == "transformers")
        },
    }


def _conversations(config: GenerateConfig) -> list[Conversation]:
    if config.prompt is not None:
        messages = ({"role": "user", "content": config.prompt},)
        return [Conversation("prompt", "prompt", messages)]
    fates = Fates()
    found = read_conversations(config.prompts, "last", config.on_bad_row, fates, keep_order=True)
    if fates:
        dropped = ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
        print(f"left out: {dropped}", file=sys.stderr)
    if not found:
        raise SpectrainError("no prompt is left", where=str(config.prompts))
    return found[: config.limit]


def _usable(
    config: GenerateConfig, target: Target, conversations: list[Conversation]
) -> tuple[list[Conversation], list[Tensor]]:
    """The prompts that the target can answer, and their ids; others stop the run or are left out,
    as bad rows are."""
    kept, prompts = [], []
    for conversation in conversations:
        try:
            prompts.append(ids_of(target, conversation))
            kept.append(conversation)
        except SpectrainError as error:
            if config.on_bad_row == "stop" or config.prompt is not None:
                raise
            print(f"left out: {error}", file=sys.stderr)
    if not kept:
        raise SpectrainError("no prompt is left", where=str(config.prompts))
    return kept, prompts


def ids_of(target: Target, conversation: Conversation) -> Tensor:
    """The prompt's ids; SpectrainError for one that cannot be used."""
    try:
        return torch.tensor(prompt_ids(target.tokenizer, conversation, target.max_length))
    except Refused as refused:
        text = str(conversation.messages[-1]["content"])[:40]
        raise SpectrainError(
            f"prompt {text!r} cannot be used: {refused.reason} (the target reads "
            f"{target.max_length} tokens)",
            fix="mend or leave out the prompt",
        ) from None

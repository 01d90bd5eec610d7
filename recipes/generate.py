"""`spectrain generate`: replies by the target, with a head in front or without; and the comparison.

With `compare` the same prompts are decoded three ways in one run, prompt by prompt in turn:
with the head, by the same engine without it, and by `transformers` itself.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from spectrain.core.config import Config
from spectrain.core.errors import SpectrainError
from spectrain.core.files import atomic_write
from spectrain.core.packing import pack
from spectrain.core.show import WIDTH
from spectrain.core.target import Target
from spectrain.data.conversations import Conversation, read_conversations
from spectrain.data.tokenise import Refused, prompt_ids, require_template
from spectrain.evaluation.bootstrap import FEWEST
from spectrain.evaluation.race import of_generator, race, speedup, stock, summary
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Clock, Generator
from spectrain.generator.tree import shape_for
from spectrain.heads.base import DraftHead
from spectrain.heads.io import load_head

REPLIES = "replies.jsonl"
DRAFT_TOKENS = 3
DEFINITIONS = {
    "tau": "tokens committed per target forward, the target's own included; the prefill's first "
    "token and everything after a stop token excluded",
    "spectrain-plain": "this engine without a head, same kernels and cache",
    "transformers": "the library's own generate(), dynamic cache, not compiled",
}


class GenerateConfig(Config):
    """What `spectrain generate` is told."""

    target: str = Field("smollm2-135m", description="target: embedded name, folder or hub id")
    head: Path | None = Field(None, description="folder of the trained head; none: plain decoding")
    prompts: Path | None = Field(None, description="JSONL of prompts; last replies are left out")
    prompt: str | None = Field(None, description="one prompt as text")
    limit: int | None = Field(None, ge=1, description="only the first so many prompts of the file")
    out: Path | None = Field(None, description="folder for replies.jsonl")
    max_new_tokens: int = Field(128, ge=0, description="longest reply in tokens")
    draft_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens drafted per step; how many pay depends on the acceptance; default: 3, "
        "or as many as the head can",
    )
    tree: Literal["chain", "grown"] | None = Field(
        None,
        description="how to draft: a chain, or a tree grown from the head's probabilities; "
        "default: grown for a head that names a tree, unless draft_tokens is given; else chain",
    )
    tree_top_k: int | None = Field(
        None, ge=1, description="nodes of a grown tree expanded at each depth, children of each; "
        "default of the three: the head's own tree, else 4, the steps it learnt, 16"
    )  # fmt: skip
    tree_depth: int | None = Field(None, ge=1, le=16, description="levels of a grown tree")
    tree_nodes: int | None = Field(
        None, ge=1, description="most probable nodes of a grown tree, which the target reads"
    )
    temperature: float = Field(0.0, ge=0, description="0: greedy")
    top_k: int = Field(0, ge=0, description="only the k most likely tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; 1: everything")
    seed: int = Field(0, ge=0, description="of everything random")
    compare: bool = Field(False, description="also decode without the head, and compare")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number type of target and head; auto: float32 on a CPU"
    )
    on_bad_row: Literal["stop", "skip"] = Field("stop", description="at a line that is no prompt")

    @model_validator(mode="after")
    def _one_source(self) -> GenerateConfig:
        if (self.prompts is None) == (self.prompt is None):
            raise ValueError("give either --prompts FILE or --prompt TEXT")
        if self.compare and self.head is None:
            raise ValueError("--compare needs a --head to compare with plain decoding")
        return self

    @model_validator(mode="after")
    def _one_way_to_draft(self) -> GenerateConfig:
        if self.tree == "grown" and self.draft_tokens is not None:
            raise ValueError("--draft-tokens is of a chain, not of --tree grown")
        given = [name for name, value in self.tree_shape.items() if value is not None]
        if given and (self.tree == "chain" or self.draft_tokens is not None):
            raise ValueError(f"tree_{given[0]} is of a grown tree, not of a chain")
        if self.head is None and (given or self.tree == "grown"):
            raise ValueError("a grown tree needs a --head")
        return self

    @property
    def tree_shape(self) -> dict[str, int | None]:
        """What is asked of a grown tree."""
        return {"top_k": self.tree_top_k, "depth": self.tree_depth, "nodes": self.tree_nodes}

    def drafting(self, head: DraftHead) -> dict[str, Any]:
        """How to draft with this head: `Generator`'s draft_tokens or tree."""
        asked = any(self.tree_shape.values())
        default = self.draft_tokens is None and (asked or head.tree is not None)
        if self.tree == "grown" or (self.tree is None and default):
            return {"tree": shape_for(head, **self.tree_shape)}
        return {"draft_tokens": self.draft_tokens or min(DRAFT_TOKENS, head.longest_draft)}


def run(config: GenerateConfig) -> dict[str, Any]:
    """Decode and return the report; with `out` the replies are written there as JSONL."""
    head = load_head(config.head) if config.head else None
    conversations = _conversations(config)
    target = Target.load(config.target, dtype=config.dtype)
    require_template(target.tokenizer)
    prompts = [_ids(target, c) for c in conversations]
    sampling = Sampling(config.temperature, config.top_k, config.top_p, config.seed)

    clocks: dict[str, Clock] = {}
    methods = {}

    def add(name: str, own: DraftHead | None, **drafting: Any) -> None:
        clocks[name] = Clock()
        generator = Generator(target, own, **drafting)
        methods[name] = of_generator(generator, config.max_new_tokens, sampling, clocks[name])

    drafting: dict[str, Any] = {}
    if head is not None:
        head.check_target(target, str(config.head))
        head.bind(target.readout).to(target.device, target.dtype)
        pack(head)
        drafting = config.drafting(head)
        add(head.family, head, **drafting)
    if head is None or config.compare:
        add("spectrain-plain", None)
    if config.compare and sampling.greedy and config.max_new_tokens:  # the library refuses 0
        methods["transformers"] = stock(target, config.max_new_tokens)

    results = race(methods, prompts, clocks)
    own = next(iter(methods))
    report = {
        "target": target.name,
        "head": str(config.head) if config.head else None,
        "prompts": len(prompts),
        "temperature": config.temperature,
        "max_new_tokens": config.max_new_tokens,
        "draft_tokens": drafting.get("draft_tokens"),
        "tree": drafting["tree"].model_dump() if "tree" in drafting else None,
        "rule": _rule(sampling, "tree" in drafting) if head else None,
        "methods": {
            name: summary(result["done"], result["seconds"], clocks.get(name))
            for name, result in results.items()
        },
        "cut_by_context": sum(
            len(prompt) + config.max_new_tokens > target.max_length for prompt in prompts
        ),
        "definitions": DEFINITIONS,
    }
    if config.compare:
        report |= _comparison(results, own, config.seed, sampling.greedy)
    replies = [
        {"tokens": done.tokens, "text": target.tokenizer.decode(_shown(done.tokens, target)),
         "finish": done.finish}
        for done in results[own]["done"]
    ]  # fmt: skip
    if config.out:
        lines = [
            json.dumps(
                {
                    "messages": [
                        *conversation.messages,
                        {"role": "assistant", "content": reply["text"]},
                    ],
                    "domain": conversation.domain,
                    "temperature": config.temperature,
                    "finish_reason": reply["finish"],
                },
                ensure_ascii=False,
            )
            for conversation, reply in zip(conversations, replies, strict=True)
        ]
        config.out.mkdir(parents=True, exist_ok=True)
        atomic_write(config.out / REPLIES, "\n".join(lines) + "\n")
        report["replies"] = str(config.out / REPLIES)
    if config.prompt is not None:
        report["text"] = replies[0]["text"]
    return report


def render(report: dict[str, Any]) -> str:
    """What a person reads: the reply, or the table of the methods."""
    lines = []
    if "text" in report:
        lines += [report["text"], ""]
    lines.append(
        f"{report['prompts']} prompts, at most {report['max_new_tokens']} new tokens, "
        f"temperature {report['temperature']:g}, {_drafted(report)}"
    )
    lines.append(
        f"{'':<18}{'tokens':>8}{'tokens/s':>10}{'tau':>7}{'draft':>8}{'verify':>8}{'rest':>7}"
    )
    for name, method in report["methods"].items():
        row = f"{name:<18}{method['tokens']:>8}{method['tokens_per_second']:>10.1f}"
        row += f"{method['tau']:>7.2f}" if method["tau"] is not None else f"{'–':>7}"
        if "stages" in method:
            stages = method["stages"]
            row += f"{stages['draft']:>8.0%}{stages['verify']:>8.0%}{stages['overhead']:>7.1%}"
        lines.append(row)
    if report["cut_by_context"]:
        lines.append(f"cut short by the target's context: {report['cut_by_context']} prompts")
    for against in report.get("speedup", ()):
        if against["value"] is not None:
            low, high = against["low"], against["high"]
            between = "" if low is None else f" ({low:.2f}–{high:.2f})"
            lines.append(
                f"speed {against['value']:.2f} × {against['baseline']}{between}{_verdict(against)}"
            )
    for name, count in report.get("identical", {}).items():
        lines.append(f"the same tokens as {name}: {count} of {report['prompts']} prompts")
    lines.append("")
    for name, text in report["definitions"].items():
        if name == "tau" or name in report["methods"]:
            lines += textwrap.wrap(f"{name}: {text}", WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _drafted(report: dict[str, Any]) -> str:
    if report["tree"] is None:
        return f"{report['draft_tokens'] or 0} drafted a step"
    return "grown tree: top {top_k}, depth {depth}, {nodes} nodes".format(**report["tree"])


def _rule(sampling: Sampling, tree: bool) -> str:
    """The acceptance rule, in the words that measured numbers are named with."""
    if sampling.greedy:
        return "greedy"
    return "sampling, top-k children" if tree else "sampling, drawn chain"


def _comparison(
    results: dict[str, dict[str, list]], own: str, seed: int, greedy: bool
) -> dict[str, Any]:
    """Speed of the head's method over each other, and in how many prompts the ids agree (sampled
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
            for name in (others if greedy else ())
        },
    }


def _verdict(ratio: dict[str, float | None]) -> str:
    """What the interval of a speedup allows to say."""
    if ratio["low"] is None:
        return f", too few prompts for an interval ({FEWEST} are needed)"
    if ratio["high"] < 1:
        return ", SLOWER: train the head further, or draft fewer tokens"
    return ", no difference shown: try more prompts" if ratio["low"] < 1 else ""


def _conversations(config: GenerateConfig) -> list[Conversation]:
    if config.prompt is not None:
        messages = ({"role": "user", "content": config.prompt},)
        return [Conversation("prompt", "prompt", messages)]
    return read_conversations(config.prompts, True, config.on_bad_row, keep_order=True)[
        : config.limit
    ]


def _ids(target: Target, conversation: Conversation) -> Tensor:
    try:
        return torch.tensor(prompt_ids(target.tokenizer, conversation, target.max_length))
    except Refused as refused:
        text = str(conversation.messages[-1]["content"])[:40]
        raise SpectrainError(
            f"prompt {text!r} cannot be used: {refused.reason}", fix="mend or leave out the prompt"
        ) from None


def _shown(tokens: list[int], target: Target) -> list[int]:
    """Without the stop token, which is no part of the text."""
    return tokens[:-1] if tokens and tokens[-1] in target.stop_ids else tokens

"""`spectrain check`: is drafting lossless, here, with this target, this head and these settings?

Four parts (evaluation/lossless.py): the same tokens as `transformers` at temperature 0, the same
tokens as plain decoding from the same seed, the exact distribution of sampled replies on a made-up
target, and that of the real one.
"""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from spectrain.core.pretrained import library_model
from spectrain.core.show import WIDTH
from spectrain.data.reading import read_conversations
from spectrain.data.tokenise import require_template
from spectrain.evaluation import lossless
from spectrain.generator.sampling import Sampling
from spectrain.recipes.drafting import DraftingConfig
from spectrain.recipes.generate import ids_of
from spectrain.recipes.prepare import SHIPPED_PROMPTS

DEFINITIONS = {
    "greedy": "replies at temperature 0 against generate() of transformers, token by token up to "
    "the first difference. float32: none is allowed. Otherwise one is tolerated where both tokens' "
    "logits, by the library, are within twice the spacing of the type's numbers of the largest "
    "(share of the largest logit: bfloat16 0.016, float16 0.002)",
    "seeds": "sampled replies with top-k proposals against plain decoding with the same seed. "
    "float32: a difference is tolerated where the number drawn is within 0.0001 of the edge "
    "between two tokens; other types: shown, not judged",
    "self-test": "engine alone: whole replies of 3 tokens of a made-up target of 6, every rule, "
    "tree and kind of proposal, against their exact probabilities; chi-square, Bonferroni",
    "sampling": "replies of 3 tokens to several contexts (ends of prompts, the least decided), "
    "the first token the likeliest: the others, given those before them, against the library's own "
    "probabilities; chi-squares added up. Later tokens than the third are compared by seed alone",
    "odds": "that a part that draws at random fails although nothing is wrong: 1 in 10,000 by the "
    "chi-square; simulated up to 1 in 2,000 where draws are few and one token is likely",
    "sees": "total variation (share of the draws that would have to change) from the true "
    "distribution, in every context, that would have been noticed with odds of 90 %, if it is "
    "between tokens frequent enough not to be pooled (5 expected); within the pool nothing is seen",
}


class CheckConfig(DraftingConfig):
    """Settings of `check`."""

    prompts: Path = Field(
        SHIPPED_PROMPTS, description="JSONL of prompts; last replies are left out"
    )
    limit: int = Field(20, ge=1, description="only the first so many prompts of the file")
    rows: int = Field(1, ge=1, description="prompts decoded at the same time")
    max_new_tokens: int = Field(64, ge=1, description="longest reply in tokens")
    temperature: float = Field(0.7, ge=0, description="of what is sampled; 0: only greedy")
    top_k: int = Field(0, ge=0, description="only the k most likely tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; 1: everything")
    min_p: float = Field(
        0.0, ge=0, le=1, description="only tokens at least so probable as this times the likeliest"
    )
    seed: int = Field(0, ge=0, description="of everything random")
    contexts: int = Field(
        8, ge=1, description="prompts whose ends are continued by sampling, the least decided ones"
    )
    context_tokens: int = Field(
        12, ge=1, description="length of those ends: short, for each is read `replies` times"
    )
    replies: int = Field(300, ge=10, description="replies sampled to each context")
    self_test_replies: int = Field(6000, ge=100, description="replies in each case of it")

    @model_validator(mode="after")
    def _with_a_reference(self) -> CheckConfig:
        if self.quantize is not None:
            raise ValueError("quantize: transformers has no such target to compare with")
        return self

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, seed=self.seed, min_p=self.min_p)


def run(config: CheckConfig) -> dict[str, Any]:
    """Check and return the report; `failure` says what does not hold."""
    conversations = read_conversations(config.prompts, "last", "stop", keep_order=True)
    target, head = config.load()
    require_template(target.tokenizer)
    prompts = [ids_of(target, conversation) for conversation in conversations[: config.limit]]
    way = config.way(target, head, config.rows)
    generator = config.generator(target, head, way)
    model = library_model(target.name, target.dtype, target.device)
    sampling, size = config.sampling(), (config.max_new_tokens, config.rows)

    def seeds() -> dict[str, Any]:
        coupled = config.model_copy(update={"proposal": "top-k"}).generator(target, head, way)
        return lossless.seeds(coupled, model, prompts, *size, sampling)

    def sampled() -> dict[str, Any]:
        ends = [prompt[-config.context_tokens :] for prompt in prompts]
        chosen = lossless.undecided(model, ends, sampling, config.contexts)
        return lossless.sampling_real(generator, model, chosen, config.replies, sampling)

    todo = {"greedy": lambda: lossless.greedy(generator, model, prompts, *size)}
    if not sampling.greedy:
        todo["seeds"] = seeds
        todo["self-test"] = lambda: lossless.sampling_exact(
            config.self_test_replies, config.seed, generator.typical
        )
        todo["sampling"] = sampled
    parts = {}
    for name, part in todo.items():
        started = time.perf_counter()
        parts[name] = part() | {"seconds": round(time.perf_counter() - started, 1)}

    failed = [name for name, part in parts.items() if part["verdict"] == "fails"]
    return {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "head": str(config.head) if config.head else None,
        "drafting": str(way),
        "rule": config.rule(generator),
        "temperature": config.temperature,
        "prompts": len(prompts),
        "max_new_tokens": config.max_new_tokens,
        "rows": config.rows,
        "seed": config.seed,
        "holds": not failed,
        "failure": _failure(failed, config.typical),
        "parts": parts,
        "definitions": DEFINITIONS,
    }


def _failure(failed: list[str], typical: bool) -> str | None:
    """What a failed check says last."""
    if not failed:
        return None
    why = "typical acceptance is LOSSY by design" if typical else "the output is not the target's"
    return f"{', '.join(failed)}: does not hold; {why}"


def render(report: dict[str, Any]) -> str:
    """What a person reads: a line for each part, every difference, the verdict."""
    rule = f", {report['rule']}" if report["rule"] else ""
    lines = [
        f"{report['target']}, {report['dtype']}, head {report['head'] or 'none'}",
        f"{report['drafting']}{rule}; {report['rows']} rows, seed {report['seed']}",
        "",
        f"{'part':<11}{'verdict':<9}{'seconds':>7}  what was seen",
    ]
    for name, part in report["parts"].items():
        first, *rest = textwrap.wrap(_seen(part), WIDTH - 29)
        lines.append(f"{name:<11}{part['verdict']:<9}{part['seconds']:>7.1f}  {first}")
        lines += [" " * 29 + text for text in rest]
        if part["verdict"] != "shown":
            lines += [f"  {_difference(entry)}" for entry in part.get("differences", ())]
        lines += [f"  fails: {case}" for case in part.get("failed", ())]
    failure = report["failure"]
    untried = [name for name, part in report["parts"].items() if part["verdict"] == "untried"]
    verdict = f"LOSSY: {failure}" if failure else "LOSSLESS in all that was checked"
    if untried:
        verdict += f"; UNTRIED, no draft was accepted: {', '.join(untried)}"
    lines += ["", *textwrap.wrap(verdict, WIDTH), ""]
    for name, text in report["definitions"].items():
        lines += textwrap.wrap(f"{name}: {text}", WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _seen(part: dict[str, Any]) -> str:
    """The facts of a part in a sentence."""
    if "differences" in part:
        close = f" ({part['tolerated']} part where rounding decides)" if part["tolerated"] else ""
        return (
            f"{part['equal']} of {part['replies']} replies equal{close}; {part['tokens']:,} "
            f"tokens, {part['accepted']:.2f} drafts accepted a forward"
        )
    if "cases" in part:
        return (
            f"{len(part['cases'])} cases of {part['replies_each']:,} replies; smallest p "
            f"{part['smallest_p_value']:.2g} (fails below {part['level_each']:.1g}); "
            f"sees {_share(part['detectable'])}"
        )
    impossible = part["impossible_tokens"]
    return (
        f"{part['contexts']} contexts × {part['replies_each']} replies, "
        f"{part['accepted']:.2f} drafts accepted a forward, {part['tokens']:,} tokens after "
        f"{part['texts_continued']} texts; p {part['p_value']:.2g} (fails below "
        f"{part['false_alarm']:.1g}){f', {impossible} impossible tokens' if impossible else ''}; "
        f"sees {_share(part['detectable'])}"
    )


def _share(detectable: float | None) -> str:
    return "too few draws to say" if detectable is None else f"{detectable:.0%} off"


def _difference(entry: dict[str, Any]) -> str:
    text = (
        f"prompt {entry['prompt'] + 1}, new token {entry['position'] + 1}: "
        f"{_token(entry['ours'])}, not {_token(entry['theirs'])}"
    )
    if entry["margin"] is not None:
        text += f"; margin {entry['margin']:.2g}, bound {entry['bound']:.2g}"
    return text + (" (tolerated)" if entry["tolerated"] else "")


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)

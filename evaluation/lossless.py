"""The four parts of `spectrain check`: is what a generator says what its target says?

Each returns JSON-ready facts with a `verdict`: "holds", "fails" or "shown" (not to be judged).
n replies of a context, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.core.progress import progress
from spectrain.evaluation import toy
from spectrain.evaluation.identity import (
    DRAW_ROUNDING,
    ROUNDING,
    Difference,
    draw_margin,
    greedy_margin,
    next_logits,
    parted,
)
from spectrain.evaluation.proof import Fit, fit
from spectrain.evaluation.race import stock
from spectrain.evaluation.reference import library_warp
from spectrain.generator.completion import Completion
from spectrain.generator.randomness import OWN, row_key, uniform
from spectrain.generator.rules import Typical
from spectrain.generator.sampling import Sampling, pick
from spectrain.generator.speculate import Generator

FALSE_ALARM = 1e-4  # odds of a part that tests at random to fail where nothing is wrong
# New tokens of a reply whose frequencies are compared; a text before one of them is a case of its
# own if it has come at least so often.
REPLY, FEWEST = 3, 10


def greedy(
    generator: Generator, model: nn.Module, prompts: list[Tensor], new: int, rows: int
) -> dict[str, Any]:
    """Replies at temperature 0, `rows` prompts at a time, and the library's own."""
    target = generator.target
    done = generator.generate(prompts, new, rows=rows)
    decode, differences, compared = stock(target, new, model), [], 0
    with progress(len(prompts), "greedy", "replies") as bar:
        for index, (prompt, mine) in enumerate(zip(prompts, done, strict=True)):
            other = decode(prompt)
            found = parted(index, mine.tokens, other.tokens)
            compared += len(other.tokens) if found is None else found.position
            if found:
                differences.append(_greedy_measured(found, model, prompt, mine, target.dtype))
            bar.update(1)
    return _identity(generator, done, differences, compared)


def seeds(
    generator: Generator,
    model: nn.Module,
    prompts: list[Tensor],
    new: int,
    rows: int,
    sampling: Sampling,
) -> dict[str, Any]:
    """Sampled replies and plain decoding's with the same seed; for proposals that are the draft's
    likeliest tokens (generator.rules.Rules.choose). Judged in float32 alone: what other types'
    rounding does to probabilities decides too many draws."""
    target = generator.target
    done = generator.generate(prompts, new, sampling, rows)
    plain = Generator(target).generate(prompts, new, sampling, rows)
    differences, compared = [], 0
    for index, (mine, other) in enumerate(zip(done, plain, strict=True)):
        found = parted(index, mine.tokens, other.tokens)
        compared += len(other.tokens) if found is None else found.position
        if found:
            before = [*prompts[index].tolist(), *mine.tokens[: found.position]]
            differences.append(_draw_measured(found, model, before, sampling))
    result = _identity(generator, done, differences, compared)
    if target.dtype != torch.float32:
        result["verdict"] = "shown"
    return result


def sampling_exact(replies: int, seed: int, typical: Typical | None) -> dict[str, Any]:
    """The engine alone, on a made-up target, every rule, tree and proposal."""
    cases = toy.self_test(replies, seed, typical)
    level = FALSE_ALARM / len(cases)
    facts = [
        {
            "case": name,
            "p_value": case["fit"].p_value,
            "accepted": case["accepted"],
            "detectable": case["fit"].detectable(level),
            "verdict": _judged(case["fit"], level),
        }
        for name, case in cases.items()
    ]
    worst = min(facts, key=lambda case: case["p_value"])
    failed = [case["case"] for case in facts if case["verdict"] == "fails"]
    return {
        "verdict": "fails" if failed else "holds",
        "replies_each": replies,
        "false_alarm": FALSE_ALARM,
        "level_each": level,
        "smallest_p_value": worst["p_value"],
        "failed": failed,
        "detectable": max(case["detectable"] or 1.0 for case in facts),
        "cases": facts,
    }


def sampling_real(
    generator: Generator,
    model: nn.Module,
    contexts: Sequence[Tensor],
    count: int,
    sampling: Sampling,
) -> dict[str, Any]:
    """`count` replies to each context [n], as one batch, against the library's probabilities.

    No head has a part in a reply's first token. So that they all go on from the same text, those
    are sampled whose first token is the likeliest.
    """
    fits, done = [], []
    with progress(len(contexts), "sampling", "contexts") as bar:
        for index, context in enumerate(contexts):
            own = replace(sampling, seed=(sampling.seed << 16) + index)
            first = library_warp(next_logits(model, [context.tolist()]), own)[0]
            numbers = _drawing(int(first.argmax()), first, own.seed, count)
            replies = _replies(generator, context, own, numbers)
            fits += _fits(model, context.tolist(), [c.tokens for c in replies], own)
            done += replies
            bar.update(1)
    whole = Fit.together(fits)
    return {
        "verdict": _judged(whole, FALSE_ALARM, tried=_tried(generator, done)),
        "contexts": len(contexts),
        "replies_each": count,
        "texts_continued": sum(fit.mean > 0 for fit in fits),
        "tokens": whole.draws,
        "accepted": _accepted(done),
        "false_alarm": FALSE_ALARM,
        "p_value": whole.p_value,
        "statistic": whole.statistic,
        "degrees": whole.mean,
        "impossible_tokens": whole.impossible,
        "detectable": whole.detectable(FALSE_ALARM),
    }


def undecided(
    model: nn.Module, contexts: Sequence[Tensor], sampling: Sampling, count: int
) -> list[Tensor]:
    """The `count` of these contexts after whose likeliest first token the next one's largest
    probability is nearest to 1/2: where all is settled, or nothing likely, a wrong rule changes
    little. Nothing drawn has a part in the choice."""

    def distance(context: Tensor) -> float:
        text = context.tolist()
        for _ in range(2):
            p = library_warp(next_logits(model, [text]), sampling)[0]
            text.append(int(p.argmax()))
        return abs(float(p.max()) - 0.5)

    return sorted(contexts, key=distance)[:count]


def _drawing(token: int, p: Tensor, seed: int, count: int) -> list[int]:
    """Numbers of requests whose first draw from p [V] is this token. What they draw later is
    independent of it: a row's random numbers are."""
    numbers: list[int] = []
    start = 0
    while len(numbers) < count:
        tried = range(start, start := start + count)
        keys = torch.tensor([row_key(seed, number) for number in tried])
        drawn = pick(p.expand(count, -1), uniform(keys, OWN, torch.zeros_like(keys)))
        numbers += [
            number for number, one in zip(tried, drawn.tolist(), strict=True) if one == token
        ]
    return numbers[:count]


def _replies(
    generator: Generator, context: Tensor, sampling: Sampling, numbers: list[int]
) -> list[Completion]:
    """Replies of REPLY tokens to one context, by requests of these numbers."""
    work = generator.stream([context] * len(numbers), REPLY, sampling, numbers=numbers)
    return list({progress.index: progress.completion for progress in work}.values())


def _fits(
    model: nn.Module, context: list[int], replies: list[list[int]], sampling: Sampling
) -> list[Fit]:
    """A fit for each text that is often enough continued: the context and what was said so far.

    Given how often each text came, what follows it is independent draws from its probabilities.
    """
    fits = []
    for length in range(1, REPLY):
        followed = Counter(tuple(reply[:length]) for reply in replies if len(reply) > length)
        texts = [text for text, times in followed.items() if times >= FEWEST]
        if not texts:
            continue
        logits = next_logits(model, [[*context, *text] for text in texts])
        for text, p in zip(texts, library_warp(logits, sampling), strict=True):
            after = [r[length] for r in replies if len(r) > length and tuple(r[:length]) == text]
            fits.append(fit(torch.bincount(torch.tensor(after), minlength=len(p)), p))
    return fits


def _greedy_measured(
    found: Difference, model: nn.Module, prompt: Tensor, mine: Completion, dtype: torch.dtype
) -> Difference:
    if found.ours is None or found.theirs is None:
        return found
    before = [*prompt.tolist(), *mine.tokens[: found.position]]
    margin = greedy_margin(next_logits(model, [before])[0], found.ours, found.theirs)
    return replace(found, margin=margin, bound=ROUNDING[dtype])


def _draw_measured(
    found: Difference, model: nn.Module, before: list[int], sampling: Sampling
) -> Difference:
    if found.ours is None or found.theirs is None:
        return found
    p = library_warp(next_logits(model, [before]), sampling)[0]
    key = torch.tensor([row_key(sampling.seed, found.prompt)])
    drawn = float(uniform(key, OWN, torch.tensor([found.position])))
    margin = max(draw_margin(p, drawn, token) for token in (found.ours, found.theirs))
    return replace(found, margin=margin, bound=DRAW_ROUNDING)


def _identity(
    generator: Generator, done: list[Completion], differences: list[Difference], compared: int
) -> dict[str, Any]:
    tolerated = sum(difference.tolerated for difference in differences)
    same = "holds" if _tried(generator, done) and compared else "untried"
    return {
        "verdict": same if tolerated == len(differences) else "fails",
        "replies": len(done),
        "equal": len(done) - len(differences),
        "tolerated": tolerated,
        "tokens": compared,
        "accepted": _accepted(done),
        "differences": [asdict(d) | {"tolerated": d.tolerated} for d in differences],
    }


def _accepted(done: Sequence[Completion]) -> float:
    """Drafts accepted per forward: 0 would mean that acceptance was not tried at all."""
    forwards = sum(completion.forwards for completion in done)
    return sum(c.committed for c in done) / forwards - 1 if forwards else 0.0


def _tried(generator: Generator, done: Sequence[Completion]) -> bool:
    """Whether acceptance was tried at all: with nothing to draft there is nothing to try."""
    return not generator.gamma or _accepted(done) > 0


def _judged(result: Fit, level: float, tried: bool = True) -> str:
    """A part that nothing was seen of does not hold: it says so."""
    if result.p_value < level:
        return "fails"
    return "holds" if tried and result.draws else "untried"

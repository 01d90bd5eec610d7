"""The engine's self-test: whole replies of a made-up target against their exact probabilities.

Every rule, tree and kind of proposal, through the whole Generator. V = 6 tokens, L = 3 new ones:
the target draws each given the one before, so the V^L probabilities are products.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spectrain.core.batch import Features
from spectrain.core.cache import KVCache
from spectrain.evaluation.proof import fit
from spectrain.evaluation.reference import library_warp
from spectrain.generator.rules import Typical
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator
from spectrain.heads.base import Needs
from spectrain.heads.tree import TreeDefaults, TreeShape

VOCAB, LENGTH = 6, 3
# Its last token came before: prompt lookup has something to find, not always the right thing.
PROMPT = (3, 0, 3, 1, 3)
STATIC = TreeShape(paths=((0,), (1,), (0, 0), (0, 1), (1, 0)))
GROWN = TreeDefaults(top_k=2, depth=2, nodes=4)
# Name of a case → how the generator drafts.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lookup, chain": {"lookup": 2, "draft_tokens": 2},
    "top-k, chain": {"draft_tokens": 2, "proposal": "top-k"},
    "top-k, static tree": {"tree": STATIC, "proposal": "top-k"},
    "top-k, grown tree": {"tree": GROWN},
    "drawn, chain": {"draft_tokens": 2, "proposal": "drawn"},
    "drawn, static tree": {"tree": STATIC, "proposal": "drawn"},
}
WARPS = {
    "temperature 0.8, top-p 0.95, min-p 0.02": Sampling(0.8, top_p=0.95, min_p=0.02),
    "temperature 1, top-k 3": Sampling(1.0, top_k=3),
    "temperature 1.2, repetition penalty 1.5, one suppressed": Sampling(
        1.2, repetition_penalty=1.5, suppress=(5,)
    ),
}


class ToyTarget:
    """Logits of the next token: a row of a table, chosen by the last token."""

    device, stop_ids, max_length = torch.device("cpu"), (), 64
    vocab_size = readable = VOCAB

    def __init__(self, seed: int = 4) -> None:
        self.table = 1.2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))

    def new_cache(self, rows: int, slots: int) -> KVCache:
        return KVCache(rows, slots)

    def forward(self, tokens: Tensor, **_: Any) -> Features:
        return Features(torch.nn.functional.one_hot(tokens, VOCAB).float(), None)

    def logits(self, last: Tensor) -> Tensor:
        return last @ self.table


class ToyHead:
    """Knows the target's table roughly; it needs no state."""

    longest_draft, needs, tree = 16, Needs(), None
    config = SimpleNamespace(steps=2, draft_vocab_size=VOCAB, vocab_size=VOCAB)

    def __init__(self, target: ToyTarget, noise: float = 0.7) -> None:
        generator = torch.Generator().manual_seed(5)
        self.table = target.table + noise * torch.randn(VOCAB, VOCAB, generator=generator)

    def start(self, rows: int, slots: int) -> None:
        return None

    def adopt(self, *_: Any) -> None:
        pass

    def begin(self, state: None, tokens: Tensor, features: Features, counts: Tensor) -> Tensor:
        return self.table[tokens.gather(1, counts[:, None]).squeeze(1)]

    def extend(
        self, state: None, tokens: Tensor, features: Features, counts: Tensor, view: int = 0
    ) -> Tensor:
        return self.table[tokens.gather(1, (counts - 1).clamp(min=0)[:, None]).squeeze(1)]

    def expand(self, state: None, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.table[tokens]

    def to_target(self, ids: Tensor) -> Tensor:
        return ids

    def spread(self, probabilities: Tensor) -> Tensor:
        return probabilities


def self_test(replies: int, seed: int, typical: Typical | None = None) -> dict[str, dict[str, Any]]:
    """Case → {"fit": Fit, "accepted": drafts accepted per forward}, `replies` of each.

    typical: accept by this rule; without the ways that it does not concern, plain and drawn.
    """
    target = ToyTarget()
    head, result = ToyHead(target), {}
    ways = WAYS
    if typical:
        ways = {name: way for name, way in WAYS.items() if way and way.get("proposal") != "drawn"}
    cases = itertools.product(ways.items(), WARPS.items())
    for number, ((name, way), (warp, sampling)) in enumerate(cases):
        own = head if way and "lookup" not in way else None
        generator = Generator(target, own, **way, typical=typical)
        prompts = [torch.tensor(PROMPT)] * replies
        # A seed each: top-k and plain ways would draw the very same texts from one.
        own_seed = replace(sampling, seed=(seed << 8) + number)
        done = generator.generate(prompts, LENGTH, own_seed)
        tokens = torch.tensor([completion.tokens for completion in done])
        place = (tokens * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
        counts = torch.bincount(place, minlength=VOCAB**LENGTH)
        forwards = sum(completion.forwards for completion in done)
        accepted = sum(completion.committed - completion.forwards for completion in done)
        chances = exact(target.table, sampling)
        result[f"{name}, {warp}"] = {"fit": fit(counts, chances), "accepted": accepted / forwards}
    return result


def exact(table: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities of all replies, by the last token the fastest: [V^L] float64; text by text."""
    chances = torch.ones((), dtype=torch.float64)
    for length in range(LENGTH):
        rows = [
            following(table, [*PROMPT, *text], sampling)
            for text in itertools.product(range(VOCAB), repeat=length)
        ]
        chances = (chances.reshape(-1, 1) * torch.stack(rows).double()).flatten()
    return chances


def following(table: Tensor, text: list[int], sampling: Sampling) -> Tensor:
    """[V] probabilities of what comes next."""
    logits = table[text[-1]].clone()
    for token in set(text):
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    logits[list(sampling.suppress)] = float("-inf")
    return library_warp(logits[None], sampling)[0]

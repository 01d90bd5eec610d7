"""Decoding with and without a draft head: one loop for both.

Row b has read x[0 … t] (cache and features) and knows x[t+1], the token the target chose last::

    draft    γ guesses for x[t+2 …] from the head
    verify   the target reads [x[t+1], guesses] behind the prefix, one forward of γ+1 tokens
    accept   m guesses and one token of the target's own
    commit   m+1 cache slots stay, the rest is overwritten by the next step; nothing is re-run
    extend   the head reads the m+1 new positions with the target's features

Without a head γ is 0 and the same loop is plain decoding. B batch, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.generator import verify
from spectrain.generator.sampling import Sampling, draw
from spectrain.heads.base import DraftHead

# The cache is looked at in views of whole multiples of this, so that shapes repeat.
_VIEW = 64


@dataclass
class Completion:
    """One finished reply.

    tokens: new ids, the stop token included · finish: "stop" or "length"
    forwards: target forwards after the prefill · runs: accepted drafts per forward → how often
    """

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    forwards: int = 0
    runs: Counter[int] = field(default_factory=Counter)

    @property
    def committed(self) -> int:
        """Tokens that `forwards` brought: all but the prefill's own."""
        return max(0, len(self.tokens) - 1)

    def take(self, tokens: list[int], stop_ids: tuple[int, ...], limit: int) -> int:
        """Add tokens up to the stop token or the limit; returns how many were added."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            if token in stop_ids:
                self.finish = "stop"
            elif len(self.tokens) >= limit:
                self.finish = "length"
            if self.finish:
                break
        return len(self.tokens) - before


@dataclass
class Clock:
    """Seconds by stage as the host sees them (on a GPU: until the work is queued).

    draft and verify are the forwards of head and target alone; `total` runs from the first draft
    on. Overhead is all the rest: sampling, verification rules, cache, tokens, bookkeeping.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0
    steps: int = 0

    @property
    def overhead(self) -> float:
        return self.total - self.draft - self.verify

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        setattr(self, stage, getattr(self, stage) + time.perf_counter() - started)

    def add(self, other: Clock) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def clear(self) -> None:
        self.__init__()


class Generator:
    """A target, perhaps with a head in front of it."""

    def __init__(
        self, target: Target, head: DraftHead | None = None, draft_tokens: int | None = None
    ) -> None:
        """draft_tokens γ: guesses per step, by default the steps the head was trained for."""
        if head is None and draft_tokens:
            raise SpectrainError("draft tokens without a head", fix="give --head or leave it out")
        if head is not None:
            draft_tokens = head.config.steps if draft_tokens is None else draft_tokens
            if not 1 <= draft_tokens <= head.longest_draft:
                raise SpectrainError(
                    f"{draft_tokens} is not between 1 and {head.longest_draft}, "
                    "the longest draft of this head",
                    where="--draft-tokens",
                )
        self.target, self.head = target, head
        self.gamma = draft_tokens or 0
        self.clock = Clock()

    @torch.inference_mode()
    def generate(
        self, prompts: list[Tensor], max_new_tokens: int, sampling: Sampling | None = None
    ) -> list[Completion]:
        """Complete token prompts [n]; rows may differ in length and end at different times.

        A reply ends with "length" after max_new_tokens, or where the target's context is full.
        """
        sampling = sampling or Sampling()
        limits = self._limits(prompts, max_new_tokens)
        results = [Completion(finish="" if limit > 0 else "length") for limit in limits]
        if not any(limit > 0 for limit in limits):
            return results
        target, head, gamma = self.target, self.head, self.gamma
        device, stops = target.device, target.stop_ids
        aux_layers = head.needs.aux_layers if head else ()
        random = torch.Generator(device).manual_seed(sampling.seed)
        self.clock = clock = Clock()

        # Prefill: right-padded rows; what is written beyond a row's length is never seen.
        started = time.perf_counter()
        lengths = [len(prompt) for prompt in prompts]
        # A row may end with γ tokens too many, and goes on writing γ+1 slots while others live.
        slots = max(map(sum, zip(lengths, limits, strict=True))) + 2 * gamma + 1
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device)
        counts = torch.tensor(lengths, device=device)
        cache = target.new_cache(len(prompts), slots)
        features = target.forward(tokens, cache=cache, aux_layers=aux_layers, view=tokens.shape[1])
        cache.commit(counts)
        at_end = features.last.gather(
            1, (counts - 1)[:, None, None].expand(-1, 1, features.last.shape[-1])
        )
        current = _choose(target.logits(at_end.squeeze(1)), sampling, random)  # [B] x[t+1]
        guess = state = None
        if head:
            state = head.start(len(prompts), slots)
            read = torch.cat([tokens, torch.zeros_like(tokens[:, :1])], dim=1)
            read.scatter_(1, counts[:, None], current[:, None])
            guess = head.begin(state, read, features, counts)
        rows = list(range(len(prompts)))  # batch row → prompt
        for row, token in enumerate(current.tolist()):
            if not results[row].finish:
                results[row].take([token], stops, limits[row])
        clock.prefill = time.perf_counter() - started

        started = time.perf_counter()
        while any(not results[row].finish for row in rows):
            if head is None and len(rows) > 1:
                rows, current = self._drop_finished(rows, results, current, cache)
            live = [not results[row].finish for row in rows]
            view = _view(max(lengths[row] for row in rows) + gamma + 1, cache.slots)

            drafts, q = self._draft(state, guess, sampling, random, current)
            block = torch.cat([current[:, None], drafts], dim=1)  # [B, γ+1]
            with clock.time("verify"):
                features = target.forward(block, cache=cache, aux_layers=aux_layers, view=view)
                logits = target.logits(features.last)

            if sampling.greedy:
                accepted, current = verify.greedy(logits, drafts)
            else:
                accepted, current = verify.sampling(sampling.warp(logits), q, drafts, random)
            kept = torch.tensor(live, device=device).long() * (accepted + 1)
            cache.commit(kept)
            # The step's one transfer to the host: drafts, the target's token, accepted counts.
            report = torch.cat([drafts, current[:, None], accepted[:, None]], dim=1).tolist()
            for row, alive, (*guesses, own, count) in zip(rows, live, report, strict=True):
                if alive:
                    result = results[row]
                    result.forwards += 1
                    added = result.take([*guesses[:count], own], stops, limits[row])
                    result.runs[min(count, added)] += 1
                    lengths[row] += count + 1
            clock.steps += 1
            if head and any(not results[row].finish for row in rows):
                read = torch.cat([drafts, current[:, None]], dim=1)
                read.scatter_(1, accepted[:, None], current[:, None])
                view = _view(max(lengths[row] for row in rows) + 2 * gamma + 1, cache.slots)
                with clock.time("draft"):
                    guess = head.extend(state, read, features, kept, view)
        clock.total = time.perf_counter() - started
        return results

    def _draft(
        self,
        state: object,
        guess: Tensor | None,
        sampling: Sampling,
        random: torch.Generator,
        current: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """γ guesses [B, γ] as target ids and, when sampling, their distributions [B, γ, V]."""
        if self.head is None:
            q = None
            if not sampling.greedy:
                q = torch.zeros(len(current), 0, self.target.vocab_size, device=current.device)
            return current.new_empty(len(current), 0), q
        parents = torch.zeros(len(current), 1, dtype=torch.int64, device=current.device)
        drafts, distributions = [], []
        for depth in range(self.gamma):
            if depth:
                with self.clock.time("draft"):
                    guess = self.head.expand(state, drafts[-1][:, None], parents)[:, 0]
            if sampling.greedy:
                choice = guess.argmax(-1)
            else:
                probabilities = sampling.warp(guess)
                choice = draw(probabilities, random)
                distributions.append(self.head.spread(probabilities))
            drafts.append(self.head.to_target(choice))
        return torch.stack(drafts, dim=1), torch.stack(distributions, 1) if distributions else None

    def _limits(self, prompts: list[Tensor], max_new_tokens: int) -> list[int]:
        """New tokens each prompt may get: the wish, or what is left of the target's context."""
        if max_new_tokens < 0:
            raise SpectrainError(f"max-new-tokens {max_new_tokens} is negative")
        longest = self.target.max_length
        for index, prompt in enumerate(prompts):
            if not 0 < len(prompt) < longest:
                raise SpectrainError(
                    f"{len(prompt)} tokens; the target reads {longest}, one of them for the reply",
                    where=f"prompt {index + 1}",
                    fix="shorten the prompt"
                    if len(prompt)
                    else "an empty prompt has no next token",
                )
        return [min(max_new_tokens, longest - len(prompt)) for prompt in prompts]

    @staticmethod
    def _drop_finished(
        rows: list[int], results: list[Completion], current: Tensor, cache
    ) -> tuple[list[int], Tensor]:
        """Narrow the batch once a quarter of it is done (moving the cache costs, too)."""
        keep = [i for i, row in enumerate(rows) if not results[row].finish]
        if len(keep) > 0.75 * len(rows):
            return rows, current
        index = torch.tensor(keep, device=current.device)
        cache.keep_rows(index)
        return [rows[i] for i in keep], current[index]


def _choose(logits: Tensor, sampling: Sampling, random: torch.Generator) -> Tensor:
    """The target's own next token: [B, V] → [B]."""
    return logits.argmax(-1) if sampling.greedy else draw(sampling.warp(logits), random)


def _view(needed: int, slots: int) -> int:
    return min(slots, -(-needed // _VIEW) * _VIEW)

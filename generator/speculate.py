"""Decoding with and without a draft head: one loop for both.

Row b has read x[0 … t] (cache and features) and knows x[t+1], the token the target chose last::

    draft    guesses for x[t+2 …] from the head: a chain of γ or a tree (generator/drafters.py)
    verify   the target reads [x[t+1], guesses] behind the prefix, in one forward
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
from spectrain.generator.drafters import Chain, Grown
from spectrain.generator.sampling import Sampling
from spectrain.heads.base import DraftHead
from spectrain.heads.tree import TreeDefaults

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
        self,
        target: Target,
        head: DraftHead | None = None,
        draft_tokens: int | None = None,
        tree: TreeDefaults | None = None,
    ) -> None:
        """draft_tokens γ: a chain of so many guesses, by default the steps the head was trained
        for; tree: grow one of this shape instead (`generator.tree.shape_for`)."""
        if head is None and (draft_tokens or tree):
            what = "a tree" if tree else "draft tokens"
            raise SpectrainError(f"{what} without a head", fix="give --head or leave it out")
        if tree and draft_tokens is not None:
            raise SpectrainError("draft tokens are of a chain, not of a tree", fix="give only one")
        if head is not None and tree is None:
            draft_tokens = head.config.steps if draft_tokens is None else draft_tokens
            if not 1 <= draft_tokens <= head.longest_draft:
                raise SpectrainError(
                    f"{draft_tokens} is not between 1 and {head.longest_draft}, "
                    "the longest draft of this head",
                    where="--draft-tokens",
                )
        self.target, self.head = target, head
        self.drafter = Grown(head, tree) if tree else Chain(head, draft_tokens or 0)
        self.gamma = self.drafter.depth  # most drafts that one step can accept
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
        target, head, drafter = self.target, self.head, self.drafter
        device, stops = target.device, target.stop_ids
        aux_layers = head.needs.aux_layers if head else ()
        random = torch.Generator(device).manual_seed(sampling.seed)
        self.clock = clock = Clock()

        # Prefill: right-padded rows; what is written beyond a row's length is never seen.
        started = time.perf_counter()
        lengths = [len(prompt) for prompt in prompts]
        # A row may end with γ tokens too many, and goes on writing blocks while others live.
        spare = drafter.depth + max(drafter.width, drafter.room)
        slots = max(map(sum, zip(lengths, limits, strict=True))) + spare
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device)
        counts = torch.tensor(lengths, device=device)
        cache = target.new_cache(len(prompts), slots)
        features = target.forward(tokens, cache=cache, aux_layers=aux_layers, view=tokens.shape[1])
        cache.commit(counts)
        at_end = features.last.gather(
            1, (counts - 1)[:, None, None].expand(-1, 1, features.last.shape[-1])
        )
        current = sampling.choose(target.logits(at_end.squeeze(1)), random)  # [B] x[t+1]
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

        def expand(tokens: Tensor, parents: Tensor) -> Tensor:
            with clock.time("draft"):
                return head.expand(state, tokens, parents)

        started = time.perf_counter()
        while any(not results[row].finish for row in rows):
            if head is None and len(rows) > 1:
                rows, current = self._drop_finished(rows, results, current, cache)
            live = [not results[row].finish for row in rows]
            longest = max(lengths[row] for row in rows)

            block = drafter.draft(guess, current, expand, sampling, random)
            with clock.time("verify"):
                features = target.forward(
                    block.tokens,
                    cache=cache,
                    aux_layers=aux_layers,
                    view=_view(longest + drafter.width, cache.slots),
                    depths=block.depths,
                    ancestors=block.ancestors,
                )
                logits = target.logits(features.last)
            accepted = drafter.accept(logits, block, sampling, random)
            current, path = accepted.own, accepted.path
            kept = torch.tensor(live, device=device).long() * (accepted.count + 1)
            cache.commit(kept, path)
            # The step's one transfer to the host: committed tokens and how many were accepted.
            report = torch.cat([accepted.tokens, accepted.count[:, None]], dim=1).tolist()
            for row, alive, (*committed, count) in zip(rows, live, report, strict=True):
                if alive:
                    result = results[row]
                    result.forwards += 1
                    added = result.take(committed[: count + 1], stops, limits[row])
                    result.runs[min(count, added)] += 1
                    lengths[row] += count + 1
            clock.steps += 1
            if head and any(not results[row].finish for row in rows):
                read = features if path is None else features.at(path)
                view = _view(max(lengths[row] for row in rows) + spare, cache.slots)
                with clock.time("draft"):
                    guess = head.extend(state, accepted.tokens, read, kept, view)
        clock.total = time.perf_counter() - started
        return results

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


def _view(needed: int, slots: int) -> int:
    return min(slots, -(-needed // _VIEW) * _VIEW)

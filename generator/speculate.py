"""Decoding with and without a draft head: one loop for both (generator/run.py has the step).

Prompts wait for a free row; a row that ends is given to the next one at once. Without a head a step
drafts nothing and the same loop is plain decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.generator.completion import Clock, Completion, Ends
from spectrain.generator.drafters import Drafter
from spectrain.generator.limits import limits, require_stops
from spectrain.generator.lookup import Lookup
from spectrain.generator.memory import Memory
from spectrain.generator.randomness import row_key
from spectrain.generator.rules import Rules, Typical
from spectrain.generator.run import Run
from spectrain.generator.sampling import Sampling
from spectrain.generator.static import Static
from spectrain.generator.tree import Grown
from spectrain.heads.base import DraftHead
from spectrain.heads.tree import TreeDefaults, TreeShape

__all__ = ["Clock", "Completion", "Generator", "Progress"]

Proposal = Literal["top-k", "drawn"]
# Prompts are read together up to so many padded tokens: wider products are no faster, and padding
# to the longest of all prompts can double the work (docs/LOG.md).
_READ_TOGETHER, _GPU_READ_TOGETHER = 2048, 16384
# Slots on a GPU are whole multiples of this: buffers and graphs of one call serve the next.
_SLOTS = 512


@dataclass(frozen=True)
class Progress:
    """A reply has grown by `added` tokens (all of them so far are in `completion`)."""

    index: int
    completion: Completion
    added: int


class Generator:
    """A target, perhaps with a head in front of it."""

    def __init__(
        self,
        target: Target,
        head: DraftHead | None = None,
        draft_tokens: int | None = None,
        tree: TreeDefaults | TreeShape | None = None,
        *,
        lookup: int | None = None,
        proposal: Proposal | None = None,
        typical: Typical | None = None,
        graphs: bool = True,
    ) -> None:
        """draft_tokens γ: a chain of so many guesses, by default the steps the head was trained
        for; tree: grow one (`generator.tree.shape_for`) or draft one of this shape instead; lookup:
        no head, γ tokens that followed the same `lookup` tokens (or fewer) earlier in the text.

        proposal, when sampling: children are the head's likeliest tokens (top-k; the default for
        trees: a seed gives the same text as without a head) or drawn from its distribution (the
        default for chains: more is accepted). typical: accept by this LOSSY rule, of the likeliest
        tokens. graphs: on CUDA capture steps and replay them.
        """
        if proposal not in (None, *get_args(Proposal)):
            raise SpectrainError(f"proposal {proposal!r}", fix="choose top-k or drawn")
        if proposal == "drawn" and head is None:
            raise SpectrainError("drawn proposals need a head to draw from", where="proposal")
        self.target, self.head, self.graphs = target, head, graphs
        self.drafter = _drafter(target, head, draft_tokens, tree, lookup, proposal, typical)
        self.gamma = self.drafter.depth  # most drafts that one step can accept
        self.typical = typical if self.gamma else None  # it is about drafts
        self.drawn = isinstance(self.drafter, Static) and self.drafter.drawn
        self.clock = Clock()
        self._run: Run | None = None

    def generate(
        self,
        prompts: list[Tensor],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        rows: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Complete token prompts [n], `rows` of them (None: all) at a time; numbers: see `stream`.

        A reply ends with "stop" after a stop token or string, with "length" after max_new_tokens or
        where the target's context is full.
        """
        results = [Completion() for _ in prompts]
        for progress in self.stream(prompts, max_new_tokens, sampling, rows, numbers):
            results[progress.index] = progress.completion
        return results

    @torch.inference_mode()
    def stream(
        self,
        prompts: Sequence[Tensor],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        rows: int | None = None,
        numbers: Sequence[int] | None = None,
        memory: Memory | None = None,
    ) -> Iterator[Progress]:
        """As `generate`, telling of every reply after each step. numbers: those of the prompts
        (None: 0, 1, 2 …), which together with the seed decide what is drawn for each; memory: of
        what this generator read before, so that a single prompt is read from there on."""
        sampling = sampling or Sampling()
        if rows is not None and rows < 1:
            raise SpectrainError(f"{rows} rows", where="rows", fix="1 or more, None for all")
        most = limits(self.target, prompts, max_new_tokens)
        require_stops(self.target, sampling.stop_ids)
        waiting = deque(index for index, limit in enumerate(most) if limit)
        for index, limit in enumerate(most):
            if not limit:
                yield Progress(index, Completion(finish="length"), 0)
        if not waiting:
            return
        target = self.target
        ends = Ends(
            frozenset((*target.stop_ids, *sampling.stop_ids)),
            sampling.stop_strings,
            target.tokenizer.decode if sampling.stop_strings else None,
        )
        given = range(len(prompts)) if numbers is None else numbers
        keys = [row_key(sampling.seed, number) for number in given]
        count = min(rows or len(prompts), len(waiting))
        run = self._started(prompts, most, sampling, ends, count)
        self.clock = run.clock
        try:
            yield from self._replies(run, prompts, keys, most, waiting, ends, memory)
        finally:
            if target.device.type == "cuda":
                self._run = run  # buffers and graphs serve the next prompts

    def _replies(
        self,
        run: Run,
        prompts: Sequence[Tensor],
        keys: list[int],
        limits: list[int],
        waiting: deque[int],
        ends: Ends,
        memory: Memory | None,
    ) -> Iterator[Progress]:
        """The loop: prompts into free rows, else a step of all rows, until nothing is left."""
        count = run.rows.count
        work: list[int | None] = [None] * count  # row → prompt
        results: dict[int, Completion] = {}
        texts: dict[int, list[int]] = {}
        while waiting or any(index is not None for index in work):
            free = [place for place, index in enumerate(work) if index is None]
            if waiting and free:
                places = free[: self._together(len(prompts[index]) for index in waiting)]
                chosen = [waiting.popleft() for _ in places]
                own = [prompts[index] for index in chosen], [keys[index] for index in chosen]
                tokens = run.admit(places, *own, memory)
                for place, index, token in zip(places, chosen, tokens, strict=True):
                    work[place], results[index] = index, Completion()
                    texts[index] = [*prompts[index].tolist(), token]
                    results[index].take([token], ends, limits[index])
                    yield Progress(index, results[index], 1)
            else:
                if free and self._narrows(len(free), count):
                    alive = [place for place, index in enumerate(work) if index is not None]
                    run.narrow(alive)
                    work, count = [work[place] for place in alive], len(alive)
                told = [None if index is None else texts[index] for index in work]
                for index, committed in zip(work, run.step(told), strict=True):
                    if index is None:
                        continue
                    result = results[index]
                    result.forwards += 1
                    added = result.take(committed, ends, limits[index])
                    result.runs[min(len(committed) - 1, added)] += 1
                    texts[index] += committed[:added]
                    yield Progress(index, result, added)
            ended = [
                place
                for place, index in enumerate(work)
                if index is not None and results[index].finish
            ]
            for place in ended:
                del texts[work[place]]
                work[place] = None
            if ended:
                run.retire(ended)

    def _started(
        self,
        prompts: Sequence[Tensor],
        limits: list[int],
        sampling: Sampling,
        ends: Ends,
        rows: int,
    ) -> Run:
        """A run with room for these prompts; on a GPU the last one if it will do."""
        drafter = copy(self.drafter)  # whose state is this run's own
        # A row may end with d tokens too many, and goes on writing blocks while others live.
        spare = drafter.depth + max(drafter.width, drafter.room) + 1
        longest = max(len(p) + limit for p, limit in zip(prompts, limits, strict=True))
        # The steps are the same whatever the seed and the strings: what was captured serves on.
        of_steps = replace(sampling, seed=0, stop_strings=())
        slots, rules = longest + spare, Rules(of_steps, self.typical)
        on_gpu = self.target.device.type == "cuda"
        if on_gpu:
            slots = -(-slots // _SLOTS) * _SLOTS
            last, self._run = self._run, None  # in use: no other stream takes it meanwhile
            if last and last.rules == rules and last.rows.count == rows and last.slots >= slots:
                last.clock.clear()
                last.retire(list(range(rows)))
                return last
            last = None  # its caches are freed before new ones are made
        return Run(self.target, drafter, rules, sorted(ends.ids), rows, slots, self.graphs)

    def _together(self, lengths: Iterable[int]) -> int:
        """How many of the prompts that wait, of these lengths, are read at once; one at least."""
        most = _GPU_READ_TOGETHER if self.target.device.type == "cuda" else _READ_TOGETHER
        longest = count = 0
        for count, length in enumerate(lengths):
            longest = max(longest, length)
            if count and (count + 1) * longest > most:
                return count
        return count + 1

    def _narrows(self, free: int, count: int) -> bool:
        """Whether to drop finished rows: not on a GPU, whose shapes stay; elsewhere once a quarter
        is done, for moving the caches costs, too."""
        return self.target.device.type != "cuda" and free >= 0.25 * count


def _drafter(
    target: Target,
    head: DraftHead | None,
    draft_tokens: int | None,
    tree: TreeDefaults | TreeShape | None,
    lookup: int | None,
    proposal: Proposal | None,
    typical: Typical | None,
) -> Drafter:
    """What was asked for, or one clear line why not."""
    device = target.device
    if lookup is not None:
        if head is not None or tree is not None:
            raise SpectrainError("prompt lookup drafts chains without a head", fix="leave one out")
        return Lookup(3 if draft_tokens is None else draft_tokens, lookup, device)
    if head is None:
        if draft_tokens or (tree is not None and tree != TreeShape.chain(0)):
            what = "draft tokens" if draft_tokens else "a tree"
            raise SpectrainError(f"{what} without a head", fix="give --head or leave it out")
        return Static(None, TreeShape.chain(0), device)
    if tree is not None and draft_tokens is not None:
        raise SpectrainError("draft tokens are of a chain, not of a tree", fix="give only one")
    if isinstance(tree, TreeDefaults):
        if proposal == "drawn":
            raise SpectrainError(
                "a grown tree keeps the likeliest of its nodes, so they cannot be drawn",
                fix="use a chain or a static tree, or proposal top-k",
            )
        return Grown(head, tree)
    if tree is None:
        draft_tokens = head.config.steps if draft_tokens is None else draft_tokens
        if not 1 <= draft_tokens <= head.longest_draft:
            raise SpectrainError(
                f"{draft_tokens} is not between 1 and {head.longest_draft}, "
                "the longest draft of this head",
                where="--draft-tokens",
            )
        tree = TreeShape.chain(draft_tokens)
    if not tree.nodes:
        return Static(None, tree, device)
    drawn = proposal == "drawn" or (proposal is None and tree.is_chain and not typical)
    if drawn and typical:
        raise SpectrainError(
            "typical acceptance is of the head's likeliest tokens, not of drawn ones",
            fix="leave out proposal drawn",
        )
    return Static(head, tree, device, drawn)

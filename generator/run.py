"""Sequences in work on the device: prompts come into rows, and all rows take steps together.

Row b has read x[0 … t] (cache and features) and knows x[t+1], the token the target chose last::

    read     the head reads what the last step committed, with the target's features
    draft    guesses for x[t+2 …]: a chain or a tree (generator/drafters.py)
    verify   the target reads [x[t+1], guesses] behind the prefix, in one forward
    accept   m guesses and one token of the target's own
    commit   m+1 cache slots stay, the rest is overwritten by the next step; nothing is re-run

B rows, A admitted ones, M tokens in a block, d longest draft, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from spectrain.core.batch import Features
from spectrain.core.target import Target
from spectrain.generator.completion import Clock
from spectrain.generator.drafters import Drafter
from spectrain.generator.memory import Memory
from spectrain.generator.processors import Processors
from spectrain.generator.replay import Replay
from spectrain.generator.rows import Rows
from spectrain.generator.rules import Rules

# The cache is looked at in views of whole multiples of this, so that shapes repeat. On a GPU every
# shape is a graph to capture, which takes as long as dozens of steps; a few hundred slots more to
# read are little beside the weights.
_VIEW, _GPU_VIEW = 64, 512


class Run:
    """`rows` sequences of at most `slots` cache slots.

    lengths: tokens in the target's cache, as the host knows them · clock: seconds by stage
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rules: Rules,
        stop_ids: Sequence[int],
        rows: int,
        slots: int,
        graphs: bool = True,
    ) -> None:
        self.target, self.drafter, self.rules, self.slots = target, drafter, rules, slots
        self.device, self.clock = target.device, Clock()
        self.rows = Rows(rows, drafter.depth + 1, self.device)
        self.cache = target.new_cache(rows, slots)
        self._grain = _GPU_VIEW if self.device.type == "cuda" else _VIEW
        drafter.start(rows, slots)
        sampling, self.processors = rules.sampling, None
        changes = (sampling.repetition_penalty, sampling.min_new_tokens, sampling.suppress)
        if Processors.needed(*changes):
            self.processors = Processors(rows, target.vocab_size, self.device, stop_ids, *changes)
        self.lengths = [0] * rows
        self._replay = Replay(self.device, graphs)

    # ── prompts come in ──────────────────────────────────────────────────────

    def admit(
        self,
        places: list[int],
        prompts: list[Tensor],
        keys: list[int],
        memory: Memory | None = None,
    ) -> list[int]:
        """Read prompts [n] into the rows `places`; the target's first token for each. memory: what
        a single one is known to begin with is not read again."""
        started = time.perf_counter()
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(self.device)
        counts = torch.tensor(lengths, device=self.device)
        rows = torch.tensor(places, device=self.device)
        own_keys = torch.tensor(keys, device=self.device)

        # Right-padded rows: what is written beyond a row's length is never seen.
        cache = self.target.new_cache(*tokens.shape)
        known = memory.fill(prompts, cache) if memory else 0
        features = self.target.forward(
            tokens[:, known:], cache=cache, aux_layers=self.drafter.aux_layers, view=tokens.shape[1]
        )
        cache.commit(counts - known)
        for place, length in zip(places, lengths, strict=True):
            self.lengths[place] = length
        self.cache.reserve(self._view(max(self.lengths) + self.drafter.width))
        self.cache.adopt(rows, cache)

        at_end = features.at((counts - known - 1)[:, None])  # [A, 1, …]
        logits = self.target.logits(at_end.last[:, 0])
        if self.processors:
            self.processors.admit(rows, tokens, counts)
            logits = self.processors.first(rows, logits)
        current = self.rules.choose(logits, own_keys, torch.zeros_like(own_keys))
        read = torch.cat([tokens, torch.zeros_like(tokens[:, :1])], dim=1)
        read.scatter_(1, counts[:, None], current[:, None])
        # Its first reading of the prompt is no drafting yet: it counts as prefill.
        before = memory.state if memory and known else None
        state = self.drafter.admit(rows, read[:, known:], features, counts - known, known, before)
        if memory:
            memory.keep(prompts, cache, state)
        self.rows.admit(rows, own_keys, current, at_end if self.drafter.head else None)
        self.rows.live.index_fill_(0, rows, True)
        first = current.tolist()
        self.clock.prefill += time.perf_counter() - started
        return first

    def retire(self, places: list[int]) -> None:
        """These rows have ended: nothing of theirs is committed any more."""
        rows = torch.tensor(places, device=self.device)
        self.rows.live.index_fill_(0, rows, False)
        # They go on writing blocks, from now on where nothing is looked up.
        self.cache.lengths.index_fill_(0, rows, 0)
        for place in places:
            self.lengths[place] = 0

    def narrow(self, places: list[int]) -> None:
        """Only the rows `places` stay, in that order."""
        rows = torch.tensor(places, device=self.device)
        self.cache.keep_rows(rows)
        self.drafter.keep(rows)
        self.rows.keep(rows)
        if self.processors:
            self.processors.take(rows)
        self.lengths = [self.lengths[place] for place in places]
        self._replay.forget()

    # ── the step ─────────────────────────────────────────────────────────────

    def step(self, texts: list[Sequence[int] | None]) -> list[list[int]]:
        """One step of all rows; texts: all tokens of each so far, None where none is in work.
        Returns what each row committed (of rows not in work: nothing that counts)."""
        started = time.perf_counter()
        drafter = self.drafter
        width = drafter.look(texts)
        longest = max(self.lengths)
        view, head_view = self._view(longest + width), self._view(longest + 1 + drafter.room)
        work = partial(self._step, view, head_view)
        # The step's one transfer to the host: committed tokens and how many were accepted.
        report = self._replay((view, head_view, width), work).tolist()
        for place, text in enumerate(texts):
            if text is not None:
                self.lengths[place] += report[place][-1] + 1
        self.clock.steps += 1
        self.clock.total += time.perf_counter() - started
        return [row[: row[-1] + 1] for row in report]

    def _step(self, view: int, head_view: int) -> Tensor:
        """Tensor operations alone, the same ones whatever is accepted → [B, d + 2]."""
        rows, drafter = self.rows, self.drafter
        timed = (lambda _: nullcontext()) if self._replay.enabled else self.clock.time
        block = drafter.draft(rows, self.rules, head_view, partial(timed, "draft"))
        chain = block.ancestors is None
        with timed("verify"):
            features = self.target.forward(
                block.tokens,
                cache=self.cache,
                aux_layers=drafter.aux_layers,
                view=view,
                depths=None if chain else block.depths,
                ancestors=block.ancestors,
            )
            logits = self.target.logits(features.last)
        if self.processors:
            logits = self.processors.apply(logits, block.tokens, block.depths, block.ancestors)
        accepted = drafter.accept(logits, block, rows, self.rules)
        kept = rows.live * (accepted.count + 1)
        self.cache.commit(kept, accepted.path)
        if self.processors:
            self.processors.commit(torch.cat([rows.current[:, None], accepted.tokens], 1), kept)
        read: Features | None = None
        if drafter.head:
            read = features if accepted.path is None else features.at(accepted.path)
        rows.commit(accepted.tokens, accepted.own, read, kept)
        return torch.cat([accepted.tokens, accepted.count[:, None]], dim=1)

    def _view(self, needed: int) -> int:
        return min(self.slots, -(-needed // self._grain) * self._grain)

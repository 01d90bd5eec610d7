"""Heads and targets for tests of the generator, made so that every path is taken."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from spectrain.core.batch import Features
from spectrain.core.cache import KVCache
from spectrain.generator.speculate import Generator
from spectrain.heads.base import Needs


class Helped:
    """A head whose guesses are helped: at most places the true next token gets the first, second or
    third rank, so that paths of every length and place are accepted. All calls go on to the head
    itself, and what it says after each commit is kept: `said` (text, verified rows, logits).

    texts: whole texts, one for each prompt; a row is helped by the one that begins as its prompt.
    """

    def __init__(self, head, texts, ranks=(0, 0, 1, 1, 2, None), seed=3):
        self.inner, self.ranks, self.said = head, ranks, []
        self.texts, self.random = texts, torch.Generator().manual_seed(seed)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def start(self, rows, slots):
        state = self.inner.start(rows, slots)
        state.text, state.read = [None] * rows, torch.zeros(rows, dtype=torch.int64)
        return state

    def begin(self, state, tokens, features, counts):
        for row, count in enumerate(counts.tolist()):
            prompt = tokens[row, : count + 1].tolist()
            state.text[row] = next(text for text in self.texts if text[: count + 1] == prompt)
        state.read = counts.clone()
        return self._verified(state, self.inner.begin(state, tokens, features, counts), counts)

    def adopt(self, state, rows, other, chosen=None):
        self.inner.adopt(state, rows, other, chosen)
        theirs = range(len(other.text)) if chosen is None else chosen.tolist()
        for row, their in zip(rows.tolist(), theirs, strict=True):
            state.text[row], state.read[row] = other.text[their], other.read[their]

    def extend(self, state, tokens, features, counts, view=0):
        state.read += counts
        logits = self.inner.extend(state, tokens, features, counts, view)
        return self._verified(state, logits, counts)

    def expand(self, state, tokens, parents):
        state.depth += 1
        return self._help(state, self.inner.expand(state, tokens, parents))

    def _verified(self, state, logits, counts):
        state.depth = 0
        self.said += [
            (state.text[row], int(state.read[row]), logits[row].clone())
            for row in range(len(counts))
            if counts[row]
        ]
        return self._help(state, logits[:, None])[:, 0]

    def _help(self, state, logits):
        logits = logits.clone()
        for row, read in enumerate(state.read.tolist()):
            place = int(torch.randint(len(self.ranks), (), generator=self.random))
            position, rank = read + 1 + state.depth, self.ranks[place]
            text = state.text[row]
            if rank is None or text is None or position >= len(text):
                continue
            ids = (self.inner.draft_ids == text[position]).nonzero()
            if len(ids):
                first = logits[row].topk(4, dim=-1).values
                between = (
                    first[:, 0] + 1 if rank == 0 else (first[:, rank - 1] + first[:, rank]) / 2
                )
                logits[row, :, ids[0, 0]] = between
        return logits


def helped(target, head, prompts, new, **options):
    """The head with help towards greedy replies, and these: (Helped, replies)."""
    truths = Generator(target).generate(prompts, new + 8)
    texts = [p.tolist() + t.tokens for p, t in zip(prompts, truths, strict=True)]
    return Helped(head, texts, **options), [t.tokens[:new] for t in truths]


@torch.no_grad()
def require_said_as_read_afresh(target, watched):
    """After every commit the head says what it says having read the same text at once: its cache is
    that of the accepted path, and it got the target's features of the accepted nodes."""
    head = watched.inner
    for whole, count, logits in watched.said:
        text = torch.tensor([whole])
        features = target.forward(text[:, :count], aux_layers=head.needs.aux_layers)
        state = head.start(1, count + 8)
        fresh = head.begin(state, text[:, : count + 1], features, torch.tensor([count]))[0]
        error = (logits - fresh).abs().max() / fresh.abs().max()
        assert error < 1e-4, (count, float(error))


class GoodGuesser:
    """A head whose guesses for one prompt are the true continuation, now and then spoilt."""

    def __init__(self, head, truth, spoil):
        self.inner, self.truth, self.spoil, self.calls, self.read = head, truth, spoil, 0, 0
        self.config, self.needs, self.start = head.config, head.needs, head.start
        self.longest_draft, self.adopt = head.longest_draft, head.adopt

    def begin(self, state, tokens, features, counts):
        self.read = int(counts[0])
        self.inner.begin(state, tokens, features, counts)
        return self.guess(0)

    def extend(self, state, tokens, features, counts, view=0):
        self.read += int(counts[0])
        self.inner.extend(state, tokens, features, counts, view)
        return self.guess(0)

    def expand(self, state, tokens, parents):
        self.inner.expand(state, tokens, parents)
        return self.guess(self.depth + 1)[:, None]

    def guess(self, depth):
        self.depth = depth
        self.calls += 1
        position = self.read + 1 + depth
        token = self.truth[position] if position < len(self.truth) else 5
        if self.calls % self.spoil == 0:
            token = (token + 1) % 380
        return torch.nn.functional.one_hot(torch.tensor([token]), 392).float()

    def to_target(self, ids):
        return ids


class NoisyTarget:
    """A head that is the target itself with some noise on its logits: accepted often, not always.
    It reads the whole text at every call, obvious and slow; it drafts chains."""

    family, longest_draft, needs, tree = "noisy", 16, Needs(), None

    def __init__(self, target, noise):
        self.target = target
        self.config = SimpleNamespace(steps=3, draft_vocab_size=392, vocab_size=392)
        generator = torch.Generator().manual_seed(5)
        self.noise = noise * torch.randn(392, generator=generator)

    def start(self, rows, slots):
        lengths = torch.zeros(rows, dtype=torch.int64)
        text = torch.zeros(rows, slots + 1, dtype=torch.int64)
        return SimpleNamespace(text=text, lengths=lengths, drafted=[])

    def begin(self, state, tokens, features, counts):
        state.text[:, : tokens.shape[1]] = tokens
        state.lengths = counts + 1
        return self._logits(state)

    def adopt(self, state, rows, other, chosen=None):
        chosen = torch.arange(len(rows)) if chosen is None else chosen
        state.text[rows, : other.text.shape[1]] = other.text[chosen]
        state.lengths[rows] = other.lengths[chosen]

    def extend(self, state, tokens, features, counts, view=0):
        for place in range(tokens.shape[1]):
            real = place < counts
            state.text[real, (state.lengths + place)[real]] = tokens[real, place]
        state.lengths = state.lengths + counts
        state.drafted = []
        return self._logits(state)

    def expand(self, state, tokens, parents):
        state.drafted.append(tokens[:, 0])
        return self._logits(state)[:, None]

    def _logits(self, state):
        text, rows = state.text.clone(), torch.arange(len(state.text))
        for place, token in enumerate(state.drafted):
            text[rows, state.lengths + place] = token
        ends = state.lengths + len(state.drafted)
        last = self.target.forward(text[:, : int(ends.max())]).last[rows, ends - 1]
        return self.target.logits(last) + self.noise

    def to_target(self, ids):
        return ids

    def spread(self, probabilities):
        return probabilities


class Markov:
    """A target of 6 tokens, each drawn given the one before; and a head that knows it roughly."""

    device, stop_ids, max_length = torch.device("cpu"), (), 64
    vocab_size = readable = 6
    longest_draft, needs, tree, reduced = 16, Needs(), None, False
    config = SimpleNamespace(steps=3, draft_vocab_size=6, vocab_size=6)

    def __init__(self, noise):
        generator = torch.Generator().manual_seed(4)
        self.table = 1.2 * torch.randn(6, 6, generator=generator)
        self.guesses = self.table + noise * torch.randn(6, 6, generator=generator)

    def new_cache(self, rows, slots):
        return KVCache(rows, slots)

    def forward(self, tokens, **_):
        return Features(torch.nn.functional.one_hot(tokens, 6).float(), None)

    def logits(self, last):
        return last @ self.table

    def start(self, rows, slots):
        return None

    def adopt(self, state, rows, other, chosen=None):
        pass

    def begin(self, state, tokens, features, counts):
        return self.guesses[tokens[torch.arange(len(counts)), counts]]

    def extend(self, state, tokens, features, counts, view):
        return self.guesses[tokens[torch.arange(len(counts)), (counts - 1).clamp(min=0)]]

    def expand(self, state, tokens, parents):
        return self.guesses[tokens]

    def to_target(self, ids):
        return ids

    def spread(self, probabilities):
        return probabilities

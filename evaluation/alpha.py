"""Teacher-forced acceptance: how often the target would accept the head's drafts on known text.

B batch, T length, H hidden, V target vocabulary, D draft vocabulary, K draft steps, U teacher rows,
R counted anchors of a step, n anchors of a reply.

At anchor t and step k the head has been fed x[t+1 … t+1+k] and guesses x[t+2+k]; the target's own
distribution for that token is at the teacher row u = t+1+k::

    temperature > 0   beta = Σ min(p, q)                  kept = min(1, q(x)/p(x))
    temperature 0     beta = 1 iff argmax q = argmax p    kept = 1 iff argmax q = argmax p = x

with x the true token. beta is the chance of acceptance before the target's token is known; kept the
chance given that the text went on with x: the lossless rule emits a draw from p, and
P(accepted, x emitted) = min(p(x), q(x)). p is normalised over all V tokens and q is 0 outside the
draft vocabulary, so a token that the head cannot guess is a rejection. At temperature 0 the rank of
argmax p among the head's choices is kept as well: what a tree needs to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectrain.core.batch import Batch, counted, predicting
from spectrain.evaluation.walk import Floats, counted_steps
from spectrain.heads.base import DraftHead

Ints = NDArray[np.int32]
_CHUNK = 1 << 24  # logits computed at a time


class Verifier(Protocol):
    """A target, or its output layer alone."""

    vocab_size: int

    def logits(self, last: Tensor) -> Tensor:
        """[..., H] → [..., V]"""
        ...


@dataclass(frozen=True)
class Acceptance:
    """One reply at one temperature; both 0 where the step is past the reply's end.

    beta [n, K] chance that a draft is accepted, kept [n, K] the same given the true next token
    ranks [n, K] at temperature 0: which choice of the head (0: the first) the target's token is, −1
        where the head cannot guess it or the step is past the reply's end; else None
    """

    beta: Floats
    kept: Floats
    ranks: Ints | None = None


@dataclass(frozen=True)
class _Teacher:
    """What the target says at the U teacher rows, for all steps and temperatures.

    place [B·T] row of a flat position, −1 where it is none
    guessable [U, D] logits of the tokens the head can guess
    token, top [U] ids of the true token and of the target's argmax (as captured: a store's states
        are rounded, and a rounded state may have another argmax)
    slot, top_slot [U] draft ids of the two, −1 where the head cannot guess it
    token_logit [U] the target's logit of the true token
    lognorm temperature → [U] log-normaliser over all V tokens
    """

    place: Tensor
    guessable: Tensor
    token: Tensor
    slot: Tensor
    token_logit: Tensor
    top: Tensor
    top_slot: Tensor
    lognorm: dict[float, Tensor]


@torch.inference_mode()
def acceptance(
    target: Verifier, head: DraftHead, batch: Batch, steps: int, temperatures: Sequence[float]
) -> list[list[list[Acceptance]]]:
    """For each temperature and each row of the batch: its replies that have an anchor, in order."""
    ids = head.to_target(torch.arange(head.config.draft_vocab_size, device=batch.tokens.device))
    teacher = _read_teacher(target, batch, ids, temperatures)
    shape = (len(temperatures), batch.tokens.numel(), steps)
    beta = torch.zeros(shape, device=batch.tokens.device)
    kept = torch.zeros_like(beta)
    ranks = torch.full(shape[1:], -1, dtype=torch.int32, device=batch.tokens.device)
    for step in head.unroll(batch, steps):
        counts = counted(batch.reply, step.step).flatten()[step.anchors]
        rows = counts.nonzero().flatten()
        for part in rows.split(_rows_at_once(len(ids))):
            anchors = step.anchors[part]
            logits = head.logits(step.hidden[part], step.step).float()
            for number, temperature in enumerate(temperatures):
                found = _compare(logits, teacher, anchors + 1 + step.step, ids, temperature)
                beta[number, anchors, step.step], kept[number, anchors, step.step] = found
            if 0 in temperatures:
                slots = teacher.top_slot[teacher.place[anchors + 1 + step.step]]
                ranks[anchors, step.step] = _rank(logits, slots)
    size = (len(temperatures), *batch.tokens.shape, steps)
    return _by_reply(batch, temperatures, beta.view(size), kept.view(size), ranks.view(size[1:]))


def _rows_at_once(vocabulary: int) -> int:
    return max(1, _CHUNK // vocabulary)


def _read_teacher(
    target: Verifier, batch: Batch, ids: Tensor, temperatures: Sequence[float]
) -> _Teacher:
    """ids [D]: target ids of the draft vocabulary."""
    where = predicting(batch.reply).flatten().nonzero().flatten()
    place = torch.full_like(batch.tokens.flatten(), -1)
    place[where] = torch.arange(len(where), device=where.device)
    token = batch.tokens.flatten()[where + 1]  # same row: a predicting position is never the last
    slots = torch.full((target.vocab_size,), -1, device=ids.device)
    slots[ids] = torch.arange(len(ids), device=ids.device)
    last = batch.last.flatten(0, 1)[where]
    known = batch.argmax.flatten()[where]
    if not any(temperatures) and bool((known >= 0).all()):  # the target has said all that is asked
        nothing = last.new_zeros(0)
        return _Teacher(place, nothing, token, slots[token], nothing, known, slots[known], {})
    guessable, token_logit, top = [], [], []
    lognorm: dict[float, list[Tensor]] = {t: [] for t in temperatures if t > 0}
    for rows in torch.arange(len(where), device=where.device).split(
        _rows_at_once(target.vocab_size)
    ):
        logits = target.logits(last[rows]).float()
        guessable.append(logits[:, ids])
        token_logit.append(logits.gather(1, token[rows, None]).squeeze(1))
        top.append(torch.where(known[rows] >= 0, known[rows], logits.argmax(-1)))
        for temperature, parts in lognorm.items():
            parts.append(torch.logsumexp(logits / temperature, dim=-1))
    return _Teacher(
        place,
        torch.cat(guessable),
        token,
        slots[token],
        torch.cat(token_logit),
        torch.cat(top),
        slots[torch.cat(top)],
        {temperature: torch.cat(parts) for temperature, parts in lognorm.items()},
    )


def _compare(
    logits: Tensor, teacher: _Teacher, positions: Tensor, ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """beta, kept [R] of the head's logits [R, D] against the teacher at flat positions [R]."""
    rows = teacher.place[positions]
    token = teacher.token[rows]
    if temperature == 0:
        choice = ids[logits.argmax(-1)]
        agrees = choice == teacher.top[rows]
        return agrees.float(), (agrees & (choice == token)).float()
    log_q = torch.log_softmax(logits / temperature, dim=-1)
    lognorm = teacher.lognorm[temperature][rows]
    p = torch.exp(teacher.guessable[rows] / temperature - lognorm[:, None])
    beta = torch.minimum(p, log_q.exp()).sum(-1).clamp(max=1)
    slot = teacher.slot[rows]
    log_ratio = log_q.gather(1, slot.clamp(min=0)[:, None]).squeeze(1) - (
        teacher.token_logit[rows] / temperature - lognorm
    )
    return beta, torch.where(slot >= 0, log_ratio.clamp(max=0).exp(), 0.0)


def _rank(logits: Tensor, slots: Tensor) -> Tensor:
    """Place of the draft ids `slots` [R] among logits [R, D], of equal ones the lower id first, as
    argmax has it; −1 where the slot is −1."""
    own = logits.gather(1, slots.clamp(min=0)[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < slots[:, None]
    before = (logits > own) | ((logits == own) & earlier)
    return torch.where(slots >= 0, before.sum(-1), -1).int()


def _by_reply(
    batch: Batch, temperatures: Sequence[float], beta: Tensor, kept: Tensor, ranks: Tensor
) -> list[list[list[Acceptance]]]:
    """beta, kept [temperatures, B, T, K], ranks [B, T, K] → per temperature, row and reply."""
    arrays = [values.cpu().double().numpy() for values in (beta, kept)]
    places = ranks.cpu().numpy()
    result: list[list[list[Acceptance]]] = [[[] for _ in batch.tokens] for _ in temperatures]
    for row, reply in enumerate(batch.reply.cpu().numpy()):
        for number in np.unique(reply[1:][reply[1:] > 0]):
            predicted = np.flatnonzero(reply[1:] == number)  # t with x[t+1] in this reply
            first, count = predicted[0], len(predicted) - 1
            if count == 0:
                continue
            part = slice(first, first + count)
            inside = counted_steps(count, beta.shape[-1])
            for temperature, replies, b, k in zip(temperatures, result, *arrays, strict=True):
                own = None if temperature else np.where(inside, places[row, part], -1)
                replies[row].append(Acceptance(b[row, part] * inside, k[row, part] * inside, own))
    return result

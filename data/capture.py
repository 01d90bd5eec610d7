"""Features of the target for tokenised rows: one forward for each batch of rows of similar length.

B batch, T padded length, P predicting positions of the batch, H hidden, A aux width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.core.batch import predicting
from spectrain.core.target import Target
from spectrain.data.shard import Row, States

# Rows of logits that exist at one time: 256 × 49152 in float32 are 50 MB.
LOGIT_ROWS = 256
# Tokens that are also sent through the stock model to compare its logits with ours.
CHECKED_TOKENS = 64


@dataclass(frozen=True)
class Captured:
    """The states of a row, or the reason why there are none."""

    row: Row
    states: States | None
    reason: str | None = None


def batches(rows: list[Row], batch_tokens: int) -> list[list[int]]:
    """Places of rows grouped by length, at most `batch_tokens` padded tokens each (or one row)."""
    order = sorted(range(len(rows)), key=lambda place: (len(rows[place].tokens), place))
    result: list[list[int]] = []
    for place in order:
        # Lengths ascend, so this row would be the longest of the group.
        if result and (len(result[-1]) + 1) * len(rows[place].tokens) <= batch_tokens:
            result[-1].append(place)
        else:
            result.append([place])
    return result


@torch.inference_mode()
def capture(
    target: Target,
    rows: list[Row],
    aux_layers: tuple[int, ...],
    dtype: torch.dtype,
    batch_tokens: int,
    last_everywhere: bool = False,
    top_k: int = 0,
) -> Iterator[tuple[int, Captured]]:
    """Yield (place in `rows`, states in `dtype` on the CPU) batch by batch, shortest rows first.

    last_everywhere: keep the last state at every position, not on predicting rows alone.
    top_k: keep so many log-probabilities of the target at each predicting position.
    States for int8 stay in the target's type: they are rounded when the shard is laid out.

    A row for which the target returned too few states, or states that are not finite in `dtype`,
    comes back with the reason. The result depends on `rows` and `batch_tokens` alone.
    """
    dtype = target.dtype if dtype == torch.int8 else dtype
    for places in batches(rows, batch_tokens):
        group = [rows[place] for place in places]
        tokens, reply = _padded(group)
        features = target.forward(tokens.to(target.device), aux_layers=aux_layers)
        read = features.last.shape[1]
        where = predicting(reply)[:, :read]
        predicted = features.last[where.to(target.device)]
        facts = teacher(target, predicted, top_k)
        last = (features.last if last_everywhere else predicted).to(dtype).cpu()
        aux = None if features.aux is None else features.aux.to(dtype).cpu()
        ends = where.sum(1).cumsum(0).tolist()
        for number, place in enumerate(places):
            row = group[number]
            part = slice(ends[number - 1] if number else 0, ends[number])
            states = States(
                aux=None if aux is None else aux[number, : len(row.tokens)],
                last=last[number, : len(row.tokens)] if last_everywhere else last[part],
                **{name: values[part] for name, values in facts.items()},
            )
            reason = _fault(states, len(row.tokens), read)
            yield place, Captured(row, None if reason else states, reason)


@torch.inference_mode()
def check_logits(target: Target, row: Row) -> None:
    """Refuse a target whose last state is not what its output layer reads (a state taken before the
    final norm trains without complaint and drafts nonsense): lm_head(last) must be its logits."""
    tokens = row.tokens[None, :CHECKED_TOKENS].long().to(target.device)
    ours = target.logits(target.forward(tokens).last)
    stock = target.model(input_ids=tokens, use_cache=False).logits
    target.require_close("lm_head(last state) and the model's own logits", ours, stock)


def _padded(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """tokens and reply, int64 [B, T], padded on the right, where a causal model never looks."""
    longest = max(len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    reply = torch.zeros_like(tokens)
    for number, row in enumerate(rows):
        tokens[number, : len(row.tokens)] = row.tokens
        reply[number, : len(row.reply)] = row.reply
    return tokens, reply


def choices(target: Target, last: Tensor) -> Tensor:
    """last [P, H] → the target's own choices int64 [P], on its device."""
    return torch.cat([logits.max(-1).indices for logits in _logits(target, last)])


def teacher(target: Target, last: Tensor, top_k: int = 0) -> dict[str, Tensor]:
    """last [P, H] → the facts of States by name, on the CPU."""
    found: dict[str, list[Tensor]] = {}
    for logits in _logits(target, last):
        value, index = logits.max(-1)
        values, ids = logits.topk(top_k) if top_k else (None, None)
        # As logsumexp, which would look for the maximum again and copy twice.
        norm = value + logits.sub_(value[:, None]).exp_().sum(-1).log()
        facts = {"argmax": index.to(torch.int32), "logprob": value - norm, "lognorm": norm}
        if top_k:
            facts["top_ids"] = ids.to(torch.int32)
            facts["top_logprob"] = (values - norm[:, None]).to(torch.float16)
        for name, fact in facts.items():
            found.setdefault(name, []).append(fact)
    return {name: torch.cat(parts).cpu() for name, parts in found.items()}


def _logits(target: Target, last: Tensor) -> Iterator[Tensor]:
    """Float32 logits of rows [P, H], LOGIT_ROWS of them at a time."""
    return (target.logits(part).float() for part in last.split(LOGIT_ROWS))


def _fault(states: States, length: int, read: int) -> str | None:
    if read < length:
        return "fewer-states-than-tokens"
    parts = [states.last, states.lognorm] + ([] if states.aux is None else [states.aux])
    if not all(bool(torch.isfinite(part).all()) for part in parts):
        return "states-not-finite"
    return None

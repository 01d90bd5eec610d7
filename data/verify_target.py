"""What the target itself says of a store: its output layer on stored states, and a second reading.

n tokens of a row, H hidden size, S states compared (auxiliary layers and the last), C candidates.

Tolerances are shares: of the largest logit of a position, and of the length of a state. They add up
from the type that features are stored in and the type that the target computes in; measured, and
the bounds' reasons, in docs/LOG.md.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.core.batch import predicting
from spectrain.core.target import Target
from spectrain.data.shard import RowInfo
from spectrain.data.store import FeatureStore

# Rounding of a type: of logits computed from rounded states; of a state, at most.
_STORED = {
    "float32": (0.0, 0.0),
    "float16": (2e-3, 1e-3),
    "bfloat16": (1e-2, 4e-3),
    "int8": (3e-2, 2.5e-2),
}
# Two ways through the same model, on this machine and on another.
_COMPUTED = {torch.float32: (1e-3, 1e-3), torch.float16: (5e-3, 2e-2), torch.bfloat16: (2e-2, 0.15)}
EACH = 8  # positions of a row that are looked at, or more where there are few rows
READ = 4  # rows that the target reads again
READ_TOKENS = 128  # their first tokens, enough to tell layers apart


@dataclass(frozen=True)
class Facts:
    """How stored states and stored facts agree, over `positions`: share whose likeliest token is
    the stored one; largest difference in units of the largest logit, and what is allowed."""

    positions: int
    same: float
    worst: float
    allowed: float
    wrong: str | None


@dataclass(frozen=True)
class Reading:
    """How stored states and those of a second reading agree, over `tokens`: for each state its
    largest difference (share of its length), and what is allowed."""

    tokens: int
    worst: dict[str, float]
    allowed: float
    wrong: str | None


def sample(store: FeatureStore, positions: int, seed: int) -> list[RowInfo]:
    """Rows of either split for so many positions, in the order of the store."""
    rows = store.rows("train") + store.rows("heldout")
    count = min(max(positions // EACH, READ), len(rows))
    chosen = random.Random(seed).sample(rows, count)
    return sorted(chosen, key=lambda row: row.index)


@torch.inference_mode()
def check_facts(
    store: FeatureStore, target: Target, rows: list[RowInfo], positions: int, seed: int
) -> Facts:
    """lm_head(last) gives the stored choice (or one as likely), log-probability and normaliser."""
    allowed = _allowed(store, target)[0]
    generator = torch.Generator().manual_seed(seed)
    seen = same = 0
    worst, wrong = 0.0, None
    for place, row in enumerate(rows):
        share = positions // len(rows) + (place < positions % len(rows))
        batch = store.batch([row], with_aux=False)
        where = predicting(batch.reply)[0].nonzero().flatten()
        some = torch.randperm(len(where), generator=generator)[:share].sort().values
        if not len(some):
            continue
        choice, logprob, lognorm = (fact[some].to(target.device) for fact in store.teacher(row))
        last = batch.last[0, where[some]].to(target.device, target.dtype)
        logits = target.logits(last).float()
        best, own = logits.max(-1), logits.gather(-1, choice[:, None])[:, 0]
        norm = logits.logsumexp(-1)
        gaps = torch.stack(
            [best.values - own, (own - norm - logprob).abs(), (norm - lognorm).abs()]
        )
        shares = gaps / logits.abs().amax(-1)
        seen, same = seen + len(some), same + int((best.indices == choice).sum())
        worst = max(worst, float(shares.max().nan_to_num(torch.inf)))
        if wrong is None and not bool((shares <= allowed).all()):
            part, at = divmod(int(shares.flatten().nan_to_num(torch.inf).argmax()), len(some))
            name = ("choice", "log-probability", "normaliser")[part]
            wrong = (
                f"row {row.id}, token {int(where[some[at]])}: the output layer gives another "
                f"{name} than is stored, off by {float(gaps[part, at]):.3g}"
            )
    return Facts(seen, same / max(seen, 1), worst, allowed, wrong)


@torch.inference_mode()
def check_states(store: FeatureStore, target: Target, rows: list[RowInfo]) -> Reading:
    """The target, reading rows again, gives the stored states; where it does not, the layer that
    fits best is told."""
    allowed = _allowed(store, target)[1]
    layers = tuple(store.manifest["settings"].get("aux_layers") or ())
    names = [f"layer {layer}" for layer in range(target.num_layers)] + ["last state"]
    tokens = 0
    worst: dict[str, float] = {}
    wrong = None
    for row in rows:
        batch = store.batch([row])
        count = min(row.length, READ_TOKENS)
        tokens += count
        every = tuple(range(target.num_layers))
        fresh = target.forward(batch.tokens[:, :count].to(target.device), aux_layers=every)
        candidates = [*fresh.aux[0].chunk(target.num_layers, -1), fresh.last[0]]
        stored = {}
        if layers:
            parts = batch.aux[0, :count].chunk(len(layers), -1)
            stored = {f"layer {layer}": part for layer, part in zip(layers, parts, strict=True)}
        kept = torch.ones(count, dtype=torch.bool)
        if not store.last_everywhere:
            kept = predicting(batch.reply)[0, :count]
        stored["last state"] = batch.last[0, :count]
        for name, states in stored.items():
            some = (kept if name == "last state" else torch.ones_like(kept)).to(target.device)
            if not some.any():
                continue
            states = states.to(target.device)[some].float()
            errors = [_error(states, each[some].float()) for each in candidates]
            own = errors[names.index(name)]
            worst[name] = max(worst.get(name, 0.0), float(own.max()))
            wrong = wrong or _misfit(row, name, names, errors, allowed)
    return Reading(tokens, worst, allowed, wrong)


def _misfit(
    row: RowInfo, name: str, names: list[str], errors: list[Tensor], allowed: float
) -> str | None:
    """What is wrong with states of `name`, whose errors by candidate `names` are `errors` [C] of
    [n]: they are too large, or (neighbouring layers may differ by little) another one fits."""
    own = errors[names.index(name)]
    middle = [float(error.median()) for error in errors]
    best = min(range(len(middle)), key=middle.__getitem__)
    fits = names[best] == name or middle[best] == float(own.median())
    if fits and bool((own <= allowed).all()):
        return None
    text = f"row {row.id}: {name} is not what the target gives, {float(own.max()):.2g} off at worst"
    if fits:
        return text
    return f"{text}; {names[best]} fits best ({middle[best]:.2g} against {float(own.median()):.2g})"


def _error(stored: Tensor, fresh: Tensor) -> Tensor:
    """Length of the difference over that of the fresh state, [n]; infinite where not a number."""
    error = (stored - fresh).norm(dim=-1) / fresh.norm(dim=-1).clamp(min=1e-12)
    return error.nan_to_num(torch.inf)


def _allowed(store: FeatureStore, target: Target) -> tuple[float, float]:
    stored = _STORED[store.manifest["settings"]["dtype"]]
    computed = _COMPUTED[target.dtype]
    return stored[0] + computed[0], stored[1] + computed[1]

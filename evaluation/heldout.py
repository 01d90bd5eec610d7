"""A head on held-out rows while it is being trained: acceptance, τ and the terms of its loss.

Greedy and teacher-forced, by the definitions of `eval-alpha`, without intervals. The work is cut
into parts that may be done by different processes; the sums of all parts make the numbers.

K terms of the objective; γ draft tokens per target forward, as many as the head is trained for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from spectrain.core.batch import Batch
from spectrain.evaluation.alpha import Verifier, acceptance
from spectrain.evaluation.bootstrap import Floats, ratio
from spectrain.evaluation.summary import Conversation, totals, values
from spectrain.heads.base import DraftHead


@torch.inference_mode()
def tally(verifier: Verifier, head: DraftHead, batch: Batch) -> dict[str, Floats]:
    """`summary.totals` of a batch, and its loss and count [K]; head and batch of one type, on one
    device, the head in eval mode."""
    (rows,) = acceptance(verifier, head, batch, head.config.steps, (0.0,))
    found = totals([Conversation("", replies) for replies in rows], head.config.steps)
    objective = head.objective(batch)
    return found | {
        "loss": objective.loss.double().cpu().numpy(),
        "count": objective.count.double().cpu().numpy(),
    }


def nothing(head: DraftHead) -> dict[str, Floats]:
    """The tally of no rows."""
    terms = np.zeros(len(head.weights(1.0)))
    return totals([], head.config.steps) | {"loss": terms, "count": terms}


def told(sums: dict[str, Floats], weights: Sequence[float]) -> dict[str, Any]:
    """What a summed tally says, as plain JSON values; None where undefined or not finite.

    draft: γ; tau: for that γ; marginal, conditional [γ]; loss: of the terms, weighed by `weights`.
    """
    found = values(sums)
    terms = ratio(sums["loss"], sums["count"])
    known = ~np.isnan(terms)
    weighed = np.asarray(weights)[known] * terms[known]
    return {
        "tokens": int(sums["tokens"][0]),
        "draft": len(found["tau"]),
        "tau": found["tau"][-1],
        "marginal": found["marginal"],
        "conditional": found["conditional"],
        "loss": _number(weighed.sum()) if known.any() else None,
        "loss_terms": [_number(term) for term in terms],
    }


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None

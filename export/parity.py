"""Whether two heads are the same one: every tensor, and every draft.

B batch, n tokens, K draft steps, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.core.batch import Features
from spectrain.core.target import Target
from spectrain.heads.base import DraftHead

PROMPT, ROWS = 9, 2  # tokens of a prompt that drafts are compared behind, and prompts


def differences(left: DraftHead, right: DraftHead, target: Target) -> list[str]:
    """What differs between two bound heads of the same type; empty when nothing does."""
    mine, theirs = left.state_dict(), right.state_dict()
    found = [f"{name} is in one of them only" for name in sorted(mine.keys() ^ theirs.keys())]
    found += [
        f"{name} differs"
        for name in sorted(mine.keys() & theirs.keys())
        if not torch.equal(mine[name].cpu(), theirs[name].cpu())
    ]
    if left.needs != right.needs:
        found.append(f"{left.needs} against {right.needs}")
    if not found:
        # A layout without a place for K gives back a head of its family's default.
        steps = max(left.config.steps, right.config.steps)
        steps = min(steps, left.longest_draft, right.longest_draft)
        told = prompts(left, target)
        both = (drafted(head, *told, steps=steps) for head in (left, right))
        for step, (one, other) in enumerate(zip(*both, strict=True)):
            if not torch.equal(one, other):
                gap = (one.float() - other.float()).abs().max().item()
                found.append(f"logits of draft step {step} differ by {gap:.3g}")
    return found


def prompts(head: DraftHead, target: Target) -> tuple[Tensor, Features]:
    """Random tokens [B, n+1], and what the target says at the first n of them."""
    generator = torch.Generator().manual_seed(0)
    usable = target.readout.usable
    tokens = torch.randint(0, usable, (ROWS, PROMPT + 1), generator=generator).to(target.device)
    with torch.inference_mode():
        return tokens, target.forward(tokens[:, :-1], aux_layers=head.needs.aux_layers)


@torch.inference_mode()
def drafted(head: DraftHead, tokens: Tensor, features: Features, *, steps: int) -> list[Tensor]:
    """Logits [B, D] of the first `steps` guesses of a greedy chain behind prompts, step by step.

    Each step reads all that a head reads: features, positions, its cache, its own outputs.
    """
    rows, count = tokens.shape
    counts = torch.full((rows,), count - 1, device=tokens.device)
    state = head.start(rows, count + steps)
    logits = [head.begin(state, tokens, features, counts)]
    parents = torch.zeros(rows, 1, dtype=torch.int64, device=tokens.device)
    for _ in range(steps - 1):
        guess = head.to_target(logits[-1].argmax(-1, keepdim=True))
        logits.append(head.expand(state, guess, parents)[:, 0])
    return logits

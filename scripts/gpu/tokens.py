"""Parts 1 to 3 of gpu_validate.py: are the tokens right?"""

from __future__ import annotations

from typing import Any

import torch
from gpu.scene import WAYS, Scene, good_head, make_head

from spectrain.core import attention
from spectrain.core.target import Target
from spectrain.generator.completion import Completion
from spectrain.generator.sampling import Sampling
from spectrain.generator.speculate import Generator

# In bfloat16 two routes may differ where the two tokens are this close, in parts of the largest
# logit: four times the type's own step of 2⁻⁷.
BF16_BOUND = 4 * 2.0**-7
# In float32 they must not, unless they are as good as equal.
FP32_BOUND = 1e-5
SAMPLED = Sampling(0.8, top_k=50, top_p=0.95, seed=7, repetition_penalty=1.1, min_new_tokens=4)


def greedy(scene: Scene) -> dict[str, Any]:
    """Part 1: in float32 every way gives the tokens of the library's `generate`."""
    target, prompts, new = scene.target("small", torch.float32), scene.prompts(), _new(scene)
    truths = _library(target, prompts, new)
    heads = {
        "eagle3": make_head(target, "eagle3", steps=4),
        "good": good_head(target, 0.0),
        "half good": good_head(target, 0.5),
    }
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        f"{name}, {way}": (head, options)
        for name, head in heads.items()
        for way, options in WAYS.items()
    }
    ways |= {"plain": (None, {}), "lookup": (None, {"lookup": 3, "draft_tokens": 4})}
    rows = []
    for name, (head, options) in ways.items():
        for count in (1, 4):
            if scene.time_for(f"{name}, {count} rows"):
                done = Generator(target, head, **options).generate(prompts, new, rows=count)
                rows.append({"way": name, "rows": count, **_against(target, prompts, truths, done)})
    wrong = [row for row in rows if row["worst_margin"] > FP32_BOUND]
    accepted = max(row["accepted_per_step"] for row in rows)
    return {
        "verdict": "pass" if not wrong and accepted > 2 else "fail",
        "says": f"{len(rows) - len(wrong)} of {len(rows)} ways give the library's tokens; up to "
        f"{accepted:.2f} drafts accepted a step",
        "bound": FP32_BOUND,
        "ways": rows,
    }


FAMILIES = {
    "eagle3": {"steps": 4},
    "eagle1": {"steps": 3},
    "medusa": {"steps": 4},
    "mtp-parallel": {"steps": 4},
    "mtp-sequential": {"steps": 4},
    "mtp-sequential, shared": {"steps": 3, "shared": True},
}


def graphs(scene: Scene) -> dict[str, Any]:
    """Part 2: a step replayed from a CUDA graph gives the tokens of the plain step."""
    target, prompts = scene.target("small", torch.float32), scene.prompts()[:5]
    cases: dict[str, Any] = {"half good": lambda: good_head(target, 0.5)} | {
        name: lambda name=name: make_head(target, name.split(",")[0], **FAMILIES[name])
        for name in FAMILIES
    }
    settings = {"greedy": (Sampling(), {}), "sampled": (SAMPLED, {"proposal": "top-k"})}
    settings["drawn"] = SAMPLED, {"proposal": "drawn"}
    rows = []
    for name, make in cases.items():
        head = make()
        for way, options in WAYS.items():
            for how, (sampling, more) in settings.items():
                what = f"{name}, {way}, {how}"
                # Sampling is the same for all families, and grown trees are not drawn.
                same = how != "greedy" and name not in ("half good", "eagle3", "mtp-sequential")
                if same or (how == "drawn" and way == "grown tree") or not scene.time_for(what):
                    continue
                one, two = (
                    Generator(target, head, **options, **more, graphs=on).generate(
                        prompts, 12 if scene.rehearse else 24, sampling, rows=3
                    )
                    for on in (True, False)
                )
                rows.append({"case": what, "different": _different(one, two)})
    wrong = [row["case"] for row in rows if row["different"]]
    return {
        "verdict": "fail" if wrong else "pass",
        "says": f"{len(rows) - len(wrong)} of {len(rows)} cases give the same tokens"
        + (f"; not {', '.join(wrong[:4])}" if wrong else ""),
        "cases": rows,
    }


def bfloat16(scene: Scene) -> dict[str, Any]:
    """Part 3: in bfloat16 replies leave those of plain decoding only where two tokens are all but
    equally likely."""
    target, prompts, new = scene.target("small", torch.bfloat16), scene.prompts(), _new(scene)
    truths = [c.tokens for c in Generator(target).generate(prompts, new, rows=1)]
    exact = [c.tokens for c in Generator(scene.target("small", torch.float32)).generate(
        prompts, new, rows=1)]  # fmt: skip
    head, rows = good_head(target, 0.5), []
    for way, options in {**WAYS, "lookup": {"lookup": 3, "draft_tokens": 4}}.items():
        for count in (1, 4):
            if scene.time_for(f"{way}, {count} rows"):
                own = None if way == "lookup" else head
                done = Generator(target, own, **options).generate(prompts, new, rows=count)
                rows.append({"way": way, "rows": count, **_against(target, prompts, truths, done)})
    worst = max((row["worst_margin"] for row in rows), default=0.0)
    leaving = sum(row["different"] for row in rows)
    float32 = sum(left != right for left, right in zip(truths, exact, strict=True))
    return {
        "verdict": "pass" if rows and worst <= BF16_BOUND else "fail",
        "says": f"{leaving} of {len(rows) * len(prompts)} replies leave the plain ones, at margins "
        f"of at most {worst:.4f} of the largest logit (bound {BF16_BOUND:.4f}); the plain ones "
        f"leave float32's in {float32} of {len(prompts)}",
        "bound": BF16_BOUND,
        "plain_different_from_float32": float32,
        "ways": rows,
    }


def _new(scene: Scene) -> int:
    return 12 if scene.rehearse else 64


def _library(target: Target, prompts: list[torch.Tensor], new: int) -> list[list[int]]:
    """`transformers` greedy decoding with its own attention and cache, one prompt at a time."""
    target.model.set_attn_implementation("eager")
    replies = []
    for prompt in prompts:
        ids = prompt[None].to(target.device)
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=list(target.stop_ids),
        )
        replies.append(out[0, len(prompt) :].tolist())
    target.model.set_attn_implementation(attention.NAME)
    return replies


def _against(
    target: Target, prompts: list[torch.Tensor], truths: list[list[int]], done: list[Completion]
) -> dict[str, Any]:
    """How many replies are not `truths`, and how far apart the two tokens are where they part."""
    margins = []
    for prompt, truth, got in zip(prompts, truths, done, strict=True):
        if got.tokens != truth:
            margins.append(_margin(target, prompt.tolist(), truth, got.tokens))
    forwards = sum(c.forwards for c in done)
    return {
        "replies": len(done),
        "different": len(margins),
        "worst_margin": max(margins, default=0.0),
        "accepted_per_step": (sum(c.committed for c in done) - forwards) / max(1, forwards),
    }


@torch.inference_mode()
def _margin(target: Target, prompt: list[int], one: list[int], two: list[int]) -> float:
    """Between the logits of the tokens where two replies part, in parts of the largest logit."""
    place = next(
        (i for i, pair in enumerate(zip(one, two, strict=False)) if len({*pair}) > 1), None
    )
    if place is None:  # one goes on where the other ends: no rounding does that
        return float("inf")
    text = torch.tensor([prompt + one[:place]], device=target.device)
    logits = target.logits(target.forward(text).last[0, -1]).float()
    return float((logits[one[place]] - logits[two[place]]).abs() / logits.abs().max())


def _different(one: list[Completion], two: list[Completion]) -> int:
    return sum(a.tokens != b.tokens for a, b in zip(one, two, strict=True))

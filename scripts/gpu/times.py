"""Part 4 of gpu_validate.py: what a step of an 8B model takes, beside what reading its bytes takes.

B rows, n tokens in a forward, γ drafted tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu.scene import WAYS, Scene, make_head
from torch import Tensor

from spectrain.core.target import Target
from spectrain.generator.replay import Replay
from spectrain.generator.rules import Rules
from spectrain.generator.run import Run
from spectrain.generator.speculate import Generator
from spectrain.heads.base import DraftHead

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
GAMMA = 5
# Above this a step is called slow: the weights are read, and there is time for as much again.
SLOW = 2.0


@dataclass(frozen=True)
class Costs:
    """bandwidth of a copy, bytes read and written per second · bytes of weights that a forward of
    the target and of the head reads"""

    bandwidth: float
    target: int
    head: int

    def ms(self, size: float) -> float:
        return 1e3 * size / self.bandwidth


def times(scene: Scene) -> dict[str, Any]:
    """Milliseconds with and without graphs, and their ratio to the floor: the bytes of weights and
    cache that have to be read, at the bandwidth that a copy reaches here."""
    target = scene.target("8B", torch.bfloat16)
    guesses = min(32000, target.vocab_size // 2)
    head = make_head(target, "eagle3", init="random", draft_vocab_size=guesses, steps=GAMMA)
    decoder = _bytes(target.decoder.layers) + _bytes(target.decoder.norm)
    costs = Costs(bandwidth(scene), decoder + target.readout.weight.nbytes, _bytes(head))
    contexts = (24,) if scene.rehearse else (512, 4096)
    tables = [
        _table(scene, target, head, rows, context, costs)
        for context in contexts
        for rows in (1, 8)
        if scene.time_for(f"{rows} rows, {context} tokens")
    ]
    kernels = _kernels(scene, target, contexts[0]) if scene.time_for("kernels") else []
    one, eight = (tables[0]["forward_ms"][width] for width in ("1", "8"))
    steps = (f"{way} {ms['graph']:.2f} ms" for way, ms in tables[0]["step_ms"].items())
    return {
        "verdict": "pass" if one["graph_over_floor"] <= SLOW else "slow",
        "says": f"one row: plain forward {one['graph']:.2f} ms, {one['graph_over_floor']:.2f} × "
        f"floor (bound {SLOW}); 8 tokens {eight['graph'] / one['graph']:.2f} × 1 token; steps "
        + ", ".join(steps),
        "costs": vars(costs),
        "tables": tables,
        "kernels_of_a_forward_of_8": kernels,
    }


def _table(
    scene: Scene, target: Target, head: DraftHead, rows: int, context: int, costs: Costs
) -> dict[str, Any]:
    """All forwards and steps of `rows` sequences of `context` tokens."""
    grain = 64 if scene.rehearse else 512
    view = -(-(context + max(WIDTHS) + 1) // grain) * grain
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, 300, (rows, context), generator=generator).to(target.device)
    forwards, kv = _forwards(scene, target, head, tokens, view, costs)
    return {
        "rows": rows,
        "context": context,
        "kv_bytes": kv,
        "forward_ms": forwards,
        "draft_ms": _drafts(scene, target, head, tokens, view, costs),
        "step_ms": _steps(scene, target, head, tokens, kv, costs),
    }


def _forwards(
    scene: Scene, target: Target, head: DraftHead, tokens: Tensor, view: int, costs: Costs
) -> tuple[dict[str, Any], int]:
    """The target over 1 to 64 tokens behind the context, and the bytes of cache that it reads."""
    rows, context = tokens.shape
    cache, aux = target.new_cache(rows, view), head.needs.aux_layers
    target.forward(tokens, cache=cache, view=view)
    cache.commit(torch.full((rows,), context, device=target.device))
    kv = sum(part.nbytes for pair in cache._layers.values() for part in pair) * context // view

    def forward(width: int) -> Tensor:
        read = target.forward(tokens[:, :width], cache=cache, aux_layers=aux, view=view)
        return target.logits(read.last).argmax(-1)

    return {
        str(width): _both(scene, partial(forward, width), costs.ms(costs.target + kv))
        for width in WIDTHS
        if width <= context and scene.time_for(f"forward of {width}, {rows} rows, {context}")
    }, kv


def _drafts(
    scene: Scene, target: Target, head: DraftHead, tokens: Tensor, view: int, costs: Costs
) -> dict[str, Any]:
    """The head's reading of what a step committed, and γ−1 further levels."""
    rows, context = tokens.shape
    features = target.forward(tokens, aux_layers=head.needs.aux_layers)
    state = head.start(rows, view)
    begun = torch.full((rows,), context - 1, device=target.device)
    head.begin(state, torch.cat([tokens, tokens[:, :1]], 1), features, begun)
    none, block, read = torch.zeros_like(begun), tokens[:, : GAMMA + 1], features[:, : GAMMA + 1]
    parents = torch.zeros(rows, 1, dtype=torch.int64, device=target.device)

    def draft(depth: int) -> Tensor:
        logits = head.extend(state, block, read, none, view)
        for _ in range(depth - 1):
            guess = head.to_target(logits.argmax(-1)).reshape(rows, 1)
            logits = head.expand(state, guess, parents)[:, 0]
        return logits

    return {
        str(depth): _both(scene, partial(draft, depth), costs.ms(costs.head * depth))
        for depth in (1, GAMMA)
        if scene.time_for(f"draft of {depth}, {rows} rows, {context}")
    }


def _steps(
    scene: Scene, target: Target, head: DraftHead, tokens: Tensor, kv: int, costs: Costs
) -> dict[str, Any]:
    """Whole steps, the host's bookkeeping and its reading of the result included. The head's
    guesses are random: nearly nothing is accepted, so the lengths hardly grow."""
    rows, context = tokens.shape
    prompts, steps = list(tokens.cpu()), {}
    ways = {"plain": (None, {}), "chain": (head, {"draft_tokens": GAMMA})}
    ways |= {way: (head, options) for way, options in WAYS.items() if way != "chain"}
    for way, (own, options) in ways.items():
        if not scene.time_for(f"{way} step, {rows} rows, {context}"):
            continue
        taken = {}
        for name, on in (("graph", True), ("eager", False)):
            drafter = Generator(target, own, **options).drafter
            slots = -(-(context + 300) // 512) * 512
            run = Run(target, drafter, Rules(), [], rows, slots, on)
            run.admit(list(range(rows)), prompts, list(range(rows)))
            texts = [prompt.tolist() for prompt in prompts]
            taken[name] = median(scene, partial(run.step, texts))
        drafted = costs.head * drafter.depth if own else 0
        steps[way] = taken | _beside(taken["graph"], costs.ms(costs.target + kv + drafted))
    return steps


def _both(scene: Scene, work: Callable[[], Tensor], floor: float) -> dict[str, float]:
    """Milliseconds of the work, replayed and plain."""
    replay = Replay(scene.device)
    graph, eager = median(scene, lambda: replay("", work)), median(scene, work)
    return {"graph": graph, "eager": eager, **_beside(graph, floor)}


def _beside(graph: float, floor: float) -> dict[str, float]:
    return {"floor": floor, "graph_over_floor": graph / floor}


def median(scene: Scene, work: Callable[[], Any], repeats: int = 11) -> float:
    """Milliseconds from an idle device to an idle device, the host's part included."""
    for _ in range(3):  # plain, captured, replayed
        work()
    taken = []
    for _ in range(3 if scene.rehearse else repeats):
        _idle(scene)
        started = time.perf_counter()
        work()
        _idle(scene)
        taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken)


def bandwidth(scene: Scene) -> float:
    """Bytes read and written per second by a copy."""
    source = torch.zeros((1 << 22) if scene.rehearse else (1 << 31), dtype=torch.int8).to(
        scene.device
    )
    copy = torch.empty_like(source)
    return 2e3 * source.nbytes / median(scene, lambda: copy.copy_(source))


def _bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _idle(scene: Scene) -> None:
    if scene.device.type == "cuda":
        torch.cuda.synchronize()


def _kernels(scene: Scene, target: Target, context: int) -> list[dict[str, Any]]:
    """What takes the time of a forward of 8 tokens, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = scene.device.type == "cuda"
    tokens = torch.randint(3, 300, (1, context), generator=torch.Generator().manual_seed(5))
    cache = target.new_cache(1, context + 512)
    target.forward(tokens.to(target.device), cache=cache)
    cache.commit(torch.tensor([context], device=target.device))
    block = tokens[:, :8].to(target.device)
    for _ in range(2):
        target.logits(target.forward(block, cache=cache).last)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        target.logits(target.forward(block, cache=cache).last)
        _idle(scene)
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = sorted(seen.key_averages(), key=lambda row: -getattr(row, key))[:12]
    return [{"name": r.key[:80], "calls": r.count, "us": round(getattr(r, key))} for r in rows]

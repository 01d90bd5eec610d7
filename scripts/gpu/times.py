"""Part 4 of gpu_validate.py: what a step of an 8B model takes, beside what reading its bytes takes.

B rows, n tokens in a forward, γ drafted tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
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


def times(scene: Scene) -> dict[str, Any]:
    """Milliseconds with and without graphs, and their ratio to the floor: the bytes of weights and
    cache that have to be read, at the bandwidth that a copy reaches here."""
    target = scene.target("8B", torch.bfloat16)
    head = make_head(target, "eagle3", init="random", draft_vocab_size=min(
        32000, target.vocab_size // 2), steps=GAMMA)  # fmt: skip
    bandwidth = _bandwidth(scene)
    weights = {
        "target": _bytes(target.decoder.layers) + _bytes(target.decoder.norm)
        + target.readout.weight.nbytes,
        "head": _bytes(head),
    }  # fmt: skip
    contexts = (24,) if scene.rehearse else (512, 4096)
    tables = []
    for context in contexts:
        for rows in (1, 8):
            if scene.time_for(f"{rows} rows behind {context} tokens"):
                tables.append(_table(scene, target, head, rows, context, bandwidth, weights))
    kernels = _kernels(scene, target, contexts[0]) if scene.time_for("kernels") else []
    if not tables:
        return {"verdict": "fail", "says": "there was no time for anything"}
    first = tables[0]
    ratio = first["forward_ms"]["1"]["graph_over_floor"]
    rise = first["forward_ms"]["8"]["graph"] / first["forward_ms"]["1"]["graph"]
    return {
        "verdict": "pass" if ratio <= SLOW else "slow",
        "says": f"one row, plain forward {first['forward_ms']['1']['graph']:.2f} ms = {ratio:.2f} × "
        f"floor (bound {SLOW}); 8 tokens {rise:.2f} × 1 token; steps "
        + ", ".join(f"{k} {v['graph']:.2f} ms" for k, v in first["step_ms"].items()),
        "copy_gb_per_s": bandwidth / 1e9,
        "weight_bytes": weights,
        "tables": tables,
        "kernels_of_a_verify_of_8": kernels,
    }


def _table(
    scene: Scene,
    target: Target,
    head: DraftHead,
    rows: int,
    context: int,
    bandwidth: float,
    weights: dict[str, int],
) -> dict[str, Any]:
    """All forwards and steps of `rows` sequences of `context` tokens."""
    grain = 64 if scene.rehearse else 512
    view = -(-(context + max(WIDTHS) + 1) // grain) * grain
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, 300, (rows, context), generator=generator).to(target.device)
    cache, aux = target.new_cache(rows, view), head.needs.aux_layers
    features = target.forward(tokens, cache=cache, aux_layers=aux, view=view)
    cache.commit(torch.full((rows,), context, device=target.device))
    kv = sum(t.nbytes for pair in cache._layers.values() for t in pair) * context // view
    floor = 1e3 * (weights["target"] + kv) / bandwidth

    def forward(width: int) -> Tensor:
        read = target.forward(tokens[:, :width], cache=cache, aux_layers=aux, view=view)
        return target.logits(read.last).argmax(-1)

    widths = [width for width in WIDTHS if width <= context]
    forwards = {
        str(width): _both(scene, lambda width=width: forward(width), floor)
        for width in widths
        if scene.time_for(f"forward of {width} tokens, {rows} rows behind {context}")
    }

    state = head.start(rows, view)
    begun = torch.full((rows,), context - 1, device=target.device)
    head.begin(state, torch.cat([tokens, tokens[:, :1]], 1), features, begun)
    none, block = torch.zeros_like(begun), tokens[:, : GAMMA + 1]
    parents = torch.zeros(rows, 1, dtype=torch.int64, device=target.device)

    def draft(depth: int) -> Tensor:
        logits = head.extend(state, block, features[:, : GAMMA + 1], none, view)
        for _ in range(depth - 1):
            guess = head.to_target(logits.argmax(-1)).reshape(rows, 1)
            logits = head.expand(state, guess, parents)[:, 0]
        return logits

    drafts = {
        str(depth): _both(
            scene, lambda depth=depth: draft(depth), 1e3 * weights["head"] * depth / bandwidth
        )  # fmt: skip
        for depth in (1, GAMMA)
        if scene.time_for(f"draft of {depth}, {rows} rows behind {context}")
    }
    del cache, state, features
    steps = {}
    ways = {"plain": (None, {}), "chain": (head, {"draft_tokens": GAMMA})}
    ways |= {way: (head, options) for way, options in WAYS.items() if way != "chain"}
    for way, (own, options) in ways.items():
        if scene.time_for(f"{way} step, {rows} rows behind {context}"):
            drafter = Generator(target, own, **options).drafter
            steps[way] = {
                name: _step(scene, target, drafter, tokens, on)
                for name, on in (("graph", True), ("eager", False))
            }
            read = weights["target"] + kv + (weights["head"] * drafter.depth if own else 0)
            steps[way]["floor"] = 1e3 * read / bandwidth
            steps[way]["graph_over_floor"] = steps[way]["graph"] / steps[way]["floor"]
    return {
        "rows": rows,
        "context": context,
        "kv_bytes": kv,
        "forward_ms": forwards,
        "draft_ms": drafts,
        "step_ms": steps,
    }


def _both(scene: Scene, work: Callable[[], Tensor], floor: float) -> dict[str, float]:
    """Milliseconds of the work, replayed and plain."""
    replay = Replay(scene.device)
    result = {
        "graph": _median(scene, lambda: replay("", work)),
        "eager": _median(scene, work),
        "floor": floor,
    }
    return result | {"graph_over_floor": result["graph"] / floor}


def _median(scene: Scene, work: Callable[[], Any], repeats: int = 11) -> float:
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


def _step(scene: Scene, target: Target, drafter: Any, tokens: Tensor, graphs: bool) -> float:
    """Milliseconds of a whole step, the host's bookkeeping and its reading of the result included.
    The head's guesses are random: nearly nothing is accepted, so the lengths hardly grow."""
    rows, context = tokens.shape
    run = Run(target, drafter, Rules(), [], rows, -(-(context + 300) // 512) * 512, graphs)
    prompts = list(tokens.cpu())
    run.admit(list(range(rows)), prompts, list(range(rows)))
    texts = [prompt.tolist() for prompt in prompts]
    return _median(scene, lambda: run.step(texts))


def _bandwidth(scene: Scene) -> float:
    """Bytes read and written per second by a copy."""
    source = torch.zeros((1 << 22) if scene.rehearse else (1 << 31), dtype=torch.int8).to(
        scene.device
    )
    copy = torch.empty_like(source)
    return 2e3 * source.nbytes / _median(scene, lambda: copy.copy_(source))


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

"""Memory of the loss of K heads over one vocabulary: the plain way against chunks.

    python scripts/bench_mtp_memory.py [--tiny] [--rows 512] [--vocabulary 129280] [--json]

K heads' states [R, H] meet one frozen output layer [V, H]; measured is one forward and backward:

    plain    logits of every head, cross-entropy, one backward at the end
    by head  the same, with a backward after each head, so that one head's logits live at a time
    chunked  heads/linear_loss.py: a chunk's logits at a time, the gradient in the same pass

On a CPU each runs in a process of its own and what counts is its peak memory above that of a
process that holds the inputs alone; on a GPU it is the allocator's peak above the inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from spectrain.core.environment import describe, peak_rss_mb, settle

METHODS = ("plain", "by head", "chunked")


def main() -> None:
    options = _options()
    settle()
    if options.method is not None:
        print(json.dumps(measure(options)))
        return
    results = {name: _child(name) for name in ("nothing", *METHODS)}
    start = results.pop("nothing")["peak_mb"]
    rows = [
        {"method": name, "mb": result["peak_mb"] - start, "loss": result["loss"]}
        for name, result in results.items()
    ]
    import torch

    report = {
        "results": rows,
        "one_head_of_logits_mb": options.rows * options.vocabulary * 4 / 1e6,
        **{key: getattr(options, key) for key in ("rows", "vocabulary", "hidden", "heads")},
        "autocast": options.autocast,
        "environment": describe(torch.device(options.device)),
    }
    print(json.dumps(report, indent=1) if options.json else render(report))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=129280)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--autocast", action="store_true", help="products in bfloat16")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--method", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.rows, options.vocabulary, options.hidden = 1024, 32000, 64
    return options


def _child(method: str) -> dict[str, float]:
    """Measure one method in a fresh process: peak memory never falls again within one."""
    command = [sys.executable, __file__, *sys.argv[1:], "--method", method]
    # Freed blocks go back at once, so that the peak is that of what is needed.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One forward and backward of one method: its peak and its loss."""
    import torch

    import spectrain.heads.linear_loss  # noqa: F401  (code counts as input, too)

    random = torch.Generator().manual_seed(0)
    device = torch.device(options.device)
    shape = (options.heads, options.rows, options.hidden)
    hidden = torch.randn(shape, generator=random).to(device).requires_grad_()
    # In place: a copy of the inputs would count as their peak and hide what a method takes.
    weight = torch.randn(options.vocabulary, options.hidden, generator=random).mul_(0.02)
    weight = weight.to(device)
    labels = torch.randint(0, options.vocabulary, (options.rows,), generator=random).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loss = 0.0
    if options.method != "nothing":
        with torch.autocast(device.type, torch.bfloat16, enabled=options.autocast):
            loss = run(options.method, hidden, weight, labels)
    on_gpu = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() / 1e6 if on_gpu else peak_rss_mb()
    return {"peak_mb": peak, "loss": loss}


def run(method: str, hidden, weight, labels) -> float:
    """hidden [K, R, H], weight [V, H], labels [R] → the loss, gradients in hidden.grad"""
    import torch
    import torch.nn.functional as F

    from spectrain.heads.linear_loss import linear_cross_entropy

    total = hidden.new_zeros(())
    for state in hidden:
        if method == "chunked":
            keep = torch.ones_like(labels, dtype=torch.bool)
            loss, _ = linear_cross_entropy(
                state, weight, None, lambda start, stop: labels[start:stop], keep
            )
        else:
            logits = F.linear(state, weight).float()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            del logits
        if method == "by head":
            loss.backward()
            loss = loss.detach()
        total = total + loss
    if method != "by head":
        total.backward()
    return float(total.detach())


def render(report: dict) -> str:
    """A small table."""
    lines = [
        f"{report['heads']} heads, {report['rows']} rows, vocabulary {report['vocabulary']:,}, "
        f"hidden size {report['hidden']}{', autocast' if report['autocast'] else ''}: "
        f"one head's logits are {report['one_head_of_logits_mb']:,.0f} MB",
        f"{'method':<10}{'peak above the inputs':>24}{'loss':>16}",
    ]
    for row in report["results"]:
        lines.append(f"{row['method']:<10}{row['mb']:>21,.0f} MB{row['loss']:>16.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

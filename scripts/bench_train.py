"""One training step of an EAGLE-3 head: time, share of its FLOP floor, memory.

    python scripts/bench_train.py [--length 512] [--batch 2] [--steps 7] [--draft-vocab 8192]
                                  [--share 0.6] [--rounds 5] [--whole] [--tiny] [--json]

Shapes of SmolLM2-135M, random weights and features, float32, AdamW, output layer trained. Each row
is a prompt and a reply of `share` of its tokens. `--whole` keeps the whole graph until the backward
pass, as a plain loop does; without it the gradient is taken in parts (heads/in_parts.py).

    tokens/s   all tokens of the batch over the median wall time of a step
    of floor   the FLOPs that the maths asks for (`floor`) over the throughput of a large product in
               the same process, as a share of the step's process time
    memory     the most resident at once above what was resident before the step: parameters,
               optimiser and inputs; gradients count. In a process of its own, where freed blocks go
               back to the system at once
    kept       bytes that autograd's graph holds between forward and backward, the inputs aside
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from spectrain.core.environment import describe, settle

H, I, Q, G, SIZE, V = 576, 1536, 9, 3, 64, 49152  # SmolLM2-135M


def main() -> None:
    options = _options()
    settle()
    if options.part is not None:
        print(json.dumps(PARTS[options.part](options)))
        return
    report = {**_child("time"), **_child("memory")}
    names = ("length", "batch", "steps", "draft_vocab", "share", "whole", "rounds", "threads")
    report |= {name: getattr(options, name) for name in names}
    import torch

    report["environment"] = describe(torch.device("cpu"))
    print(json.dumps(report, indent=1) if options.json else render(report))


def _options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=512, help="tokens of a row, T")
    parser.add_argument("--batch", type=int, default=2, help="rows, B")
    parser.add_argument("--steps", type=int, default=7, help="draft steps, K")
    parser.add_argument("--draft-vocab", type=int, default=8192, help=f"D; {V} is all there are")
    parser.add_argument("--share", type=float, default=0.6, help="supervised share of the tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="keep the whole graph")
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", choices=("time", "memory"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.length, options.batch, options.steps, options.draft_vocab = 48, 1, 2, 512
        options.rounds, options.threads = 2, 1
    return options


def _child(part: str) -> dict:
    """One part in a fresh process."""
    given = {"MALLOC_MMAP_THRESHOLD_": "100000"} if part == "memory" else {}
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | given
    )
    return json.loads(done.stdout)


class Work:
    """A head, its optimiser and one batch; `step` trains on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from torch import nn

        from spectrain.core.batch import Batch
        from spectrain.core.readout import Readout
        from spectrain.heads.base import TargetFacts
        from spectrain.heads.eagle3 import Eagle3Config, Eagle3Head

        torch.manual_seed(0)
        torch.set_num_threads(options.threads)
        embedding, output = nn.Embedding(V, H), nn.Linear(H, V, bias=False)
        output.weight = embedding.weight
        nn.init.normal_(embedding.weight, std=0.1).requires_grad_(False)
        facts = {"name": "random", "fingerprint": "", "hidden_size": H, "num_layers": 30}
        self.head = Eagle3Head(
            Eagle3Config(
                steps=options.steps,
                step_decay=0.8,
                vocab_size=V,
                draft_vocab_size=options.draft_vocab,
                target=TargetFacts(**facts, vocab_size=V),
                hidden_size=H,
                intermediate_size=I,
                num_attention_heads=Q,
                num_key_value_heads=G,
                head_dim=SIZE,
                rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
                max_position_embeddings=8192,
                aux_layers=(1, 14, 26),
                train_lm_head=True,
            )
        ).train()
        self.head.bind(Readout(embedding, output, None, V))
        shape = options.batch, options.length
        tokens = torch.randint(0, V, shape)
        reply = torch.zeros(shape, dtype=torch.int64)
        reply[:, options.length - round(options.share * options.length) :] = 1
        # Every argmax is in the draft vocabulary, the first D tokens: all rows are taught.
        argmax = torch.randint(0, options.draft_vocab, shape)
        self.batch = Batch(
            tokens, reply, torch.randn(*shape, 3 * H), torch.randn(*shape, H), argmax
        )
        self.counts = self.head.counts(self.batch)
        self.scale = torch.tensor(self.head.weights(0.0)) / self.counts.clamp(min=1)
        self.whole = options.whole
        learnt = [value for value in self.head.parameters() if value.requires_grad]
        self.optimizer = torch.optim.AdamW(learnt, lr=1e-4)
        for value in learnt:  # the optimiser's own tensors are made in its first step
            value.grad = torch.zeros_like(value)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self):
        if self.whole:
            return (self.scale * self.head.objective(self.batch).loss).sum()
        return self.head(self.batch, self.scale).total

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure_time(options: argparse.Namespace) -> dict[str, float]:
    work = Work(options)
    work.step()
    walls, seconds, speeds = [], [], []
    for _ in range(options.rounds):
        speeds.append(throughput())
        wall, start = time.perf_counter(), time.process_time()
        work.step()
        walls.append(time.perf_counter() - wall)
        seconds.append(time.process_time() - start)
    speeds.append(throughput())
    wall, second = statistics.median(walls), statistics.median(seconds)
    flops, speed = sum(floor(work).values()), statistics.median(speeds)
    return {
        "tokens_per_second": options.batch * options.length / wall,
        "step_seconds": wall,
        "process_seconds": second,
        "floor_gflop": {name: value / 1e9 for name, value in floor(work).items()},
        "gflop_per_process_second": speed / 1e9,
        "share_of_floor": flops / speed / second,
        "share_of_floor_by_wall": flops / (speed * options.threads) / wall,
    }


def throughput() -> float:
    """FLOPs a process second of large products, the faster library's and the better shape's: one of
    this step's, and a square one."""
    import torch

    from spectrain.core.fast_linear import fast_product

    speeds = []
    for rows, inner, outputs in ((1024, H, 8192), (2048, 2048, 2048)):
        left, right = torch.randn(rows, inner), torch.randn(outputs, inner)
        start = time.process_time()
        for _ in range(3):
            fast_product(left, right)
        speeds.append(3 * 2 * rows * inner * outputs / (time.process_time() - start))
    return max(speeds)


def floor(work: Work) -> dict[str, float]:
    """FLOPs of one step that the maths asks for, by part: what the head says of itself. A weight
    costs 2 for each row forward and 4 backward; of what needs no gradient 2 less."""
    from spectrain.heads.work import Shape

    return work.head.work(Shape.of_reply(work.batch.reply)).flops


def measure_memory(options: argparse.Namespace) -> dict[str, float]:
    work = Work(options)
    small = Work(argparse.Namespace(**vars(options) | {"length": 32, "batch": 1}))
    small.step()  # code that is loaded is no memory of a step
    del small
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    work.step()
    work.step()
    return {"memory_mb": _status("VmHWM") - before, "kept_mb": kept(work) / 1e6}


def kept(work: Work) -> int:
    """Bytes that the graph of a loss holds, each storage once, parameters and inputs aside."""
    import weakref

    import torch

    class Held:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    alive: weakref.WeakSet = weakref.WeakSet()

    def pack(value: torch.Tensor) -> Held:
        alive.add(held := Held(value))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.value):
        loss = work.loss()
    storages = {one.value.untyped_storage() for one in alive}
    given = [*work.head.parameters(), work.batch.aux, work.batch.last, work.head.readout.weight]
    ours = {value.untyped_storage().data_ptr() for value in given}
    sizes = {one.data_ptr(): one.nbytes() for one in storages}
    del loss
    return sum(size for place, size in sizes.items() if place not in ours)


def _status(name: str) -> float:
    """A size of this process in MB, as Linux tells it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"{name} is not told by this system")


PARTS = {"time": measure_time, "memory": measure_memory}


def render(report: dict) -> str:
    flops = report["floor_gflop"]
    return "\n".join(
        [
            f"{report['batch']} x {report['length']} tokens, {report['share']:.0%} supervised, "
            f"K {report['steps']}, D {report['draft_vocab']}, "
            f"{'whole graph' if report['whole'] else 'in parts'}",
            f"{report['tokens_per_second']:.0f} tokens/s, {report['process_seconds']:.2f} process "
            f"seconds a step, {report['share_of_floor']:.0%} of the floor (by wall time "
            f"{report['share_of_floor_by_wall']:.0%}) of "
            f"{sum(flops.values()):.0f} GFLOP: "
            + ", ".join(f"{name} {value:.1f}" for name, value in flops.items()),
            f"memory {report['memory_mb']:.0f} MB beyond parameters, optimiser and inputs; the "
            f"graph keeps {report['kept_mb']:.0f} MB",
        ]
    )


if __name__ == "__main__":
    main()

"""What `spectrain estimate` tells of a training step against what the step takes, for every family.

    python scripts/bench_estimate.py [--kinds eagle3,medusa] [--length 512] [--batch 2]
                                     [--share 0.6] [--rounds 3] [--threads 1] [--tiny] [--json]

Shapes of SmolLM2-135M, random weights and batches, float32, AdamW, one process on a CPU. Each part
runs in a process of its own.

    seconds    process seconds of a step (loss, gradient, clipping, update), the median; the
               estimate's products are measured by the same clock in the same process, before
    memory     the most resident at once in the second step above what was resident before it:
               parameters, optimiser, batch, and what the first step has left behind. Blocks that
               are freed go back to the system at once, so that none serve twice unseen
    left       what the first step has left behind, in that memory not counted: kernels made for
               its shapes, buffers of threads. No estimate tells it
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from spectrain.core.environment import describe, settle

# SmolLM2-135M, and what --tiny takes instead.
SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TINY = SIZES | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
# name → family, its options, how the target is treated
KINDS = {
    "eagle1": ("eagle1", {}, "frozen"),
    "eagle2": ("eagle2", {"steps": 3}, "frozen"),
    "eagle3": ("eagle3", {"draft_vocab_size": 8192}, "frozen"),
    "eagle3-all": ("eagle3", {"draft_vocab_size": None}, "frozen"),
    "medusa": ("medusa", {"steps": 3}, "frozen"),
    "medusa2": ("medusa", {"steps": 2}, "lora"),
    "mtp-parallel": ("mtp-parallel", {"steps": 2}, "frozen"),
    "mtp-sequential": ("mtp-sequential", {"steps": 2}, "frozen"),
    "mtp-shared": ("mtp-sequential", {"shared": True, "draft_vocab_size": 8192}, "frozen"),
    "draft": ("draft", {}, "frozen"),
}


def main() -> None:
    options = _options()
    settle()
    if options.part is not None:
        print(json.dumps(PARTS[options.part](options)))
        return
    rows = {}
    for kind in options.kinds.split(","):
        rows[kind] = {**_child(kind, "time"), **_child(kind, "memory")}
        if not options.json:
            print(render(kind, rows[kind]), flush=True)
    if options.json:
        names = ("length", "batch", "share", "rounds", "threads")
        report = {"kinds": rows, **{name: getattr(options, name) for name in names}}
        print(json.dumps(report | {"environment": describe("cpu")}, indent=1))


def _options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--length", type=int, default=512, help="tokens of a row, T")
    parser.add_argument("--batch", type=int, default=2, help="rows, B")
    parser.add_argument("--share", type=float, default=0.6, help="supervised share of the tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("time", "memory"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.length, options.batch, options.rounds = 48, 1, 1
    return options


def _child(kind: str, part: str) -> dict:
    """One part in a fresh process."""
    given = {"MALLOC_MMAP_THRESHOLD_": "65536"} if part == "memory" else {}
    command = [sys.executable, __file__, *sys.argv[1:], "--kind", kind, "--part", part]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | given
    )
    return json.loads(done.stdout)


class Trial:
    """A head of random weights, its optimiser, one batch, and what is told of its step."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        from spectrain.core import attention
        from spectrain.core.outline import UNREAD, NoTokenizer, outline_of
        from spectrain.core.target import Target
        from spectrain.heads.registry import family
        from spectrain.trainer import estimate, optim
        from spectrain.trainer.optim import head_tables
        from spectrain.trainer.settings import TrainerSettings
        from spectrain.trainer.trunk import JointHead

        torch.manual_seed(0)
        torch.set_num_threads(options.threads)
        name, chosen, mode = KINDS[options.kind]
        config = LlamaConfig(**(TINY if options.tiny else SIZES))
        if options.tiny and "draft_vocab_size" in chosen:
            chosen = chosen | {"draft_vocab_size": 128}
        kind = family(name)
        self.settings = TrainerSettings(
            batch_size=options.batch, micro_batch=options.batch, trunk={"mode": mode}
        )
        outline = outline_of(config, "outline")
        told = kind.outline(kind.Options(**chosen), outline)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
        target = Target(model, NoTokenizer(config.vocab_size), "random", UNREAD)
        self.head = kind(told.config).bind(target.readout)
        if mode != "frozen":
            told = JointHead(told, outline, self.settings.trunk)
            self.head = JointHead(self.head, target, self.settings.trunk)
        self.head.train()
        del target, model
        lengths = [(options.length, round(options.share * options.length))] * options.batch
        self.step_told = estimate.steps_of(lengths, self.settings, 1, "cpu")[0]
        self.told = told
        self.batch = _batch(config, lengths, len(self.head.needs.aux_layers))
        counts = self.head.counts(self.batch)
        self.scale = torch.tensor(self.head.weights(0.5)) / counts.clamp(min=1)
        self.parts = optim.build(self.head, self.settings, head_tables(self.head))
        self.learnt = [value for value in self.head.parameters() if value.requires_grad]
        for value in self.learnt:  # the optimiser's own tensors are made in its first step
            value.grad = torch.zeros_like(value)
        self._update()
        self.small = _batch(config, [(16, 12)], len(self.head.needs.aux_layers))

    def warm(self) -> None:
        """Code that is loaded is no memory of a step."""
        self.head(self.small, self.scale).total.backward()
        self._update()

    def step(self) -> None:
        self.head(self.batch, self.scale).total.backward()
        self._update()

    def _update(self) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_(self.learnt, 1.0)
        for part in self.parts.values():
            part.optimizer.step()
        for value in self.learnt:
            value.grad = None


def _batch(config, lengths: list[tuple[int, int]], layers: int):
    import torch

    from spectrain.core.batch import Batch

    shape, hidden, size = (len(lengths), lengths[0][0]), config.hidden_size, config.vocab_size
    reply = torch.zeros(shape, dtype=torch.int64)
    for row, (tokens, supervised) in enumerate(lengths):
        reply[row, tokens - supervised :] = 1
    tokens, argmax = torch.randint(0, size, shape), torch.randint(0, size, shape)
    aux = torch.randn(*shape, layers * hidden) if layers else None
    return Batch(tokens, reply, aux, torch.randn(*shape, hidden), argmax)


def measure_time(options: argparse.Namespace) -> dict[str, float]:
    from spectrain.trainer import estimate
    from spectrain.trainer.speeds import Speeds

    trial = Trial(options)
    trial.step()
    speeds = Speeds("cpu", clock=time.process_time)
    told = speeds.by_part(estimate.step_work(trial.told, trial.step_told, trial.settings))
    found = []
    for _ in range(options.rounds):
        start = time.process_time()
        trial.step()
        found.append(time.process_time() - start)
    return {"seconds": statistics.median(found), "seconds_told": sum(told.values()), "parts": told}


def measure_memory(options: argparse.Namespace) -> dict[str, float]:
    from spectrain.trainer import estimate

    trial = Trial(options)
    memory = estimate.memory_of(trial.told, [trial.step_told], trial.settings)
    trial.warm()
    start = _resident()
    trial.step()
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    trial.step()
    return {
        "memory_mb": _status("VmHWM") - before,
        "memory_told_mb": max(memory.step, memory.gradients) / 1e6,
        "left_mb": before - start,
    }


def _resident() -> float:
    """What this process holds in MB, without blocks that malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _status(name: str) -> float:
    """A size of this process in MB, as Linux tells it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"{name} is not told by this system")


PARTS = {"time": measure_time, "memory": measure_memory}


def render(kind: str, row: dict) -> str:
    times = row["seconds_told"] / row["seconds"] - 1
    sizes = row["memory_told_mb"] / row["memory_mb"] - 1
    parts = ", ".join(f"{name} {value:.2f}" for name, value in row["parts"].items())
    return (
        f"{kind:<15} {row['seconds']:6.2f} s, told {row['seconds_told']:6.2f} ({times:+4.0%})   "
        f"{row['memory_mb']:5.0f} MB, told {row['memory_told_mb']:5.0f} ({sizes:+4.0%}), "
        f"left {row['left_mb']:3.0f}   [{parts}]"
    )


if __name__ == "__main__":
    main()

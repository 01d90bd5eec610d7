"""Capture against the target's raw forward on the same batches, in one run; JSON on stdout.

    python scripts/bench_capture.py [--target smollm2-135m] [--rows 48] [--rounds 3]

Five things take turns over the same padded batches; see DEFINITIONS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from spectrain.core.environment import describe, settle

SHARD_TOKENS = 16384  # as `prepare` cuts them
ASKED = 0.9  # of the throughput of a forward with its logits, at least
DEFINITIONS = {
    "forward": "the model's own forward, with the logits of every position",
    "trunk": "the same without any logits",
    "needed": "the trunk, and the logits of the rows that predict a reply: what capture cannot do "
    "without",
    "capture": "as `prepare` does it: three auxiliary layers, the last state everywhere, the "
    "target's choice with its probability and the log-normaliser before every reply token",
    "written": "capture, and the shards on disk (serialised, hashed, flushed)",
    "tokens_per_second": "tokens without padding, medians of the rounds",
    "x over y": "how many times as fast x is; and the same for each round, sorted",
}


def random_rows(count: int, vocabulary: int) -> list:
    """Lengths of chat: 60 to 160 tokens of prompt, 40 to 110 of reply."""
    import torch

    from spectrain.data.shard import Row

    random = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        before, after = (
            int(torch.randint(low, high, (), generator=random))
            for low, high in ((60, 160), (40, 110))
        )
        tokens = torch.randint(vocabulary, (before + after,), generator=random, dtype=torch.int32)
        reply = torch.tensor([0] * before + [1] * after, dtype=torch.int16)
        rows.append(Row(id=f"{number:016x}", split="train", tokens=tokens, reply=reply))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", help="what the target computes in")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    options = parser.parse_args()
    settle()

    import torch
    from torch.nn.utils.rnn import pad_sequence

    from spectrain.core.batch import predicting
    from spectrain.core.target import Target
    from spectrain.data.capture import LOGIT_ROWS, batches, capture
    from spectrain.data.shard import Cutter, key_of
    from spectrain.data.writer import StoreWriter

    target = Target.load(options.target, dtype=options.dtype)
    rows = random_rows(options.rows, target.readout.usable)
    cutter, shards = Cutter(SHARD_TOKENS), []
    for row in rows:
        if cutter.place(row) == len(shards):
            shards.append([])
        shards[-1].append(row)
    layers = target.default_aux_layers()
    groups = []
    for shard in shards:
        for places in batches(shard, options.batch_tokens):
            tokens, reply = (
                pad_sequence([getattr(shard[p], name).long() for p in places], batch_first=True)
                for name in ("tokens", "reply")
            )
            groups.append((tokens.to(target.device), predicting(reply).to(target.device)))

    @torch.inference_mode()
    def forward() -> None:
        for tokens, _ in groups:
            target.logits(target.forward(tokens).last)

    @torch.inference_mode()
    def trunk() -> None:
        for tokens, _ in groups:
            target.forward(tokens)

    @torch.inference_mode()
    def needed() -> None:
        for tokens, where in groups:
            for part in target.forward(tokens).last[where].split(LOGIT_ROWS):
                target.logits(part)

    def captured(shard):
        found = capture(target, shard, layers, torch.bfloat16, options.batch_tokens, True)
        states = {place: (one.row, one.states) for place, one in found}
        return [states[place] for place in sorted(states)]

    def captured_only() -> None:
        for shard in shards:
            captured(shard)

    def written() -> None:
        settings = {"dtype": "bfloat16", "target": {"fingerprint": target.fingerprint}}
        with (
            tempfile.TemporaryDirectory() as folder,
            StoreWriter.claim(Path(folder), settings) as writer,
        ):
            for number, shard in enumerate(shards):
                writer.write_shard(number, key_of(shard), captured(shard))

    methods = {
        "forward": forward,
        "trunk": trunk,
        "needed": needed,
        "capture": captured_only,
        "written": written,
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    names = list(methods)
    for turn in range(options.rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            methods[name]()
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
    tokens = sum(len(row.tokens) for row in rows)
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}

    def over(name: str, other: str) -> dict[str, float | list[float]]:
        pairs = zip(seconds[other], seconds[name], strict=True)
        ratios = sorted(theirs / own for theirs, own in pairs)
        return {"value": rates[name] / rates[other], "rounds": ratios}

    report = {
        "tokens": tokens,
        "padded_tokens": sum(tokens.numel() for tokens, _ in groups),
        "predicting_rows": sum(int(where.sum()) for _, where in groups),
        "dtype": str(target.dtype).removeprefix("torch."),
        "tokens_per_second": rates,
        "over": {
            f"{name} over {other}": over(name, other)
            for name in ("capture", "written")
            for other in ("forward", "needed", "trunk")
        },
        "asked": {
            "capture over forward": ASKED,
            "met": rates["capture"] / rates["forward"] >= ASKED,
        },
        "definitions": DEFINITIONS,
        "environment": describe(target.device),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

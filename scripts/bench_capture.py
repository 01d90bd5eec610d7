"""Capture against the target's raw forward on the same batches, in one run; JSON on stdout.

    python scripts/bench_capture.py [--target smollm2-135m] [--rows 48] [--rounds 3]

Three things take turns over the same padded batches: the model's own forward with the logits of
every position (what "a forward" of a language model is), its trunk alone, and capture as `prepare`
does it (three auxiliary layers, the last state, teacher facts on the rows that predict a reply).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from spectrain.core.environment import describe, settle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    options = parser.parse_args()
    settle()

    import torch

    from spectrain.core.target import Target
    from spectrain.data.capture import batches, capture
    from spectrain.data.shard import Row

    target = Target.load(options.target)
    random = torch.Generator().manual_seed(0)
    rows = []
    for number in range(options.rows):
        # Lengths of chat: 60 to 160 tokens of prompt, 40 to 110 of reply.
        before, after = (
            int(torch.randint(low, high, (), generator=random))
            for low, high in ((60, 160), (40, 110))
        )
        tokens = torch.randint(3, 1000, (before + after,), generator=random, dtype=torch.int32)
        reply = torch.tensor([0] * before + [1] * after, dtype=torch.int16)
        rows.append(Row(id=f"{number:016x}", split="train", tokens=tokens, reply=reply))
    layers = target.default_aux_layers()
    groups = []
    for places in batches(rows, options.batch_tokens):
        parts = [rows[place].tokens.long() for place in places]
        groups.append(torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).to(target.device))

    @torch.inference_mode()
    def forward() -> None:
        for tokens in groups:
            target.logits(target.forward(tokens).last)

    @torch.inference_mode()
    def trunk() -> None:
        for tokens in groups:
            target.forward(tokens)

    def captured() -> None:
        for _ in capture(target, rows, layers, torch.bfloat16, options.batch_tokens):
            pass

    methods = {"forward": forward, "trunk": trunk, "capture": captured}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    trunk()
    for _ in range(options.rounds):
        for name, method in methods.items():
            started = time.perf_counter()
            method()
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
    tokens = sum(len(row.tokens) for row in rows)
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    report = {
        "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "capture_over_forward": round(rates["capture"] / rates["forward"], 3),
        "capture_over_trunk": round(rates["capture"] / rates["trunk"], 3),
        "definition": "tokens without padding; medians of the rounds; forward has the logits of "
        "every position, capture those of the rows that predict a reply",
        "environment": describe(target.device),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""What number types cost and save: time of a verify pass, perplexity of replies; JSON on stdout.

    python scripts/bench_quantise.py [--target smollm2-135m] [--store FOLDER] [--limit 20]

1. verify(n): one target forward over n tokens behind a context, for float32, bfloat16, int8 and
   int4. The variants take turns, so that another process on the machine slows all of them.
2. With a store: perplexity of its held-out replies by each, how often the argmax is the stored
   one, and the mean KL divergence from float32, in nats a token.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

from spectrain.core.environment import describe, settle

WIDTHS = (1, 2, 4, 8, 16)
VARIANTS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantize": "int8"},
    "int4": {"dtype": "float32", "quantize": "int4"},
}


def verify_times(targets: dict, context: int, repeats: int) -> dict:
    """Milliseconds of each variant and width, and the ratio to one token: medians of `repeats`
    turns; a ratio is taken within a turn."""
    import torch

    view = -(-(context + max(WIDTHS)) // 64) * 64
    times: dict = {name: {width: [] for width in WIDTHS} for name in targets}
    caches = {}
    for name, target in targets.items():
        tokens = torch.randint(3, 1000, (1, context), device=target.device)
        caches[name] = target.new_cache(1, view), tokens
        target.forward(tokens, cache=caches[name][0])
        caches[name][0].commit(torch.tensor([context], device=target.device))
    for turn in range(repeats + 1):
        for name, target in targets.items():
            cache, tokens = caches[name]
            for width in WIDTHS:
                started = time.perf_counter()
                target.logits(target.forward(tokens[:, :width], cache=cache, view=view).last)
                if target.device.type == "cuda":
                    torch.cuda.synchronize()
                if turn:  # the first warms up
                    times[name][width].append(1e3 * (time.perf_counter() - started))
    report = {}
    for name, own in times.items():
        report[name] = {
            "verify_ms": {w: round(statistics.median(t), 2) for w, t in own.items()},
            "fastest_ms": {w: round(min(t), 2) for w, t in own.items()},
            "verify_over_one": {
                w: round(statistics.median(a / b for a, b in zip(t, own[1], strict=True)), 3)
                for w, t in own.items()
            },
        }
    return report


def qualities(targets: dict, store, limit: int) -> dict:
    """Perplexity, agreement with the stored argmax and divergence from float32, over held-out
    replies."""
    import torch

    rows = store.rows("heldout")[:limit]
    sums = {name: {"nll": 0.0, "agree": 0, "kl": 0.0} for name in targets}
    count = 0
    for row in rows:
        batch = store.batch([row], with_aux=False)
        where = batch.reply[0, 1:] > 0
        following, argmax = batch.tokens[0, 1:][where], batch.argmax[0, :-1][where]
        count += len(following)
        teacher = None
        for name, target in targets.items():
            last = target.forward(batch.tokens.to(target.device)).last[0, :-1]
            scores = target.logits(last[where.to(last.device)]).float().cpu().log_softmax(-1)
            teacher = scores if teacher is None else teacher
            own = sums[name]
            own["nll"] -= scores.gather(1, following[:, None]).sum().item()
            own["agree"] += int((scores.argmax(-1) == argmax).sum())
            own["kl"] += torch.nn.functional.kl_div(
                scores, teacher, reduction="sum", log_target=True
            ).item()
    return {
        name: {
            "tokens": count,
            "perplexity": round(math.exp(own["nll"] / count), 4),
            "argmax_as_stored": round(own["agree"] / count, 4),
            "kl_from_float32": round(own["kl"] / count, 5),
        }
        for name, own in sums.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--store", type=Path, default=None, help="a store with held-out rows")
    parser.add_argument("--limit", type=int, default=20, help="held-out rows to read")
    parser.add_argument("--context", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    settle()

    import torch

    from spectrain.core.errors import SpectrainError
    from spectrain.core.target import Target
    from spectrain.data.store import FeatureStore

    store = FeatureStore.open(options.store) if options.store else None
    if store:
        store.require_features((), False)
    if store and not store.rows("heldout"):
        raise SpectrainError("the store has no held-out rows", where=str(options.store))
    targets = {name: Target.load(options.target, **how) for name, how in VARIANTS.items()}
    with torch.inference_mode():
        report = {
            "context": options.context,
            "verify": verify_times(targets, options.context, options.repeats),
            "quality": qualities(targets, store, options.limit) if store else None,
            "environment": describe(targets["float32"].device),
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""What a speculative step costs, and whether greedy output is the library's; JSON on stdout.

    python scripts/bench_generate.py --head runs/demo/train/head [--prompts FILE] [--limit 50]

1. verify(n): one target forward over n tokens behind a context, against n = 1.
2. draft: one step of the head, against verify(1).
3. The same prompts greedily by the head, by the engine alone and by `transformers`: ids compared,
   speed ratios, and the share of the time that is in no model forward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from spectrain.core.environment import describe, settle

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 16)


def median_ms(work, repeats: int = 15) -> float:
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--head", required=True)
    parser.add_argument("--prompts", type=Path, default=None, help="default: the shipped ones")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--context", type=int, default=150)
    options = parser.parse_args()
    settle()

    import torch

    from spectrain.core.packing import pack
    from spectrain.core.target import Target
    from spectrain.heads.io import load_head
    from spectrain.recipes.generate import GenerateConfig, run
    from spectrain.recipes.prepare import SHIPPED_PROMPTS

    target = Target.load(options.target)
    head = load_head(options.head, device=target.device).bind(target.readout)
    pack(head)
    context = options.context
    view = -(-(context + max(WIDTHS)) // 64) * 64
    tokens = torch.randint(3, 1000, (1, context), device=target.device)
    with torch.inference_mode():
        cache = target.new_cache(1, view)
        features = target.forward(tokens, cache=cache, aux_layers=head.needs.aux_layers)
        cache.commit(torch.tensor([context - 1], device=target.device))

        def verify(width: int) -> float:
            block = tokens[:, :width]
            return median_ms(
                lambda: target.logits(
                    target.forward(
                        block, cache=cache, aux_layers=head.needs.aux_layers, view=view
                    ).last
                )
            )

        widths = {width: verify(width) for width in WIDTHS}
        state = head.start(1, view)
        head.begin(state, tokens, features[:, :-1], torch.tensor([context - 1]))
        parents = torch.zeros(1, 1, dtype=torch.int64)

        def step() -> None:
            state.level, state.ancestors = 0, None
            head.expand(state, tokens[:, :1], parents)

        draft = median_ms(step)
    compared = run(
        GenerateConfig(
            target=options.target,
            head=options.head,
            prompts=options.prompts or SHIPPED_PROMPTS,
            limit=options.limit,
            max_new_tokens=options.max_new_tokens,
            draft_tokens=options.draft_tokens,
            compare=True,
        )
    )
    report = {
        "verify_ms": {str(width): round(value, 2) for width, value in widths.items()},
        "verify_over_one": {str(w): round(v / widths[1], 3) for w, v in widths.items()},
        "draft_step_ms": round(draft, 2),
        "draft_over_verify_one": round(draft / widths[1], 3),
        "context": context,
        **{key: compared[key] for key in ("prompts", "methods", "speedup", "identical")},
        "environment": describe(target.device),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

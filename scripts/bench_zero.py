"""Resident bytes for each trained number, with and without DeepSpeed: after a step, and at most.

    MALLOC_MMAP_THRESHOLD_=100000 python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        scripts/bench_zero.py --stage 1

Square matrices in a row, two micro-batches of one short row, AdamW in float32; stage 0 is DDP.
The threshold has the C library give back what is free.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import psutil
import torch
from torch import nn

from spectrain.trainer import optim
from spectrain.trainer.settings import TrainerSettings
from spectrain.trainer.tracking import make_accelerator
from spectrain.trainer.update import Plain
from spectrain.trainer.zero import Zero


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), required=True)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of a matrix")
    parser.add_argument("--layers", type=int, default=120)
    parser.add_argument("--bucket", type=int, default=2_000_000, help="numbers in an exchange")
    options = parser.parse_args()
    settings = TrainerSettings(steps=3)
    accelerator = make_accelerator(settings, Path())
    if options.stage:
        import deepspeed  # noqa: F401  (its own memory is none of a parameter's)
    before = psutil.Process().memory_info().rss
    size = options.size
    net = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(options.layers)))
    parts = optim.build(net, settings, ())
    if options.stage:
        told = {"stage": options.stage, "reduce_bucket_size": options.bucket}
        config = {f"zero_optimization.{key}": value for key, value in told.items()}
        update = Zero(config, net, parts, settings, accelerator)
    else:
        update = Plain(net, parts, settings, accelerator)
    for _ in range(settings.steps):
        for last in (False, True):
            with update.micro_batch(last):
                accelerator.backward(update.model(torch.ones(1, size)).sum())
        update.join()
        update.clip()
        update.step()
        update.clear()
    after = psutil.Process().memory_info().rss
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if accelerator.is_main_process:
        count = options.layers * size * size
        bytes_each = ((value - before) / count for value in (after, most))
        print("stage {}: {:.1f} after a step, {:.1f} at most".format(options.stage, *bytes_each))
    accelerator.end_training()


if __name__ == "__main__":
    main()

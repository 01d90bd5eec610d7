"""Does predicting further ahead help or hurt the model itself? A tiny one, trained from scratch.

A small Llama and a tokenizer of its own are trained on the shipped prompts as plain text:
next-token loss plus λ times the extra heads (arXiv 2404.19737 parallel, 2412.19437 sequential), and
the same with heads that weigh next to nothing. What is compared is the model's own next-token loss
on held-out text.

    python scripts/mtp_from_scratch.py [--out runs/mtp-scratch] [--steps 300] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import mean
from typing import Any

from spectrain.core.environment import settle
from spectrain.core.failures import one_line_errors
from spectrain.core.files import atomic_write, write_json

KINDS = ("mtp-parallel", "mtp-sequential")
NOTHING = 1e-4  # weight of heads that are there and hardly pull at the model


def write_texts(path: Path) -> Path:
    """The shipped prompts as plain texts."""
    from spectrain.recipes.prepare import SHIPPED_PROMPTS

    rows = map(json.loads, SHIPPED_PROMPTS.read_text(encoding="utf-8").splitlines())
    lines = [json.dumps({"text": row["messages"][0]["content"]}) for row in rows]
    atomic_write(path, "\n".join(lines) + "\n")
    return path


def write_model(folder: Path, texts: Path) -> Path:
    """A byte-level tokenizer of 2048 entries trained on the texts, and a random Llama for it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    lines = [json.loads(line)["text"] for line in texts.read_text(encoding="utf-8").splitlines()]
    core.train_from_iterator(lines, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_one(store: Path, target: Path, out: Path, family: str, weight: float, **more: Any) -> Any:
    from spectrain.recipes import train

    settings = {
        "target": str(target),
        "store": store,
        "out": out,
        "family": family,
        "head": {"steps": 3},
        "trunk": {"mode": "scratch", "heads_weight": weight},
        "batch_size": 16,
        "micro_batch": 16,
        "save_every": 10_000,
        **more,
    }
    return train.run(train.TrainConfig(**settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/mtp-scratch"), help="folder")
    parser.add_argument("--steps", type=int, default=300, help="optimiser steps of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    arguments = parser.parse_args()
    settle()
    with one_line_errors(goes_on=True):
        run(arguments.out, arguments.steps, arguments.seeds)


def run(out: Path, steps: int, seeds: int) -> dict[str, Any]:
    from spectrain.recipes import prepare

    out.mkdir(parents=True, exist_ok=True)
    texts = write_texts(out / "texts.jsonl")
    target = out / "model"
    if not (target / "config.json").is_file():
        write_model(target, texts)
    prepare.run(
        prepare.PrepareConfig(
            target=str(target), prompts=texts, store=out / "store", aux_layers=(), heldout=0.15
        )
    )
    results: dict[str, list[float]] = {}
    for family in KINDS:
        for name, weight in (("with heads", 1.0), ("without", NOTHING)):
            losses = []
            for seed in range(seeds):
                report = train_one(
                    out / "store", target, out / f"{family}-{name.split()[0]}-{seed}", family,
                    weight, steps=steps, seed=seed,
                )  # fmt: skip
                losses.append(math.log(report["quality"]["perplexity_after"]))
                tokens = report["quality"]["heldout_tokens"]
            results[f"{family}, {name}"] = losses
    report = {"steps": steps, "seeds": seeds, "heldout_tokens": tokens, "losses": results}
    write_json(out / "report.json", report)
    print(f"next-token loss of the model itself on {tokens:,} held-out tokens, {steps} steps")
    for name, losses in results.items():
        each = " ".join(f"{loss:.3f}" for loss in losses)
        print(f"{name:<28}{mean(losses):.3f}   ({each})")
    return report


if __name__ == "__main__":
    main()

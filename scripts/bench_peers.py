"""One training step of our EAGLE-3 head beside those of two published trainers, in one run.

    python scripts/bench_peers.py --speculators VENV --specforge VENV [--length 512] [--batch 2]
        [--share 0.6] [--steps 7] [--draft-vocab 8192] [--rounds 4] [--threads 2] [--json FILE]

A VENV is a virtual environment that has the peer; one without its own is left out. The same work
for all: shapes of SmolLM2-135M, random rows and features, float32, plain AdamW, nothing clipped,
embeddings frozen, output layer trained, every choice of the target in the draft vocabulary. The
peers run as peer_step.py sets them up: speculators row by row with sdpa (its leanest way),
specforge with the teacher's logits over all tokens (its fastest) and over the draft vocabulary.

    tokens/s   all tokens of the batch over the wall time of a step. Every measurement is a process
               of its own, ours and a peer's in turn, so that other work on the machine hits all
    process    seconds of a step, all threads
    memory     the most resident at once in a step above what was resident before it: parameters,
               optimiser and inputs. The second step of a process of its own, where freed blocks go
               back to the system at once
    left       what the first step has left behind, in that memory not counted: kernels made for its
               shapes, mostly. Not told of specforge, whose compiler would count
    learnt     parameters that are trained; the run ends if they differ
    ratios     to the peer that is best by that measure: the median over the rounds of ours against
               the peer's of the same turn, with the lowest and the highest; memory without and with
               what is left
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_train import SIZE, G, H, I, Q, V
from peer_step import PACKAGES

from spectrain.core.environment import describe, settle

CHILD = Path(__file__).with_name("peer_step.py")
OURS = "spectrain"
SPEED_ASKED = {0.6: 1.6, 0.3: 2.5}  # by supervised share, at least
MEMORY_ASKED = 0.5  # at most
GIVEN = ("length", "batch", "steps", "draft_vocab", "share", "threads")


def main() -> None:
    options = _options()
    settle()
    pythons = {OURS: sys.executable} | {
        name: python(getattr(options, package), package)
        for name, package in PACKAGES.items()
        if name != OURS and getattr(options, package) is not None
    }
    if len(pythons) == 1:
        fail("no peer to compare with: give --speculators VENV, --specforge VENV or both")
    left_out = {}
    if options.draft_vocab == V and pythons.pop("specforge-compact", None):
        left_out["specforge-compact"] = "refuses a draft vocabulary that is the target's"
    with tempfile.TemporaryDirectory() as folder:
        target = make_target(Path(options.target or folder))
        results = measure(pythons, target, options)
    report = {
        **{name: getattr(options, name) for name in (*GIVEN, "rounds")},
        "trainers": results,
        "left_out": left_out,
        "ratios": ratios(results, options.share),
        "environment": describe("cpu"),
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(render(report))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speculators", type=Path, help="its virtual environment")
    parser.add_argument("--specforge", type=Path, help="its virtual environment")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row, T")
    parser.add_argument("--batch", type=int, default=2, help="rows, B")
    parser.add_argument("--share", type=float, default=0.6, help="supervised share of the tokens")
    parser.add_argument("--steps", type=int, default=7, help="draft steps, K")
    parser.add_argument("--draft-vocab", type=int, default=8192, help=f"D; {V} is all there are")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target", help="keep the random target of the peers here, or take it")
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    options = parser.parse_args()
    if options.tiny:
        options.length, options.batch, options.steps, options.draft_vocab = 48, 1, 2, 512
        options.rounds, options.threads = 1, 1
    return options


def fail(message: str, code: int = 2) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def python(venv: Path, package: str) -> str:
    path = venv / "bin" / "python"
    if not path.exists():
        fail(f"--{package} {venv}: no virtual environment, {path} is not there")
    return str(path.absolute())


def make_target(folder: Path) -> Path:
    """A target of which only the configuration and a random embedding [V, H] are there."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    file = folder / "config.json"
    if file.exists():
        told = json.loads(file.read_text())
        if (told["hidden_size"], told["vocab_size"]) != (H, V):
            fail(f"--target {folder}: its shapes are not those of SmolLM2-135M")
        return folder
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=I,
        num_hidden_layers=30,
        num_attention_heads=Q,
        num_key_value_heads=G,
        head_dim=SIZE,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    torch.manual_seed(0)
    embedding = {"model.embed_tokens.weight": 0.1 * torch.randn(V, H)}
    save_file(embedding, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def measure(pythons: dict[str, str], target: Path, options: argparse.Namespace) -> dict[str, dict]:
    """By trainer what it measured. `rounds` have a value for each turn: ours before each peer's."""

    def child(name: str, part: str) -> dict:
        arguments = ["--trainer", name, "--part", part, "--target", str(target)]
        for one in GIVEN:
            arguments += [f"--{one.replace('_', '-')}", str(getattr(options, one))]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)}
        if part == "memory":
            env["MALLOC_MMAP_THRESHOLD_"] = "100000"
        if name != OURS:
            env.pop("PYTHONPATH", None)  # what is ours is not a peer's
        command = [pythons[name], str(CHILD), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            fail(f"{name}, {part}: {why[0]}", 1)
        return json.loads(done.stdout.strip().splitlines()[-1])

    peers = [name for name in pythons if name != OURS]
    runs: dict[str, list[dict]] = {name: [] for name in pythons}
    for _ in range(options.rounds):
        for peer in peers:
            for name in (OURS, peer):
                runs[name].append(child(name, "time"))
    learnt = {name: mine[0]["learnt"] for name, mine in runs.items()}
    if len(set(learnt.values())) > 1:
        counts = ", ".join(f"{name} {count:,}" for name, count in learnt.items())
        fail(f"not the same work, learnt parameters differ: {counts}", 1)
    results = {}
    for name, mine in runs.items():
        walls = [statistics.median(one["walls"]) for one in mine]
        seconds = [statistics.median(one["seconds"]) for one in mine]
        results[name] = {
            "versions": mine[0]["versions"],
            "learnt": learnt[name],
            "tokens_per_second": options.batch * options.length / statistics.median(walls),
            "process_seconds": statistics.median(seconds),
            **child(name, "memory"),
            "rounds": {"wall_seconds": walls, "process_seconds": seconds},
        }
    return results


def ratios(results: dict[str, dict], share: float) -> dict[str, dict]:
    """Ours against the best peer by each measure, what is asked, and whether it is met."""
    own = results[OURS]
    peers = {name: one for name, one in results.items() if name != OURS}
    order = list(peers)
    asked = SPEED_ASKED.get(share)
    found = {}
    for title, key in (("speed, wall", "wall_seconds"), ("speed, process", "process_seconds")):
        best = min(peers, key=lambda name: statistics.median(peers[name]["rounds"][key]))
        turns = own["rounds"][key][order.index(best) :: len(order)]  # ours just before this peer's
        rounds = [
            theirs / ours for ours, theirs in zip(turns, peers[best]["rounds"][key], strict=True)
        ]
        value = statistics.median(rounds)
        met = None if asked is None else value >= asked
        found[title] = {"peer": best, "value": value, "rounds": rounds, "asked": asked, "met": met}
    for title, left in (("memory", 0), ("memory and left", 1)):
        sizes = {
            name: one["memory_mb"] + left * (one["left_mb"] or 0) for name, one in results.items()
        }
        best = min(peers, key=sizes.get)
        value = sizes[OURS] / sizes[best]
        met = value <= MEMORY_ASKED
        found[title] = {"peer": best, "value": value, "asked": MEMORY_ASKED, "met": met}
    return found


def render(report: dict) -> str:
    lines = [
        f"{report['batch']} x {report['length']} tokens, {report['share']:.0%} supervised, "
        f"K {report['steps']}, D {report['draft_vocab']}, {report['threads']} threads, "
        f"{report['rounds']} rounds",
        f"{'':18}{'tokens/s':>9}{'process s':>11}{'memory MB':>11}{'left MB':>9}{'learnt':>13}",
    ]
    for name, one in report["trainers"].items():
        left = "-" if one["left_mb"] is None else f"{one['left_mb']:.0f}"
        lines.append(
            f"{name:18}{one['tokens_per_second']:9.0f}{one['process_seconds']:11.2f}"
            f"{one['memory_mb']:11.0f}{left:>9}{one['learnt']:13,}  "
            + ", ".join(f"{what} {version}" for what, version in one["versions"].items())
        )
    lines += [f"{name:18}not run: {why}" for name, why in report["left_out"].items()]
    lines.append("peers: " + ", ".join(name for name in report["trainers"] if name != OURS))
    for title, one in report["ratios"].items():
        bound = "at most" if title.startswith("memory") else "at least"
        asked = "nothing asked at this share"
        if one["asked"] is not None:
            asked = f"asked {bound} {one['asked']}: {'met' if one['met'] else 'missed'}"
        rounds = one.get("rounds")
        spread = f" ({min(rounds):.2f} to {max(rounds):.2f})" if rounds else ""
        lines.append(f"{title:18}{one['value']:.3f} x {one['peer']}{spread}, {asked}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

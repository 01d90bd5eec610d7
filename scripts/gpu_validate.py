"""Everything that only a CUDA device can show, in one command of at most nine minutes.

    python scripts/gpu_validate.py --out runs/gpu          on a GPU; no network, no installation
    python scripts/gpu_validate.py --rehearse --out DIR    the same code, tiny, on a CPU

1 greedy    float32 tokens of every way to draft are those of the library's own `generate`
2 graphs    steps replayed from CUDA graphs give the tokens of plain steps
3 bfloat16  where replies leave plain decoding's, and how close the two tokens were
4 times     steps of an 8B-shaped model, beside the time that reading its bytes takes
5 waits     operations within a step that make the host wait: there are to be none
6 losses    the kernels of the training loss: their gradients against float64, times beside torch's

Writes DIR/gpu.json after every part and DIR/gpu.md. Exit: 0 all is well (a part may be "slow"),
1 a part failed or had no time for all of its cases, 3 something is missing here.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Seconds for each part; a case is begun only while its part has some left.
PARTS = {"greedy": 115, "graphs": 115, "bfloat16": 50, "times": 150, "waits": 40, "losses": 30}
LONGEST = 535
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "accelerate", "pydantic", "yaml")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: not installed here: {', '.join(missing)}", file=sys.stderr)
        return 3
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run as Python
    _use_this_checkout()
    from spectrain.core.environment import describe, settle

    settle()
    import torch
    import transformers
    from gpu.scene import Scene

    if not options.rehearse and not torch.cuda.is_available():
        print("error: torch sees no CUDA device here; --rehearse runs on a CPU", file=sys.stderr)
        return 3
    # A hung device must not hang its user: tell where, and end.
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cpu" if options.rehearse else "cuda:0")
    if options.rehearse:
        torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "rehearsal": options.rehearse,
        "environment": describe(device) | {"transformers": transformers.__version__},
        "parts": {},
    }
    scene = Scene(device, options.rehearse)
    for name in options.parts:
        scene.begin(PARTS[name])
        print(f"{name} … (at most {PARTS[name]} s)", flush=True)
        report["parts"][name] = part = _run(name, scene)
        print(f"{name}: {part['verdict']} in {part['seconds']} s: {part['says']}", flush=True)
        (options.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "gpu.md").write_text(_table(report))
    faulthandler.cancel_dump_traceback_later()
    verdicts = {part["verdict"] for part in report["parts"].values()}
    return 0 if verdicts <= {"pass", "slow"} else 1


def _run(name: str, scene: Any) -> dict[str, Any]:
    """One part; whatever it raises is its verdict, and the others go on."""
    import torch
    from gpu import losses, times, tokens, waits

    work = {
        "greedy": tokens.greedy,
        "graphs": tokens.graphs,
        "bfloat16": tokens.bfloat16,
        "times": times.times,
        "waits": waits.waits,
        "losses": losses.losses,
    }[name]
    started = time.monotonic()
    try:
        with torch.inference_mode():
            part = work(scene)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        part = {"verdict": "error", "says": f"{type(error).__name__}: {first}"}
        part["traceback"] = traceback.format_exc().splitlines()
    if scene.left_out:
        part["left_out"] = scene.left_out
        part["says"] += f"; no time for {len(scene.left_out)} cases"
        if part["verdict"] in ("pass", "slow"):
            part["verdict"] = "incomplete"
    part["seconds"] = round(time.monotonic() - started, 1)
    if scene.device.type == "cuda":
        part["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
    return part


def _table(report: dict[str, Any]) -> str:
    """Verdicts, the times of the 8B-shaped model and those of the losses."""
    place = report["environment"]
    lines = [
        f"{place['device']}, torch {place['torch']}, transformers {place['transformers']}"
        + (" (a rehearsal: the numbers mean nothing)" if report["rehearsal"] else ""),
        "",
        "| part | verdict | seconds | what it says |",
        "|---|---|---|---|",
    ]
    for name, part in report["parts"].items():
        lines.append(f"| {name} | {part['verdict']} | {part['seconds']} | {part['says']} |")
    lines += ["", "| rows | context | what | graph ms | eager ms | floor ms | graph/floor |"]
    lines.append("|---|---|---|---|---|---|---|")
    for table in report["parts"].get("times", {}).get("tables", []):
        for kind in ("forward", "draft", "step"):
            for what, ms in table[f"{kind}_ms"].items():
                lines.append(
                    f"| {table['rows']} | {table['context']} | {kind} {what} | {ms['graph']:.3f} | "
                    f"{ms['eager']:.3f} | {ms['floor']:.3f} | {ms['graph_over_floor']:.2f} |"
                )
    lines += ["", "| logits | taught by | kernel ms | torch ms | floor ms | torch/kernel |"]
    lines.append("|---|---|---|---|---|---|")
    for case in report["parts"].get("losses", {}).get("times", []):
        lines.append(
            f"| {case['logits']} | {case['taught']} | {case['kernel_ms']:.3f} | "
            f"{case['torch_ms']:.3f} | {case['floor_ms']:.3f} | {case['torch_over_kernel']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _use_this_checkout() -> None:
    """It is the package, installed or not, whatever its folder is called."""
    spec = importlib.util.spec_from_file_location(
        "spectrain", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    sys.modules["spectrain"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    sys.exit(main())

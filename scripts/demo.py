"""The whole story on a real model: prepare, train, evaluate, plan, generate, one table.

Runs the shipped commands with one configuration, each as its own process, and gathers their reports
into OUT/report.json. Interrupted anywhere, the same call goes on where it was: `prepare` and
`train-eagle` know by themselves what is done; the others run again only when their inputs changed.

    python scripts/demo.py [--config demo-smollm2] [--out runs/demo]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import spectrain
from spectrain.core.config import find_config, load_config
from spectrain.core.environment import describe, settle
from spectrain.core.failures import one_line_errors
from spectrain.core.files import atomic_write, read_json, write_json

STAGES = ("prepare", "train-eagle", "eval-alpha", "plan", "generate")


CHAIN = 3  # drafts of the τ that is shown; what `generate` drafts is the plan's choice


class Story:
    """Folders and files of one run."""

    def __init__(self, config: str, out: Path) -> None:
        self.config, self.out = config, out
        self.store, self.train = out / "store", out / "train"
        self.head, self.heldout = self.train / "head", out / "heldout.jsonl"
        self.log = out / "stages.json"
        self.stages: dict[str, Any] = read_json(self.log) if self.log.is_file() else {}

    def inputs(self, stage: str) -> str | None:
        """A digest of all that the result of a stage depends on; None for stages that know by
        themselves whether they are finished, and refuse to go on with other settings."""
        if stage in ("prepare", "train-eagle"):
            return None
        digest = hashlib.sha256(spectrain.__version__.encode())
        files = (find_config(self.config), self.heldout, self.store / "manifest.json")
        head = [*sorted(self.head.glob("*.safetensors")), self.head / "config.json"]
        if stage == "generate":  # it drafts as planned
            head.append(self.head / "plan.json")
        for file in (*files, *head):
            digest.update(file.read_bytes())
        return digest.hexdigest()[:16]

    def arguments(self, stage: str) -> list[str]:
        """The command line of a stage, after `spectrain`."""
        store, head = ["--store", str(self.store)], ["--head", str(self.head)]
        own = {
            "prepare": store,
            "train-eagle": [*store, "--out", str(self.train)],
            "eval-alpha": [*store, *head, "--out", str(self.out)],
            "plan": [*store, *head],
            "generate": [
                *head,
                "--prompts",
                str(self.heldout),
                "--out",
                str(self.out),
                "--overwrite",
            ],
        }[stage]
        json_file = str(self.out / f"{stage}.json")
        return [stage, "--config", self.config, *own, "--json", json_file]

    def run(self, stage: str) -> dict[str, Any]:
        """Run a stage unless its result is there already; returns its report."""
        done = self.stages.setdefault(stage, {"seconds": 0.0, "finished": False})
        inputs, report = self.inputs(stage), self.out / f"{stage}.json"
        if inputs and done["finished"] and done.get("inputs") == inputs and report.is_file():
            print(f"── {stage}: done before ({done['seconds']:.0f} s)", flush=True)
            return read_json(report)
        if inputs and done.get("inputs") != inputs:
            done["seconds"] = 0.0  # another head or store: another measurement
        arguments = self.arguments(stage)
        print(f"\n── spectrain {' '.join(arguments)}", flush=True)
        started = time.monotonic()
        code = 1
        try:
            code = _call([sys.executable, "-m", "spectrain", *arguments])
        finally:
            # Seconds of all attempts that were not killed: what the stage has cost. A finished one
            # that only says so costs nothing more.
            if not done["finished"] or inputs:
                done["seconds"] = round(done["seconds"] + time.monotonic() - started, 1)
            done |= {"finished": code == 0, "inputs": inputs}
            # KiB on Linux, in MB of 10^6 bytes as in the stages' own reports.
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
            self.stages["peak_rss_mb"] = round(max(peak, self.stages.get("peak_rss_mb", 0)), 1)
            write_json(self.log, self.stages)
        if code:
            raise SystemExit(code)
        return read_json(report)


def _call(command: list[str]) -> int:
    """Run a command; Ctrl-C is left to it, so that it can write its checkpoint and leave."""
    child = subprocess.Popen(command)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def write_heldout(story: Story) -> None:
    """The held-out prompts as a file for `generate`: what `prepare` kept away from training."""
    from spectrain.data.conversations import split_of
    from spectrain.data.reading import read_conversations
    from spectrain.recipes.prepare import PrepareConfig

    config = load_config(PrepareConfig, "prepare", story.config)
    rows = read_conversations(config.prompts[0].path, config.regenerate)[: config.limit]
    lines = [
        json.dumps({"messages": list(row.messages), "domain": row.domain}, ensure_ascii=False)
        for row in rows
        if split_of(row.prompt_id, config.heldout) == "heldout"
    ]
    atomic_write(story.heldout, "\n".join(lines) + "\n")


def gather(story: Story, reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The one report. α and τ are teacher-forced on held-out greedy replies; speed is measured."""
    evaluated, generated = reports["eval-alpha"], reports["generate"]
    greedy = min(evaluated["temperatures"], key=lambda part: part["temperature"])
    gamma = min(CHAIN, len(greedy["tau"]))
    tau = greedy["tau"][gamma - 1]
    speedups = generated["speedup"]
    stock = generated["identical"].get("transformers")
    return {
        "target": evaluated["target"],
        "head": str(story.head),
        "supervised_tokens": reports["prepare"]["supervised_tokens"]["train"],
        "stages": {stage: story.stages[stage]["seconds"] for stage in STAGES},
        "alpha": [
            {
                "position": row["position"],
                "marginal": row["marginal"]["value"],
                "conditional": row["conditional"]["value"],
                "joint": row["joint"]["value"],
                "low": row["conditional"]["low"],
                "high": row["conditional"]["high"],
            }
            for row in greedy["positions"]
        ],
        "alpha_note": f"temperature {greedy['temperature']:g}; low and high: 95 % interval of the "
        "conditional, bootstrap over conversations",
        "tau": {key: tau[key] for key in ("value", "low", "high")} | {"draft_tokens": gamma},
        "way": generated["way"],
        "tau_generated": generated["methods"][speedups[0]["method"]]["tau"],
        "temperatures": evaluated["temperatures"],
        "speedup": speedups[0],
        "speedups": speedups,
        "greedy_identical": {"prompts": generated["prompts"], "identical": stock},
        "training": {
            key: reports["train-eagle"][key]
            for key in ("steps", "supervised_tokens", "seconds", "tokens_per_second", "loss")
        },
        "definitions": evaluated["definitions"] | generated["definitions"],
        "plot": evaluated["plot"],
        "peak_rss_mb": story.stages["peak_rss_mb"],
        "environment": describe(),
    }


def show(report: dict[str, Any], path: Path) -> str:
    """The table at the end."""
    tau, same = report["tau"], report["greedy_identical"]
    lines = [
        "",
        f"EAGLE-3 head for {report['target']}, trained on {report['supervised_tokens']:,} tokens",
        "",
        "greedy, held-out replies; below the conditional its 95 % interval",
        f"{'position':<12}" + "".join(f"{row['position']:>10}" for row in report["alpha"]),
    ]
    for name in ("marginal", "conditional", "joint"):
        cells = ("–" if row[name] is None else f"{row[name]:.3f}" for row in report["alpha"])
        lines.append(f"α {name:<10}" + "".join(f"{cell:>10}" for cell in cells))
        if name == "conditional":
            lines.append(f"{'':<12}" + "".join(f"{_between(row):>10}" for row in report["alpha"]))
    lines += [
        "",
        f"τ {_interval(tau)} tokens per target forward, {tau['draft_tokens']} drafted, greedy, "
        "held-out",
        f"generate: {report['way']}, τ {_plain(report['tau_generated'])}",
        *(f"speed {_interval(ratio)} × {ratio['baseline']}" for ratio in report["speedups"]),
        f"greedy output equal to transformers': {same['identical']} of {same['prompts']} prompts",
        f"minutes: {sum(report['stages'].values()) / 60:.1f} ("
        + ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in report["stages"].items())
        + f"), peak memory {report['peak_rss_mb'] / 1e3:.1f} GB",
        f"report {path}, plot {report['plot']}",
    ]
    return "\n".join(lines)


def _between(row: dict[str, Any]) -> str:
    return "–" if row["low"] is None else f"{row['low']:.2f}–{row['high']:.2f}"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _interval(number: dict[str, Any]) -> str:
    """`1.46 (1.40–1.53)`; the interval is missing where there are too few conversations."""
    if number["value"] is None:
        return "–"
    if number["low"] is None:
        return f"{number['value']:.2f}"
    return f"{number['value']:.2f} ({number['low']:.2f}–{number['high']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="demo-smollm2", help="configuration file or name")
    parser.add_argument("--out", default="runs/demo", type=Path, help="folder to write to")
    arguments = parser.parse_args()
    settle()
    with one_line_errors(goes_on=True):
        arguments.out.mkdir(parents=True, exist_ok=True)
        story = Story(arguments.config, arguments.out)
        reports = {}
        for stage in STAGES:
            if stage == "eval-alpha":
                write_heldout(story)
            reports[stage] = story.run(stage)
        report = gather(story, reports)
        write_json(arguments.out / "report.json", report)
        print(show(report, arguments.out / "report.json"))


if __name__ == "__main__":
    main()

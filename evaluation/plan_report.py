"""The terminal's view of a plan: one table for each batch size, at most 80 columns.

Takes the report that `recipes.plan.run` returns; reads nothing else.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from spectrain.core.show import WIDTH

DEFINITIONS = {
    "tau": "tokens per target forward, the target's own included, temperature 0",
    "draft, verify": "milliseconds a step, medians measured on this machine",
    "predicted": "tokens a second × plain decoding: tau and the measured times of this very width",
    "formula": "the same from one α (position 1) and c = one draft step / one target step, as if "
    "acceptance were independent and wide verifications free: (1 − α^(γ+1)) / ((1 − α)(γc + 1))",
    "not counted": "sampling, rules and bookkeeping of the engine",
}
_TAU = {
    "walks": "counted by walking the measured replies, each draft starting where the one before it "
    "ended",
    "product": "the product of the conditionals of each position: no reply was written greedily",
}


def render(report: Mapping[str, Any]) -> str:
    """Everything to print."""
    first = report["batches"][0]["costs"]
    lines = [
        f"How to draft with {report['head']} for {report['target']}",
        *textwrap.wrap(
            f"{report['conversations']} conversations; {first['dtype']}, {first['device']}, "
            f"{first['threads']} threads, {first['context']} tokens of context",
            WIDTH,
        ),
    ]
    for measured in report["batches"]:
        lines += ["", *_table(measured), _choice(measured)]
    lines += ["", f"written: {report['plan']}", ""]
    for name, text in report["definitions"].items():
        text = f"{name}: {text}" + (f"; {_TAU[report['tau_from']]}" if name == "tau" else "")
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _table(measured: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{'batch ' + str(measured['batch']):<12}{'nodes':>7}{'depth':>7}{'tau':>8}"
        f"{'draft':>10}{'verify':>10}{'predicted':>12}{'formula':>10}"
    ]
    for way in measured["ways"]:
        formula = "–" if way["formula"] is None else f"{way['formula']:.2f}"
        lines.append(
            f"{way['way']:<12}{way['nodes']:>7}{way['depth']:>7}{way['tau']:>8.2f}"
            f"{way['draft_ms']:>10.1f}{way['verify_ms']:>10.1f}{way['speedup']:>12.2f}{formula:>10}"
        )
    return lines


def _choice(measured: Mapping[str, Any]) -> str:
    (best,) = (way for way in measured["ways"] if way["way"] == measured["choice"])
    if not best["nodes"]:
        return "choice: plain decoding, no way to draft is faster"
    return f"choice: {best['way']}, predicted {best['speedup']:.2f} × plain decoding"

"""What `spectrain generate` says for people: the table of the methods, and what its words mean."""

from __future__ import annotations

import textwrap
from typing import Any

from spectrain.core.show import WIDTH
from spectrain.evaluation.bootstrap import FEWEST

DEFINITIONS = {
    "tau": "tokens committed per target forward, the target's own included; the prefill's first "
    "token and everything after a stop token excluded",
    "accepted": "of the forwards that accepted all drafts before a depth, the share that accepted "
    "the one at that depth; drafts after a stop token count as not accepted",
    "spectrain-plain": "this engine without a head, same kernels and cache",
    "transformers": "the library's own generate(), dynamic cache, not compiled",
}


def render(report: dict[str, Any]) -> str:
    """What a person reads: the reply, or the table of the methods."""
    lines = []
    if "text" in report:
        lines += [] if report["shown"] else [report["text"], ""]
        if not (report["stats"] or "speedup" in report):
            return "\n".join([*lines, _one_line(report)])
    if report["lossy"]:
        lines.append("LOSSY: typical acceptance changes the output, it is not the target's own")
    lines.append(
        f"{report['prompts']} prompts, {report['rows']} at a time, at most "
        f"{report['max_new_tokens']} new tokens, temperature {report['temperature']:g}"
    )
    if report["quantisation"]:
        lines.append(f"target with {report['quantisation']} weights: not the same as without")
    rule = f", rule: {report['rule']}" if report["rule"] else ""
    lines.append(f"{report['way']}{rule}")
    lines.append(
        f"{'':<18}{'tokens':>8}{'tokens/s':>10}{'tau':>7}{'draft':>8}{'verify':>8}{'rest':>7}"
    )
    for name, method in report["methods"].items():
        row = f"{name:<18}{method['tokens']:>8}{method['tokens_per_second']:>10.1f}"
        row += f"{method['tau']:>7.2f}" if method["tau"] is not None else f"{'–':>7}"
        stages = method.get("stages", {})
        if "verify" in stages:
            row += f"{stages['draft']:>8.0%}{stages['verify']:>8.0%}{stages['overhead']:>7.1%}"
        lines.append(row)
    if report["stats"]:
        lines += _stats(report)
    beyond = report["beyond_the_draft"]
    if beyond and beyond["prompts"]:
        lines.append(
            f"{beyond['prompts']} prompts went beyond the draft's {beyond['positions']} positions, "
            "where its guesses are worse"
        )
    if report["cut_by_context"]:
        lines.append(f"cut short by the target's context: {report['cut_by_context']} prompts")
    for against in report.get("speedup", ()):
        if against["value"] is not None:
            low, high = against["low"], against["high"]
            between = "" if low is None else f" ({low:.2f}–{high:.2f})"
            lines.append(
                f"speed {against['value']:.2f} × {against['baseline']}{between}{_verdict(against)}"
            )
    if report["promised"] and "speedup" in report:
        measured, formula = report["promised"]
        usual = "" if formula is None else f"; the usual formula {formula:.2f} ×"
        lines.append(f"the plan promised {measured:.2f} × spectrain-plain{usual}")
    for name, count in report.get("identical", {}).items():
        lines.append(f"the same tokens as {name}: {count} of {report['prompts']} prompts")
    if report["not_compared"]:
        lines.append(f"tokens not compared: {report['not_compared']}")
    if "replies" in report:
        lines.append(f"replies: {report['replies']}")
    lines.append("")
    for name, text in report["definitions"].items():
        if name == "tau" or name in report["methods"] or (name == "accepted" and report["stats"]):
            lines += textwrap.wrap(f"{name}: {text}", WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def accepted_by_depth(runs: dict[str, int]) -> list[tuple[float, int]]:
    """For each depth the share of forwards that came so far and accepted it, and their number."""
    counts = {int(run): times for run, times in runs.items()}
    result = []
    for depth in range(1, max(counts, default=0) + 1):
        came = sum(times for run, times in counts.items() if run >= depth - 1)
        took = sum(times for run, times in counts.items() if run >= depth)
        result.append((took / came, came))
    return result


def _stats(report: dict[str, Any]) -> list[str]:
    lines = []
    for name, method in report["methods"].items():
        depths = accepted_by_depth(method["runs"])
        if depths:
            shares = "  ".join(f"{share:.2f} of {came}" for share, came in depths)
            lines.append(f"{name}, accepted at depth 1, 2 …: {shares}")
        if "stages" in method:
            stages = method["stages"]
            lines.append(
                f"{name}, a step: {stages['step_ms']:.1f} ms; all prompts were read in "
                f"{stages['prefill_seconds']:.2f} s"
            )
    return lines


def _one_line(report: dict[str, Any]) -> str:
    ((_, method),) = report["methods"].items()
    tau = "" if method["tau"] is None else f", τ {method['tau']:.2f}"
    lossy = " (LOSSY: typical acceptance)" if report["lossy"] else ""
    stopped = f", ended by {report['stopped_by']!r}" if report["stopped_by"] else ""
    return (
        f"\n[{method['tokens']} tokens, {method['tokens_per_second']:.1f} tokens/s{tau}, "
        f"{report['way']}{lossy}{stopped}]"
    )


def _verdict(ratio: dict[str, float | None]) -> str:
    """What the interval of a speedup allows to say."""
    if ratio["low"] is None:
        return f", too few prompts for an interval ({FEWEST} are needed)"
    if ratio["high"] < 1:
        return ", SLOWER: try `spectrain plan`, a better head or fewer drafts"
    return ", no difference shown: try more prompts" if ratio["low"] < 1 else ""

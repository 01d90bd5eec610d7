"""How `spectrain estimate` tells its report to a person: tables of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spectrain.core.show import table

_HELD = {
    "parameters": "parameters",
    "shared": "the target's embedding and output layer",
    "optimizer": "optimiser",
    "batch": "features of one micro-batch",
    "step": "what a step keeps, its logits",
    "gradients": "gradients",
}


def render(report: dict[str, Any]) -> str:
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    data, speed, flops = report["data"], report["speed"], report["flops"]
    memory, disk = report["memory"], report["disk"]
    trunk = "" if report["trunk"] == "frozen" else f", target trained along ({report['trunk']})"
    yield f"{report['family']} for {report['target']}{trunk}, on {report['device']}"
    yield (
        f"{data['conversations']:,} conversations ({data['from']}): {data['tokens']:,} tokens, "
        f"{data['reply_tokens']:,} in replies"
    )
    yield f"{report['steps']:,} steps of {report['batch_size']}, {report['micro_batch']} at a time"
    yield ""
    rows = [
        {
            "part": row["part"],
            "parameters": f"{row['parameters']:,}",
            "trained": f"{row['trained']:,}",
        }
        for row in report["parameters"]
    ]
    total = {
        name: f"{sum(row[name] for row in report['parameters']):,}"
        for name in ("parameters", "trained")
    }
    yield from table([*rows, {"part": "all"} | total])
    yield ""
    parts = [
        {
            "work": name,
            "GFLOP a step": _number(flops["by_part"].get(name, 0) / 1e9),
            "seconds": _number(seconds),
        }
        for name, seconds in speed["by_part"].items()
    ]
    yield from table(parts)
    yield (
        f"{flops['per_token'] / 1e6:,.0f} MFLOP a token, {_flops(flops['run'])} in all; a large "
        f"product runs at {_flops(speed['product_flops'])}/s here"
    )
    yield (
        f"about {speed['tokens_per_second']:,.0f} tokens/s "
        f"({speed['reply_tokens_per_second']:,.0f} of replies), {_number(speed['step_seconds'])} s "
        f"a step, {clock(speed['run_seconds'])} in all"
    )
    yield ""
    yield from table([{"memory": _HELD[n], "size": size_text(memory[n])} for n in _HELD])
    verdict = "fits" if memory["fits"] else "does NOT fit"
    yield (
        f"at most {size_text(memory['peak'])} at a time, {size_text(memory['free'])} are free: "
        f"{verdict}"
    )
    yield from (f"  {line}" for line in report["advice"])
    host = memory["host"]
    yield (
        f"reading the target takes {size_text(host['loading'])} of the machine's memory, "
        f"{size_text(host['free'])} are free{'' if host['fits'] else ': does NOT fit'}"
    )
    if not (memory["fits"] and host["fits"]):
        yield "as it stands, this training does not run on this machine"
    yield (
        f"on disk: head {size_text(disk['head'])}, a checkpoint {size_text(disk['checkpoint'])} "
        f"(kept: {disk['checkpoints_kept']}), a store {size_text(disk['store'])}"
    )


def size_text(count: float) -> str:
    """Bytes for people."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.0f} MB" if count >= 1e6 else f"{count / 1e3:,.0f} kB"


def clock(seconds: float) -> str:
    """Seconds for people."""
    for size, name in ((172800, "days"), (5400, "h"), (90, "min")):
        if seconds >= size:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[name]:,.1f} {name}"
    return f"{seconds:,.0f} s"


def _flops(count: float) -> str:
    for size, name in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP")):
        if count >= size:
            return f"{count / size:,.1f} {name}"
    return f"{count / 1e9:,.0f} GFLOP"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

"""What `doctor` says of a head that it has run.

accepted: `_Patient.behave`'s · further: the command that trains the head further
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spectrain.evaluation import behaviour
from spectrain.export.layout import Finding


def verdicts(
    accepted: dict[str, Any] | None, tried: list[dict[str, Any]], further: str
) -> Iterator[Finding]:
    """Whether it guesses at all, and the change that explains it if not."""
    likely = [row for row in tried if row["likely"]][:1]
    if accepted is not None:
        yield acceptance(accepted, None if likely else len(tried), further)
        yield from next_position(accepted, further)
    for row in likely:
        text = f"{row['name']}: position 1 is then accepted {row['position_1']:.2f}"
        if accepted is not None:
            text += f" instead of {accepted['positions'][0]['conditional']['value']:.2f}"
        yield Finding("likely cause", "fail", text, row["fix"])


def acceptance(accepted: dict[str, Any], in_vain: int | None, further: str = "") -> Finding:
    """in_vain: how many causes were tried and none explains it; None: one does."""
    blind, first = accepted["blind"], accepted["positions"][0]["conditional"]
    if blind is None:
        text = "not measured: no reply has two tokens"
        return Finding("acceptance", "note", text, "give --prompts that are answered at length")
    high = first["value"] if first["high"] is None else first["high"]
    interval = "" if first["high"] is None else f" ({first['low']:.2f}–{first['high']:.2f})"
    text = f"{first['value']:.2f}{interval} at position 1; a blind guess has {blind:.2f}"
    if high >= behaviour.least(blind):
        return Finding("acceptance", "ok", text)
    fix = ""
    if in_vain is not None:
        fix = f"none of {in_vain} causes that were tried explains it: was it trained on another "
        fix += f"target or template, or hardly at all? {further}".rstrip()
    return Finding("acceptance", "fail", f"near zero: {text}", fix)


def next_position(accepted: dict[str, Any], further: str = "") -> Iterator[Finding]:
    """A head that guesses once and never again: what it feeds itself is not what it learnt on."""
    for row in accepted["positions"][1:2]:
        high = row["conditional"]["high"]
        if high is not None and high < behaviour.least(accepted["blind"]):
            text = f"near zero at position 2: {row['conditional']['value']:.2f}"
            fix = (
                "see which state a step hands to the next one, before or after the norm (of MTP: "
                f"pass_on in config.json), or train it for more steps: {further}"
            )
            yield Finding("acceptance", "fail", text, fix)


def ranked(tried: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best first; but before a likely one that nothing else tells of, one that a finding tells
    of too, where its interval does not leave it behind."""
    rows = sorted(tried, key=lambda row: -(row["position_1"] or 0))
    best = next((row for row in rows if row["likely"] and row["gain"]), None)
    if best is None:
        return rows

    def level(row: dict[str, Any]) -> bool:
        return row["seen"] and row["likely"] and row["gain"]["high"] >= best["gain"]["value"]

    return sorted(rows, key=lambda row: not level(row))

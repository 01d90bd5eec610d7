"""What `doctor` says of a head that it has run.

accepted: `Patient.behave`'s · tried: `Patient.tried`'s · further: the command that trains the head
further
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spectrain.export.layout import Finding

_MORE = "give more --prompts, or a higher --limit or --max-new-tokens"


def verdicts(
    accepted: dict[str, Any] | None, tried: list[dict[str, Any]], further: str
) -> Iterator[Finding]:
    """Whether it guesses at all, and the change that explains it if not."""
    likely = [row for row in tried if row["likely"]][:1]
    if accepted is not None:
        yield from not_finite(accepted)
        explained = {row["position"] for row in likely}
        vain = sum(row["position"] == 1 for row in tried)
        yield acceptance(accepted, None if 1 in explained else vain, further)
        yield from next_position(accepted, None if 2 in explained else further)
    for row in likely:
        text = f"{row['name']}: position {row['position']} is then accepted {row['accepted']:.2f}"
        if row["before"] is not None:
            text += f" instead of {row['before']:.2f}"
        yield Finding("likely cause", "fail", text, row["fix"])


def not_finite(accepted: dict[str, Any]) -> Iterator[Finding]:
    """Of such logits the first is taken for the largest, and a constant guess may be accepted."""
    for row in accepted["positions"]:
        if row["not_finite"]:
            text = (
                f"NaN or infinite at position {row['position']}, for {row['not_finite']:,} drafts"
            )
            fix = (
                "see that the numbers of its config.json are right; else take an earlier checkpoint"
            )
            yield Finding("logits", "fail", text, fix)
            return


def acceptance(accepted: dict[str, Any], in_vain: int | None, further: str = "") -> Finding:
    """in_vain: how many causes were tried and none explains it; None: one does."""
    row = accepted["positions"][0]
    if row["blind"] is None:
        text = "not measured: no reply has two tokens"
        return Finding("acceptance", "note", text, "give --prompts that are answered at length")
    text = f"{_told(row['conditional'])} at position 1; a blind guess has {row['blind']:.2f}"
    if row["knows"]:
        return Finding("acceptance", "ok", text)
    if row["knows"] is None:
        text += f", {_told(row['over_blind'])} less" if row["over_blind"]["low"] is not None else ""
        text = f"{accepted['conversations']} replies do not tell whether it guesses at all: {text}"
        return Finding("acceptance", "warn", text, _MORE)
    fix = ""
    if in_vain is not None:
        fix = f"none of {in_vain} causes that were tried explains it: was it trained on another "
        fix += f"target or template, or hardly at all? {further}".rstrip()
    return Finding("acceptance", "fail", f"near zero: {text}", fix)


def next_position(accepted: dict[str, Any], further: str | None = "") -> Iterator[Finding]:
    """A head that guesses once and never again: what it feeds itself is not what it learnt on.
    further: None where a cause explains it."""
    for row in accepted["positions"][1:2]:
        if row["knows"] is False:
            text = f"near zero at position 2: {row['conditional']['value']:.2f}"
            fix = (
                "see which state a step hands to the next one, before or after the norm (of MTP: "
                f"pass_on in config.json), or train it for more steps: {further}"
            )
            yield Finding("acceptance", "fail", text, "" if further is None else fix)


def ranked(tried: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By position, the best first; but before a likely one that nothing else tells of, one that a
    finding tells of too, where its interval does not leave it behind."""
    rows = sorted(tried, key=lambda row: (row["position"], -(row["accepted"] or 0)))
    best = next((row for row in rows if row["likely"] and row["gain"]), None)
    if best is None:
        return rows

    def level(row: dict[str, Any]) -> bool:
        near = row["seen"] and row["likely"] and row["position"] == best["position"]
        return near and row["gain"]["high"] >= best["gain"]["value"]

    return sorted(rows, key=lambda row: not level(row))


def _told(interval: Mapping[str, float | None]) -> str:
    if interval["low"] is None:
        return f"{interval['value']:.2f}"
    return f"{interval['value']:.2f} ({interval['low']:.2f}–{interval['high']:.2f})"

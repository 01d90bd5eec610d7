"""What `inspect` prints: rows with the supervised text marked, and a table of fates.

Supervised text stands in ⟦ ⟧, with or without colours. The text is somebody else's: nothing in it
reaches the terminal as anything but text, and what cannot be seen is spelled out.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from spectrain.core.show import table
from spectrain.data.fates import PLACES

OPEN, CLOSE = "⟦", "⟧"
SUPERVISED, SPECIAL, QUIET = "bold green", "reverse", "dim"
_JOINERS = "\u200c\u200d"  # invisible, but part of words and emoji


def render(report: Mapping[str, Any]) -> Text:
    """What a person reads."""
    text = Text(overflow="fold")
    if report["note"]:
        text.append(f"note: {report['note']}\n\n", style="bold")
    for row in report["rows"]:
        text.append_text(_row(row)).append("\n\n")
    text.append(
        f"{visible(report['source'])}: {report['read']}, tokenizer of {visible(report['target'])}\n"
    )
    fates = [
        {
            "fate": entry["fate"],
            "rows": f"{entry['rows']:,}",
            "tokens": f"{entry['tokens']:,}" if entry["tokens"] else "",
            "supervised": f"{entry['supervised']:,}" if entry["tokens"] else "",
            **({"counted of": entry["of"]} if entry["of"] else {}),
        }
        for entry in report["fates"]
    ]
    text.append("\n".join(table(fates)))
    for entry in report["fates"]:
        if entry["places"] and entry["fate"] != "kept":
            text.append(f"\n{entry['fate']}:")
            for place in entry["places"][:PLACES]:
                text.append(f"\n  {visible(place)}")
    return text


def _row(row: Mapping[str, Any]) -> Text:
    facts = [f"#{row['number']} {row['id']}", row["split"]]
    facts += [visible(row["domain"])] if row["domain"] else []
    facts += [f"{row['tokens']:,} tokens", f"{row['supervised']:,} supervised"]
    facts += [] if row["temperature"] is None else [f"temperature {row['temperature']:g}"]
    facts += [f"finish {visible(row['finish'])}"] if row["finish"] else []
    facts += ["cut at max_length"] if row["truncated"] else []
    text = Text()
    text.append(" · ".join(facts), style="bold")
    for place in row["places"]:
        text.append(f"\n{visible(place)}", style=QUIET)
    text.append("\n")
    reply = 0
    for part in row["parts"]:
        if part["reply"] != reply:
            text.append(CLOSE * bool(reply) + OPEN * bool(part["reply"]), style=SUPERVISED)
            reply = part["reply"]
        style = f"{SUPERVISED if reply else ''} {SPECIAL if part['special'] else ''}".strip()
        text.append(visible(part["text"]).replace("\n", "↵\n"), style=style)
    return text.append(CLOSE * bool(reply), style=SUPERVISED)


def visible(text: str) -> str:
    """`text` with every character that a terminal obeys, or that cannot be seen, spelled out; line
    breaks stay. The marks of supervised text cannot be forged."""
    return "".join(char if _harmless(char) else _spelled(char) for char in text)


def _harmless(char: str) -> bool:
    if char in (OPEN, CLOSE):
        return False
    return char in "\n" + _JOINERS or unicodedata.category(char) not in (
        "Cc",
        "Cf",
        "Zl",
        "Zp",
        "Cs",
    )


def _spelled(char: str) -> str:
    return char.encode("unicode_escape").decode()

"""The table and the picture of `draft-vocab`; takes the report of `recipes.draft_vocab.run`."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, ScalarFormatter

from spectrain.core.show import WIDTH
from spectrain.evaluation.bootstrap import FEWEST
from spectrain.evaluation.coverage import TOLERANCE
from spectrain.evaluation.plot import COLOURS, MARKERS

DEFINITIONS = {
    "vocabulary": "special and stop tokens, those of single bytes where they are at most a quarter "
    "of it, then the most frequent tokens of training replies",
    "lm_head": "bytes of D rows in the target's number type: what a draft step reads of it",
    "unseen": "tokens of the vocabulary that no training reply holds",
    "tokens": "share of reply tokens inside",
    "argmax": "share of the target's own first choices inside, before every reply token (also the "
    "first, which is never drafted); the rest is rejected at temperature 0 whatever the head does",
    "mass": "mean probability of the target inside, at temperature 1, on a sample of the same "
    "positions: no head accepts more there",
    "interval (in --json)": "95 %, bootstrap over conversations; none from fewer than "
    f"{FEWEST} that have the quantity",
}
SHARES = ("tokens", "argmax", "mass")
_NAMES = {"argmax": "of the target's choices", "tokens": "of the reply tokens"}


def render(report: Mapping[str, Any]) -> str:
    """Everything to print."""
    counts = report["counts"]
    lines = textwrap.wrap(
        f"Draft vocabularies for {report['target']}: {report['vocabulary']:,} tokens, "
        f"{_pinned(report['sizes'])}, {report['seen']:,} seen in "
        f"{counts['train']['tokens']:,} reply tokens of {report['store']}",
        WIDTH,
    )
    lines += ["", f"{'':<26}{'held-out, %':>27}{'training, %':>27}"]
    lines += [
        f"{'size':>8}{'lm_head':>10}{'unseen':>8}" + f"{'tokens':>9}{'argmax':>9}{'mass':>9}" * 2
    ]
    for row in report["sizes"]:
        cells = [row[split][name] for split in ("heldout", "train") for name in SHARES]
        lines.append(
            f"{row['size']:>8,}{row['lm_head_bytes'] / 1e6:>7,.1f} MB{row['never_seen']:>8,}"
            + "".join(f"{_percent(cell):>9}" for cell in cells)
        )
    lines += ["", *textwrap.wrap(_advice(report), WIDTH), ""]
    for name, text in report["definitions"].items():
        lines += textwrap.wrap(f"{name}: {text}", WIDTH, subsequent_indent="  ")
    return "\n".join([*lines, f"plot {report['plot']}"])


def _pinned(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many tokens are in, whatever the text."""
    least = rows[0]["pinned"]
    text = f"{least} of them in every vocabulary"
    for row in rows:
        if row["pinned"] > least:
            return f"{text} ({row['pinned']} from size {row['size']:,} on)"
    return text


def _percent(interval: Mapping[str, Any] | None) -> str:
    return "–" if interval is None else f"{100 * interval['value']:.2f}"


def _advice(report: Mapping[str, Any]) -> str:
    """What the numbers allow to say, and no more."""
    found, heldout = report["recommended"], report["counts"]["heldout"]
    if found is None:
        return (
            "no held-out rows: on the replies it was chosen by a vocabulary looks better than it "
            "is. Give --heldout-store, or prepare with --heldout above 0"
        )
    covered = found["covered"]
    interval = ", too few conversations for an interval"
    if covered["low"] is not None:
        interval = f", {100 * covered['low']:.2f}–{100 * covered['high']:.2f}"
    best = f"the smallest size within {100 * TOLERANCE:g} points of it is {found['size']:,}"
    if found["size"] == report["vocabulary"]:
        best = f"no smaller size here comes within {100 * TOLERANCE:g} points of it"
    return (
        f"held-out coverage {_NAMES[found['by']]}, the whole vocabulary as the measure: {best} "
        f"({_percent(covered)} %{interval}; {heldout['conversations']:,} conversations). A token "
        "outside is always rejected, so coverage is a ceiling of α on text like this and no "
        "forecast of it; what a smaller lm_head saves in time, `spectrain plan` measures"
    )


def draw(report: Mapping[str, Any]) -> bytes:
    """Coverage by size, held-out and training text side by side, as a PNG."""
    figure = Figure(figsize=(11, 4.5), dpi=150, layout="constrained")
    titles = {"heldout": "Held-out replies", "train": "Replies it was chosen by"}
    splits = [split for split in titles if report["counts"][split]["tokens"]]
    panels = figure.subplots(1, len(splits), sharey=True, squeeze=False)[0]
    for axes, split in zip(panels, splits, strict=True):
        for number, name in enumerate(SHARES):
            known = [(row["size"], row[split][name]) for row in report["sizes"] if row[split][name]]
            if not known:
                continue
            style = {"color": COLOURS[number], "marker": MARKERS[number], "label": name}
            sizes = [size for size, _ in known]
            axes.plot(sizes, [share["value"] for _, share in known], linewidth=2, **style)
            if known[0][1]["low"] is not None:  # every size has as many conversations
                low, high = ([share[end] for _, share in known] for end in ("low", "high"))
                axes.fill_between(sizes, low, high, color=COLOURS[number], alpha=0.18)
        axes.set_xscale("log", base=2)
        axes.set_xticks([row["size"] for row in report["sizes"]])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.tick_params(axis="x", labelrotation=45)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_title(titles[split], fontsize=12, loc="left")
        axes.set_xlabel("tokens of the draft vocabulary")
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("inside the vocabulary")
    panels[0].legend(frameon=False)
    figure.suptitle(f"Draft vocabularies for {report['target']}", fontsize=11, color="#333333")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()

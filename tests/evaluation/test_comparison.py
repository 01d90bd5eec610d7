"""The table of `compare`: every cell, against a report whose numbers are all different."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from spectrain.evaluation import comparison
from spectrain.evaluation.comparison import draw, headline, markdown, rows, table


def interval(value, spread=0.0625):
    if value is None:
        return {"value": None, "low": None, "high": None}
    low, high = (None, None) if spread is None else (value - spread, value + spread)
    return {"value": value, "low": low, "high": high}


def entry(tau, conditional, *, base, quality=None, **costs):
    """τ and conditional α by position; marginal, joint are other numbers."""
    return {
        "parameters": 12_340_000 + base,
        "trained_parameters": 4_560_000 + base,
        "trained_tokens": 7_890_000 + base,
        "seconds": 321.4 + base,
        "bytes_per_token": 4_608.3 + base,
        "quality": quality,
        "positions": [
            {
                "position": k + 1,
                "conditional": interval(value),
                "marginal": interval(0.01),
                "joint": interval(0.02),
            }
            for k, value in enumerate(conditional)
        ],
        "tau": [{"draft": g + 1, **interval(value)} for g, value in enumerate(tau)],
    } | costs


@pytest.fixture
def report():
    """`worse` comes first and is the better one at γ = 1; `better` wins at the longest draft."""
    ratio = "speedup over spectrain-plain"
    wrong = {"speedup over transformers": interval(9.0), "tau": 9.0, "tokens_per_second": 9.0}
    wrong |= {"draft_tokens": 3, "identical": 17}
    quality = {"heldout_tokens": 987, "perplexity_before": 2.3456, "perplexity_after": 2.4567}
    loaded = {"trained_parameters": None, "trained_tokens": None, "seconds": None}
    return {
        "target": "small",
        "store_tokens": 1_234_567,
        "heldout_conversations": 41,
        "draft_tokens": 2,
        "race_draft_tokens": 3,
        "entries": {
            "worse": entry([1.7, 1.8], [0.71, 0.52], base=0),
            "better": entry([1.6, 2.5], [0.63, None], base=1_000_000, quality=quality),
            "loaded": entry([1.5, 2.125], [0.44, 0.35], base=2_000_000, **loaded),
        },
        "race": {
            "prompts": 17,
            "methods": {
                "worse": wrong | {ratio: interval(1.25)},
                "better": wrong | {ratio: interval(0.75, None)},
                "loaded": wrong | {ratio: interval(1.5)},
                "spectrain-plain": wrong | {ratio: interval(1.0)},
                "transformers": wrong | {ratio: interval(0.5)},
            },
        },
        "table": "out/compare.md",
        "plot": "out/compare.png",
    }


HEADER = ["head", "params", "trained", "tokens", "train s", "B/token", "α1", "α2", "τ, γ = 2",
          "speed, γ = 3"]  # fmt: skip
CELLS = [
    ["better", "13.3", "5.6", "8,890k", "1,000,321", "1,004,608", "0.63", "–", "2.50 (2.44–2.56)",
     "0.75"],
    ["loaded", "14.3", "–", "–", "–", "2,004,608", "0.44", "0.35", "2.12 (2.06–2.19)",
     "1.50 (1.44–1.56)"],
    ["worse", "12.3", "4.6", "7,890k", "321", "4,608", "0.71", "0.52", "1.80 (1.74–1.86)",
     "1.25 (1.19–1.31)"],
    ["spectrain-plain", *[""] * 7, "1", "1"],
    ["transformers", *[""] * 7, "1", "0.50 (0.44–0.56)"],
]  # fmt: skip


def test_every_cell_is_its_number_and_the_best_tau_comes_first(report):
    assert rows(report) == (HEADER, CELLS)


def test_the_length_of_draft_is_the_one_that_was_raced(report):
    report["race"]["methods"]["worse"]["draft_tokens"] = 2
    assert rows(report)[0][-1] == "speed, γ ≤ 3"


def test_the_headline_says_what_was_measured_on_what(report):
    words = (
        "small, 1,234,567 reply tokens in the store, 41 held-out conversations, race over "
        "17 held-out prompts, plain decoding's tokens "
    )
    assert headline(report) == words + "by every head on all of them"
    report["race"]["methods"]["better"]["identical"] = 15
    assert headline(report) == words + "but for better 15 of 17"
    report["store_tokens"] = None
    assert "small, 0 reply tokens" in headline(report)


def test_markdown_has_the_same_cells_and_the_headline_below(report):
    head, rule, *lines = markdown(report).splitlines()
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines[:5])]
    assert split == [HEADER, *CELLS]
    assert rule.count("---") == len(HEADER)
    told = "perplexity of 987 held-out reply tokens 2.346 → 2.457"
    own = "α and τ on the tuned target's own replies"
    assert lines[5:] == ["", f"{headline(report)}. better tunes its target: {told}; {own}"]


def test_a_terminal_shows_the_same_and_what_the_columns_mean(report):
    console = Console(file=io.StringIO(), width=200)
    console.print(table(report))
    shown = console.file.getvalue()
    assert headline(report) in shown
    for cell in (*HEADER, *(cell for row in CELLS for cell in row)):
        assert cell in shown
    for name, text in comparison.DEFINITIONS.items():
        assert f"{name}: {text}"[:100] in shown
    # The perplexity is told for the one entry that tunes its target.
    assert "better tunes its target" in shown
    assert "2.346 → 2.457" in shown
    assert "worse tunes" not in shown
    assert "table out/compare.md, plot out/compare.png" in shown


def test_the_picture_shows_the_numbers_of_the_table(report, monkeypatch):
    made = []

    class Figure(comparison.Figure):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(comparison, "Figure", Figure)
    assert draw(report)[:4] == b"\x89PNG"
    left, middle, right = made[0].axes

    def lines(axes):
        return {line.get_label(): line.get_xydata().tolist() for line in axes.lines}

    assert lines(left) == {
        "better": [[1, 0.63]],
        "loaded": [[1, 0.44], [2, 0.35]],
        "worse": [[1, 0.71], [2, 0.52]],
    }
    assert lines(middle)["worse"] == [[1, 1.7], [2, 1.8]]
    assert lines(middle)["better"] == [[1, 1.6], [2, 2.5]]
    names = [label.get_text() for label in right.get_yticklabels()]
    widths = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in right.patches}
    assert {name: widths[place] for place, name in enumerate(names)} == {
        "better": 0.75,
        "loaded": 1.5,
        "worse": 1.25,
    }


def test_a_perplexity_that_is_no_number_is_no_error(report):
    report["entries"]["better"]["quality"] |= {"heldout_tokens": 0, "perplexity_after": None}
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table(report))
    assert "0 held-out reply tokens 2.346 → –" in " ".join(captured.get().split())

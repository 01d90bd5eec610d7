"""Reports fit 80 columns whatever they hold, and leave nothing of interest out."""

from __future__ import annotations

from spectrain.core.show import show


def test_report_fits_the_terminal():
    report = {
        "target": "smollm2-135m",
        "tau": {"value": 1.71234567, "low": 1.6, "high": 1.8},
        "alpha": [{"position": k, "marginal": 0.5**k, "joint": None} for k in range(3)],
        "replies": [{"prompt": "why " * 40, "text": "because " * 40, "tokens": 80}],
        "domains": ["chat", "code"],
        "greedy_identical": True,
        "provenance": {"secret": "of the machine"},
    }
    text = show(report)
    assert max(map(len, text.splitlines())) <= 80
    for words in ("1.712", "position  marginal  joint", "0.25      -", "chat, code", "yes"):
        assert words in text
    assert text.count("because") == 40
    assert "secret" not in text


def test_empty_values():
    assert show({"a": {}, "b": [], "c": ""}) == "a  -\nb  -\nc"

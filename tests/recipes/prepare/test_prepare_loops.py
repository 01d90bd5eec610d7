"""Replies that go round in circles: marked in the rows that were asked for, counted, or dropped.

A target with tied embeddings and next to no weights says at temperature 0 what it has just read; at
temperature 1 all of its tokens are nearly as likely.
"""

from __future__ import annotations

from preparing import PROMPTS, talk, write
from tiny_models import save_tiny

from spectrain.data.store import FeatureStore
from spectrain.recipes import prepare


def stuck(tokens: list[int]) -> bool:
    """Some block comes six times and for 64 tokens, or four times and for 128 (data/loops.py)."""
    return any(
        tokens[start : start + length] == (tokens[start : start + block] * length)[:length]
        for times, least in ((6, 64), (4, 128))
        for block in range(1, 65)
        for length in [max(times * block, least)]
        for start in range(len(tokens) - length + 1)
    )


def rows_of(config) -> dict:
    store = FeatureStore.open(config.store)
    rows = [*store.rows("train"), *store.rows("heldout")]
    return {(row.id, row.temperature): (row, store.reply_tokens(row).tolist()) for row in rows}


def test_loops_are_marked_counted_and_dropped(config, tokenizer, tmp_path):
    given = talk("What now?", "again " * 90, finish_reason="stop")
    settings = {
        "target": str(save_tiny(tmp_path / "stuck", tokenizer, initializer_range=0.02)),
        "prompts": write(tmp_path / "some.jsonl", [*PROMPTS[:10], given]),
        "max_new_tokens": 96,
        "heldout_temperatures": 0.0,
        "features": "none",
    }
    kept = config(**settings, store=tmp_path / "kept")
    report = prepare.run(kept)
    whole = rows_of(kept)
    circles = {
        name
        for name, (row, reply) in whole.items()
        if stuck(reply) and row.temperature is not None  # what was given is the user's own choice
    }
    assert 0 < len(circles) < len(whole) - 1
    assert {name for name, (row, _) in whole.items() if row.loops} == circles
    assert report["counts"]["loops"] == len(circles)
    assert any(stuck(reply) and not row.loops for row, reply in whole.values())
    shown = prepare.render(report)
    assert f"going round in circles: {len(circles)}" in shown
    assert "--set loops=drop leaves them out" in shown

    left = config(**settings, store=tmp_path / "left", loops="drop")
    report = prepare.run(left)
    assert report["counts"]["loops"] == 0
    assert report["counts"]["dropped"] == {"loops": len(circles)}
    assert len(report["dropped_at"]["loops"]) == len(circles)
    assert {name: reply for name, (_, reply) in rows_of(left).items()} == {
        name: reply for name, (_, reply) in whole.items() if name not in circles
    }

"""--dry-run: what it would take, and nothing written."""

import pytest
from preparing import PROMPTS, talk, write

from spectrain.core.errors import SpectrainError
from spectrain.recipes import prepare
from spectrain.recipes.prepare import PrepareConfig


def test_given_rows_are_told_exactly(config, tmp_path):
    """The same rows, tokens and reply tokens that a run then makes; bytes are enough for them."""
    rows = [*(talk(f"q{n}", f"a reply {n}") for n in range(9)), talk("q", ""), talk("q", "ok", "x")]
    settings = {"prompts": write(tmp_path / "given.jsonl", rows), "regenerate": False}
    told = prepare.run(config(**settings, dry_run=True))
    assert not config().store.exists()
    made = prepare.run(config(**settings))
    counts = made["counts"]
    assert told["given"] == told["at_most"]
    assert told["given"] == {
        "rows": sum(counts["rows"].values()),
        "tokens": sum(counts["tokens"].values()),
        "supervised": sum(counts["supervised_tokens"].values()),
    }
    assert told["dropped"] == counts["dropped"] == {"empty-reply": 1}
    assert made["bytes"] <= told["bytes"] <= 2 * made["bytes"] + 10_000
    assert told["replies"] == 0
    assert told["tokens_per_second"]["answer"] is None


@pytest.mark.parametrize("regenerate", ["last", True])
def test_replies_are_bounded_from_above(config, tmp_path, regenerate):
    """No run makes more of anything than was told; every reply is counted."""
    rows = [*PROMPTS, *(talk(f"hello {n}", "x" * n, f"and {n}?", "y") for n in range(8))]
    settings = {"prompts": write(tmp_path / "talks.jsonl", rows), "regenerate": regenerate}
    told = prepare.run(config(**settings, dry_run=True))
    assert list(tmp_path.glob("store*")) == []
    made = prepare.run(config(**settings))
    counts, most = made["counts"], told["at_most"]
    assert sum(counts["rows"].values()) <= most["rows"]
    assert sum(counts["tokens"].values()) <= most["tokens"]
    assert sum(counts["supervised_tokens"].values()) <= most["supervised"]
    assert made["bytes"] <= told["bytes"]
    assert all(rate > 0 for rate in told["tokens_per_second"].values())
    assert all(seconds > 0 for seconds in told["seconds"].values())
    text = prepare.render(told)
    assert "dry run: nothing was written" in text
    assert f"answer: {told['replies']} replies, at most" in text


def test_less_is_kept_for_a_family(config):
    sizes = {
        family: prepare.run(config(dry_run=True, family=family))["bytes"]
        for family in (None, "eagle3", "eagle1", "medusa")
    }
    assert sizes[None] > sizes["eagle3"] > sizes["eagle1"] > sizes["medusa"]
    whole = prepare.run(config(dry_run=True, dtype="int8"))["bytes"]
    assert 0.5 * sizes[None] < whole < 0.65 * sizes[None]
    assert prepare.run(config(dry_run=True, features="none"))["bytes"] < 0.1 * sizes[None]


def test_an_unknown_family_is_told_with_those_there_are():
    with pytest.raises(SpectrainError, match=r"eagle4.*eagle3"):
        PrepareConfig(family="eagle4")

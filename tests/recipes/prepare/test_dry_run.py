"""--dry-run: what it would take, and nothing written."""

import shutil

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
        "heldout": counts["rows"]["heldout"],
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


def test_rows_of_a_template_that_rewrites_history(config, tmp_path, tiny_path):
    """Each turn is a row of its own there, with all that came before: the bound must say so."""
    other = shutil.copytree(tiny_path, tmp_path / "rewriting")
    template = other / "chat_template.jinja"
    shown = "message['content']"
    cut = f"({shown}.split('</think>')[-1].lstrip() if not loop.last else {shown})"
    text = template.read_text().replace(shown, cut)
    # what it thinks is always something, so that rows must split
    text = text.replace(
        "message['role'] +", "(message['role'] | upper if not loop.last else message['role']) +"
    )
    template.write_text(text)
    rows = [talk(f"hello {n}", "x", f"and {n}?", "y", "so?", "z") for n in range(8)]
    settings = {"prompts": write(tmp_path / "talks.jsonl", rows), "regenerate": True}
    settings |= {"target": str(other), "heldout": 0.0}
    told = prepare.run(config(**settings, dry_run=True))
    made = prepare.run(config(**settings))["counts"]
    assert told["at_most"]["rows"] == 24
    assert made["rows"]["train"] <= 24
    assert made["tokens"]["train"] <= told["at_most"]["tokens"]


def test_what_prepare_refuses_the_dry_run_refuses(config, tmp_path, tiny_path):
    base = shutil.copytree(tiny_path, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    with pytest.raises(SpectrainError, match="no chat template"):
        prepare.run(config(target=str(base), dry_run=True))
    none = write(tmp_path / "none.jsonl", [talk("q", "")])
    with pytest.raises(SpectrainError, match="no row is left: 1 empty-reply"):
        prepare.run(config(prompts=none, dry_run=True))


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

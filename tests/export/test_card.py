"""The page of a head: valid whatever its texts hold, and no number on it that was not measured."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from head_kinds import create
from markdown_it import MarkdownIt

from spectrain.core.errors import SpectrainError
from spectrain.export.card import About, readme
from spectrain.export.layout import Launch
from spectrain.export.markdown import code, front_matter, plain, table
from spectrain.export.measured import ALPHA, Alpha, Known, known
from spectrain.heads.io import save_head, weights_digest

NASTY = "a|b `c` *d*\n---\n# zz <script>[x](y) {} \x1b \\| ~~f~~"


def interval(value, low=None, high=None):
    return {"value": value, "low": low, "high": high}


def alpha_report(head="runs/train/head", **more):
    """What `eval-alpha` writes, with one temperature, two positions and two domains."""
    numbers = {
        "conversations": 12,
        "tokens": 3456,
        "positions": [
            {
                "position": k,
                "marginal": interval(0.61 - k / 10, 0.40, 0.70),
                "conditional": interval(0.71 - k / 10, 0.50, 0.80),
                "anchors": 1000 * k,
                "reached": 500.4,
            }
            for k in (1, 2)
        ],
        "tau": [{"draft": k, **interval(1.2 + k / 10), "forwards": 700.0} for k in (1, 2)],
    }
    measured = {"temperature": 0.0, "note": None, "rows": 24, **numbers}
    measured["domains"] = {"chat": numbers, NASTY: numbers}
    words = {
        "conditional": "E[min | before]",
        "interval": "95 %, bootstrap",
        "ranks (in --json)": "",
    }
    return {
        "head": head,
        "split": "heldout",
        "temperatures": [measured],
        "definitions": words,
        **more,
    }


@pytest.fixture
def head(tiny):
    return create(tiny, "eagle3", steps=2, draft_vocab_size=120)


@pytest.fixture
def page(head):
    def make(**changes):
        settings = {
            "format": "spectrain",
            "layout": "spectrain",
            "config": head.config,
            "base": "owner/model",
            "here": "my-model",
            "on_hub": True,
            "base_note": None,
            "license": "other",
            "dtype": "float32",
            "rounded": False,
            "parameters": 1234,
            "launches": [Launch("engine 1.0", 'run \'{"model": "{folder}"}\'')],
            "files": {"model.safetensors": 4936},
            "known": Known(),
        }
        return readme(About(**settings | changes))

    return make


def metadata(text):
    _, block, rest = text.split("---\n", 2)
    return yaml.safe_load(block), rest


def structure(text):
    """What a reader of markdown makes of the page: every kind of element, in order."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    inner = [one.type for token in tokens for one in token.children or ()]
    return [token.type for token in tokens], [kind for kind in inner if kind != "text"]


def tables(text):
    """Rows of every table, as cells: split at bars that are not escaped."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]


def test_the_numbers_come_with_their_definition_rule_and_counts(page):
    alpha = Alpha.model_validate(alpha_report())
    text = page(known=Known(alpha=alpha))
    assert "| 1 | 0.610 | 0.500–0.800 | 0.510 | 0.400–0.700 | 500 | 1,000 |" in text
    assert "| 2 | 1.400 |  | 700 |" in text
    for words in ("Rule: greedy", "12 held-out conversations, 3,456 reply tokens", "bootstrap"):
        assert words in text
    assert "ranks" not in text


def test_what_was_not_measured_is_not_there(page):
    text = page()
    assert "Not measured. To measure it:\n\n```bash\nspectrain eval-alpha" in text
    assert "--target my-model --store STORE" in text
    assert "--target 'my model' --store STORE" in page(here="my model")
    assert "α" not in text
    assert "Nothing is known of it" in text
    assert re.search(r"## Speed\n\nNot measured", text)


def test_the_metadata_is_what_a_hub_reads(page):
    found, _ = metadata(page(license="apache-2.0", datasets=("a/b",)))
    assert found["license"] == "apache-2.0"
    assert found["base_model"] == "owner/model"
    assert found["datasets"] == ["a/b"]
    assert {"speculative-decoding", "eagle3"} <= set(found["tags"])
    local, _ = metadata(page(base="/some/folder", on_hub=False, base_note="a folder"))
    assert "base_model" not in local  # the hub would refuse the whole page
    assert "datasets" not in local


def test_no_text_breaks_the_page(page, head):
    """Cells stay cells, the metadata stays YAML, and nothing becomes markup."""
    config = head.config.model_copy(
        update={"target": head.config.target.model_copy(update={"fingerprint": NASTY})}
    )
    alpha = Alpha.model_validate(alpha_report())
    text = page(config=config, base=NASTY, base_note=NASTY, known=Known(alpha=alpha))
    found, rest = metadata(text)
    assert found["base_model"] == NASTY
    _, clean = metadata(page(base_note="x", known=Known(alpha=alpha)))
    assert structure(rest) == structure(clean)
    assert {len(row) for row in tables(rest)} == {2, 4, 5, 7}


def test_a_block_of_code_cannot_be_left():
    text = "echo ````\n```\n# not a title"
    block = code(text, "bash")
    assert block.startswith("`````bash\n")
    assert block.endswith("\n`````")
    assert block.count("`````") == 2


def test_cells_and_front_matter_of_hostile_texts():
    assert "\n" not in plain(NASTY)
    assert tables(table(("a", "b"), [(NASTY, "x|y")]))[2][1].strip() == r"x\|y"
    assert yaml.safe_load_all(front_matter({"a": NASTY})) is not None
    assert next(yaml.safe_load_all(front_matter({"a": NASTY, "b": None}))) == {"a": NASTY}


def test_the_folder_goes_into_commands_with_braces_of_their_own(page):
    assert 'run \'{"model": "FOLDER"}\'' in page()
    pushed = page(repo="me/my-head")
    assert "hf download me/my-head --local-dir my-head" in pushed
    assert 'run \'{"model": "my-head"}\'' in pushed


# ── which numbers are of this head ───────────────────────────────────────────


@pytest.fixture
def run_folder(head, tmp_path):
    save_head(head, tmp_path / "runs" / "train" / "head")
    return tmp_path / "runs" / "train"


def put(path, report):
    path.write_text(json.dumps(report))
    return path


def test_numbers_of_this_head_are_found_and_those_of_another_are_not(run_folder, tiny):
    place, found = run_folder / "head", lambda: known(run_folder, place, tiny).alpha
    assert found() is None
    put(run_folder.parent / ALPHA, alpha_report(weights=weights_digest(place)))
    assert found() is not None
    put(run_folder.parent / ALPHA, alpha_report(weights="0" * 64))
    assert found() is None
    # Older reports know their head by its path alone.
    put(run_folder.parent / ALPHA, alpha_report("runs/train/head"))
    assert found() is not None
    put(run_folder.parent / ALPHA, alpha_report("runs/other/head"))
    assert found() is None


def test_a_report_of_another_head_is_refused_when_it_is_named(run_folder, tiny, tmp_path):
    file = put(tmp_path / "alpha.json", alpha_report(weights="0" * 64))
    with pytest.raises(SpectrainError, match="measured of another head") as refused:
        known(run_folder, run_folder / "head", tiny, file)
    # What it advises leaves the other head's numbers alone.
    for words in (f"--target {tiny.name}", f"--head {run_folder / 'head'}"):
        assert words in refused.value.fix
    assert f"--json {run_folder / ALPHA}" in refused.value.fix
    assert str(file) not in refused.value.fix
    with pytest.raises(SpectrainError, match="no such file"):
        known(run_folder, run_folder / "head", tiny, tmp_path / "nowhere.json")
    put(file, {"head": "x"})
    with pytest.raises(SpectrainError, match="not what spectrain writes there"):
        known(run_folder, run_folder / "head", tiny, file)


def test_acceptance_of_an_earlier_step_is_not_that_of_the_head(run_folder, tiny):
    """The training measures on its way; what it found is told of the very weights alone."""
    heldout = {"rows": 9, "tokens": 70, "draft": 1, "tau": 1.25}
    heldout |= {"conditional": [0.25], "marginal": [0.25]}
    row = {"step": 5, "heldout": heldout}
    report = {"steps": 6, "supervised_tokens": 9, "seconds": 1.0, "heldout": row}
    file = run_folder / "head" / "training.json"
    put(file, {"report": report})
    assert known(run_folder, run_folder / "head", tiny).heldout is None
    put(file, {"report": report | {"steps": 5}})
    assert known(run_folder, run_folder / "head", tiny).heldout.tau == 1.25

"""Our own layout: what is written is read back the same, drafts included, for every family."""

from __future__ import annotations

import json

import pytest
from exporting import round_trip
from head_kinds import KINDS, create

from spectrain.core.errors import SpectrainError
from spectrain.export.formats import reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import Reference, load
from spectrain.export.own import OwnReader
from spectrain.export.parity import differences
from spectrain.export.write import write
from spectrain.heads.io import load_head, save_head


@pytest.mark.parametrize("name", KINDS)
def test_every_head_comes_back_the_same(tiny, tmp_path, name):
    head = KINDS[name](tiny, 120)
    again = round_trip(head, tiny, "spectrain", tmp_path / "out")
    assert differences(head, again, tiny) == []


def test_another_head_is_told_apart(tiny):
    """The comparison itself can fail: one number changed is seen."""
    head, other = (create(tiny, "medusa", seed=0) for _ in range(2))
    assert differences(head, other, tiny) == []
    next(other.parameters()).data.flatten()[0] += 1e-3
    assert differences(head, other, tiny) == ["heads.0.0.linear.weight differs"]


@pytest.mark.parametrize("shared", [True, False])
def test_what_a_step_hands_on_is_suspected(tiny, tmp_path, shared):
    """No tensor tells whether it is the state before the norm or after it."""
    before, after = (
        create(tiny, "mtp-sequential", steps=3, shared=shared, pass_on=value)
        for value in ("before_norm", "after_norm")
    )
    save_head(before, tmp_path / "head")
    found = Found.open(tmp_path / "head")
    (suspect,) = OwnReader().suspects(found, tiny)
    assert suspect.fix == "in config.json, set pass_on to after_norm"
    assert suspect.position == 2
    again = load(OwnReader(), suspect.found, tiny)
    assert differences(after, again, tiny) == []
    assert differences(before, again, tiny) != []


def told(head, target, folder):
    """Verdict and text of what is not fine about a head that is written and found again."""
    folder.mkdir()
    write(writer("spectrain", head.family).encode(head, Reference(target, target.name)), folder)
    found = Found.open(folder)
    every = reader_of(found).findings(found, target)
    return [(one.verdict, one.text) for one in every if one.verdict != "ok"]


def test_heads_that_do_not_go_together(tiny, tmp_path):
    """The tensors are those of the config, and no attention can be computed with them."""
    head = create(tiny, "eagle3", draft_vocab_size=120)
    assert told(head, tiny, tmp_path / "sound") == []
    other = type(head)(head.config.model_copy(update={"num_key_value_heads": 3}))
    other.use_vocabulary(head.draft_ids)
    text = "query heads are no multiple of kv heads, or the head size is odd"
    assert told(other, tiny, tmp_path / "odd") == [("fail", text)]


def test_other_positions_than_the_targets(tiny, tmp_path):
    head = create(tiny, "eagle1")
    rope = {"rope_type": "default", "rope_theta": 500.0}
    head.config = head.config.model_copy(update={"rope_parameters": rope})
    ((verdict, text),) = told(head, tiny, tmp_path / "out")
    assert verdict == "warn"
    assert text.startswith("default, base 500: not the rotary positions of the target")


def test_a_number_that_is_none_is_not_loaded(tiny, tmp_path):
    """`generate` reads the folder without a reader."""
    head = create(tiny, "eagle3", draft_vocab_size=120)
    save_head(head, tmp_path / "head")
    file = tmp_path / "head" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": float("nan")}))
    with pytest.raises(SpectrainError, match="rms_norm_eps: Input should be a finite number"):
        load_head(tmp_path / "head")


def test_unknown_format_and_family():
    with pytest.raises(SpectrainError, match="did you mean 'spectrain'"):
        writer("spectrian", "eagle3")

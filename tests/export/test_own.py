"""Our own layout: what is written is read back the same, drafts included, for every family."""

from __future__ import annotations

import pytest
from exporting import round_trip
from head_kinds import KINDS, create

from spectrain.core.errors import SpectrainError
from spectrain.export.formats import writer
from spectrain.export.found import Found
from spectrain.export.layout import load
from spectrain.export.own import OwnReader
from spectrain.export.parity import differences
from spectrain.heads.io import save_head


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


def test_unknown_format_and_family():
    with pytest.raises(SpectrainError, match="did you mean 'spectrain'"):
        writer("spectrian", "eagle3")

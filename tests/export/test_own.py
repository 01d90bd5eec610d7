"""Our own layout: what is written is read back the same, drafts included, for every family."""

from __future__ import annotations

import pytest
from exporting import round_trip
from head_kinds import KINDS, create

from spectrain.core.errors import SpectrainError
from spectrain.export.formats import writer
from spectrain.export.parity import differences


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


def test_unknown_format_and_family():
    with pytest.raises(SpectrainError, match="did you mean 'spectrain'"):
        writer("spectrian", "eagle3")

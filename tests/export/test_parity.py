"""Heads are compared by their drafts as well: equal tensors are not yet the same head."""

from __future__ import annotations

import pytest
from eagle_files import head_of, target_of

from spectrain.export.parity import differences


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rms_norm_eps": 0.5},
    ],
    ids=["base", "eps"],
)
@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_what_only_the_config_says_is_compared(family, changed):
    """The same tensors at other frequencies, or under another norm, draft something else."""
    target = target_of(padded=0)
    head = head_of(target, family)
    kind = type(head)
    same, other = (
        kind(head.config.model_copy(update=update)).bind(target.readout).eval()
        for update in ({}, changed)
    )
    for one in (same, other):
        one.load_state_dict(head.state_dict())
        one.use_vocabulary(head.draft_ids)
    assert differences(head, same, target) == []
    found = differences(head, other, target)
    assert found
    assert all(one.startswith("logits of draft step") for one in found)


def test_what_is_read_of_the_target_is_compared():
    """The same tensors over the states of other layers: drafts are compared behind the same ones,
    so nothing else would tell."""
    target = target_of(padded=0)
    head = head_of(target, aux_layers=(1, 3, 4))
    kind = type(head)
    config = head.config.model_copy(update={"aux_layers": (0, 2, 6)})
    other = kind(config).bind(target.readout).eval()
    other.load_state_dict(head.state_dict())
    other.use_vocabulary(head.draft_ids)
    (text,) = differences(head, other, target)
    assert "aux_layers=(1, 3, 4)" in text
    assert "aux_layers=(0, 2, 6)" in text

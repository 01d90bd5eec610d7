"""EAGLE-3 heads that were trained with norms in other places, whose files have lost the key that
says so, or say it of a head that was not trained so."""

from __future__ import annotations

import pytest
import torch
from eagle_files import edit, export
from head_kinds import create

from spectrain.core.batch import counted
from spectrain.data.online import read
from spectrain.export import norm_placement
from spectrain.export.eagle3 import Eagle3Reader
from spectrain.heads.eagle3 import Eagle3Head
from spectrain.heads.io import load_head


class Residual(Eagle3Head):
    """The layer's residual is the state behind its norm."""

    def enter(self, embedding, hidden):
        _, read = super().enter(embedding, hidden)
        return read.chunk(2, dim=-1)[1], read


class Fed(Eagle3Head):
    """A step is fed the state behind the final norm, and norms it again to guess."""

    def prefix(self, batch):
        self.going_on = False
        return super().prefix(batch)

    def steps(self, prefix, tokens, steps):
        for step in super().steps(prefix, tokens, steps):
            yield step
            self.going_on = True

    def enter(self, embedding, hidden):
        return super().enter(embedding, self.norm(hidden) if self.going_on else hidden)


READER = Eagle3Reader()
CASES = {
    "norm_before_residual": (Residual, "the normed state as the layer's residual", 1),
    "norm_output": (Fed, "the output behind the final norm fed back", 2),
}


@pytest.fixture
def others(trained, target, tmp_path):
    """others(kind, config) → a trained head as vLLM has it, with these keys in its config."""

    def make(kind, config=None):
        head = load_head(trained("eagle3", other=kind)).bind(target.readout)
        folder = export(head, target, "vllm", tmp_path / "out")
        return edit(folder, None, config, [key for key in CASES if key not in (config or {})])

    return make


def row(report, name):
    (found,) = [one for one in report["tried"] if one["name"] == name]
    return found


@torch.no_grad()
@pytest.mark.parametrize("key", CASES)
def test_what_is_tried_computes_what_the_key_says(target, replies, key):
    """Step by step, in logits."""
    kind, name, position = CASES[key]
    wanted, tried = (create(target, "eagle3", steps=3, draft_vocab_size=120) for _ in range(2))
    plain = create(target, "eagle3", steps=3, draft_vocab_size=120)
    wanted.__class__ = kind
    ((mend, at),) = (more for what, _, *more in norm_placement.mends(tried, READER) if what == name)
    mend(tried)
    assert at == position
    batch = read(target, replies, plain.needs.aux_layers)
    rows = zip(*(one.unroll(batch, 3) for one in (wanted, tried, plain)), strict=True)
    for place, steps in enumerate(rows, 1):
        counts = counted(batch.reply, place - 1).flatten()[steps[0].anchors]
        theirs, ours, without = (
            one.logits(step.hidden[counts], place - 1)
            for one, step in zip((wanted, tried, plain), steps, strict=True)
        )
        torch.testing.assert_close(ours, theirs)
        assert torch.allclose(ours, without, rtol=1e-3) is (place < position)


@pytest.mark.parametrize("key", CASES)
def test_a_lost_key_is_named(examine, others, key):
    kind, name, position = CASES[key]
    report = examine(others(kind))
    found = row(report, name)
    assert found["likely"]
    assert (found["position"], found["fix"][:40]) == (
        position,
        f'in config.json, set "{key}": true, for vLLM'[:40],
    )
    accepted = report["acceptance"]["positions"][position - 1]["conditional"]["value"]
    assert found["before"] == accepted < found["accepted"] - 0.1
    (told,) = [one for one in report["findings"] if one["check"] == "likely cause"]
    assert told["fix"] == found["fix"]


@pytest.mark.parametrize("key", CASES)
def test_a_head_without_it_is_not_accused(examine, others, key):
    """The heads here."""
    report = examine(others(Eagle3Head))
    assert report["healthy"]
    assert not row(report, CASES[key][1])["likely"]


@pytest.mark.parametrize("key", CASES)
@pytest.mark.parametrize("right", [True, False])
def test_a_key_that_is_said_is_tried_without(examine, others, key, right):
    """No head here computes it, so the file fails either way; whether it is true is seen."""
    kind, _, position = CASES[key]
    report = examine(others(kind if right else Eagle3Head, {key: True}))
    assert f"{key} is True: no head here computes that" in report["failure"]
    assert report["acceptance"] is None
    found = row(report, f"without {key}")
    assert (found["position"], found["likely"]) == (position, not right)
    assert found["fix"] == f'in config.json, set "{key}": false'
    assert (found["accepted"] < found["before"]) is right


def test_an_imported_head_has_no_place_for_the_key(examine, trained):
    """Our own layout: the key belongs into the files that engines read."""
    found = row(examine(trained("eagle3", other=Residual)), CASES["norm_before_residual"][1])
    assert found["likely"]
    assert "of its files for engines" in found["fix"]

"""plan.json: there and back, strict, and no use of times that were another machine's."""

from __future__ import annotations

import json

import pytest
import torch
from head_kinds import KINDS

from spectrain.core.errors import SpectrainError
from spectrain.generator.costs import Costs, machine, precision
from spectrain.generator.saved_plan import Choice, SavedPlan
from spectrain.heads.io import load_head, save_head
from spectrain.heads.tree import TreeShape

TWO = ((1, TreeShape.chain(2)), (8, None))


def make(target, choices=TWO, **changes) -> SavedPlan:
    known = {
        "dtype": precision(target),
        "device": machine(target.device),
        "threads": torch.get_num_threads(),
    } | changes
    times = {"verify": {1: 1.0}, "extend": {1: 0.5}, "expand": {1: 0.5}}
    return SavedPlan(
        target=target.fingerprint,
        accepted=((0.5, 0.25), (0.5, 0.0)),
        choices={
            batch: Choice(
                tree=tree, speedup=1.2, costs=Costs(**known, **times, batch=batch, context=4)
            )
            for batch, tree in choices
        },
        **known,
    )


def test_it_lies_in_a_heads_folder_and_the_head_still_loads(tiny, tmp_path):
    head = KINDS["medusa"](tiny, 120)
    save_head(head, tmp_path / "head")
    assert SavedPlan.beside(tmp_path / "head", tiny) is None
    plan = make(tiny)
    plan.save(tmp_path / "head" / "plan.json")
    assert SavedPlan.beside(tmp_path / "head", tiny) == plan
    assert load_head(tmp_path / "head").config == head.config
    # A head that is trained anew has another acceptance: the old plan goes with the old head.
    save_head(head, tmp_path / "head")
    assert SavedPlan.beside(tmp_path / "head", tiny) is None


def test_the_nearest_batch_size_and_of_two_the_larger(tiny):
    one, eight = TreeShape.chain(1), TreeShape.chain(8)
    plan = make(tiny, [(8, eight), (1, one), (32, None)])
    assert [plan.for_batch(batch).tree for batch in (1, 2, 3, 8, 15)] == [
        one,
        one,
        eight,
        eight,
        eight,
    ]
    assert plan.for_batch(16).tree is None  # 8 and 32 are equally near
    assert plan.for_batch(500).tree is None


def test_where_it_was_measured_it_fits_and_elsewhere_it_says_why_not(tiny):
    assert make(tiny).unfit(tiny) is None
    for name, value in (("dtype", "bfloat16"), ("device", "another"), ("threads", 999)):
        assert f"{name} {value}, here" in make(tiny, **{name: value}).unfit(tiny)
    other = make(tiny).model_copy(update={"target": "0" * 16})
    assert "target 0000000000000000, here" in other.unfit(tiny)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": 1}, "more: Extra inputs"),
        ({"format": 2}, "format: "),
        ({"choices": {}}, "choices: "),
        ({"accepted": [[1.5]]}, "accepted.0.0: "),
        ({"threads": 999}, "another machine"),
        ({"dtype": None}, "dtype: "),
    ],
)
def test_a_file_that_is_no_plan_is_refused_in_one_line(tiny, tmp_path, change, message):
    path = tmp_path / "plan.json"
    make(tiny).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpectrainError, match="spectrain plan") as caught:
        SavedPlan.load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_costs_of_another_batch_size_are_refused(tiny, tmp_path):
    path = tmp_path / "plan.json"
    make(tiny).save(path)
    content = json.loads(path.read_text())
    content["choices"]["4"] = content["choices"].pop("8")
    path.write_text(json.dumps(content))
    with pytest.raises(SpectrainError, match="the costs at 4 are of batch 8"):
        SavedPlan.load(path)


def test_half_a_file_is_refused(tiny, tmp_path):
    (tmp_path / "plan.json").write_text('{"format": 1')
    with pytest.raises(SpectrainError, match="not valid JSON"):
        SavedPlan.beside(tmp_path, tiny)

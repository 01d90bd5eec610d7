"""`doctor`: a healthy head passes without a warning, and every planted fault is named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from head_kinds import KINDS

from spectrain.core.errors import SpectrainError
from spectrain.evaluation import behaviour
from spectrain.evaluation.causes import causes
from spectrain.heads.io import save_head
from spectrain.recipes.doctor_verdicts import next_position


def told(report, verdict):
    """Check → text of the findings with this verdict."""
    return {f["check"]: f["text"] for f in report["findings"] if f["verdict"] == verdict}


def likely(report):
    """Name of the likeliest cause."""
    return next((row["name"] for row in report["tried"] if row["likely"]), None)


def fix(report):
    """What mends it."""
    return next(row["fix"] for row in report["tried"] if row["likely"])


@pytest.mark.parametrize("family", ["eagle3", "eagle1", "medusa"])
def test_a_healthy_head_passes_without_a_warning(examine, trained, family):
    report = examine(trained(family))
    assert (told(report, "fail"), told(report, "warn"), likely(report)) == ({}, {}, None)
    assert report["healthy"]
    assert report["failure"] is None
    first = report["acceptance"]["positions"][0]["conditional"]
    assert first["low"] > behaviour.least(report["acceptance"]["blind"])
    assert report["layout"] == "spectrain"


# ── faults that running the head finds ───────────────────────────────────────


def test_layers_one_higher(examine, spoilt):
    report = examine(spoilt("eagle3", config=lambda c: c.update(aux_layers=[2, 3, 4])))
    assert likely(report) == "auxiliary layers one lower"
    assert "position 1" in (told(report, "warn") | told(report, "fail"))["likely cause"]


def test_layers_one_lower(examine, spoilt):
    report = examine(spoilt("eagle3", config=lambda c: c.update(aux_layers=[0, 1, 2])))
    assert likely(report) == "auxiliary layers one higher"
    assert fix(report).startswith("in config.json, set aux_layers to [1, 2, 3]: ")


def test_parts_of_fc_in_another_order(examine, spoilt):
    def permute(tensors):
        tensors["fc.weight"] = tensors["fc.weight"].unflatten(1, (3, -1))[:, [1, 2, 0]].flatten(1)

    report = examine(spoilt("eagle3", permute))
    assert likely(report) == "auxiliary states in the order 2, 3, 1"
    assert fix(report) == "put the 3 column blocks of fc.weight into the order 3, 1, 2"
    # The blocks lie as [1, 2, 0] of the trained ones: the third of them is the first.
    assert [[1, 2, 0][place - 1] for place in (3, 1, 2)] == [0, 1, 2]


def own_tokens(batch):
    """x[t] beside the state of t."""
    return replace(batch, tokens=batch.tokens.roll(1, dims=1))


def answers(batch):
    return replace(batch, tokens=batch.tokens.roll(-1, dims=1))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (own_tokens, "fed x[t] in the place of x[t+1]"),
        (answers, "fed x[t+2] in the place of x[t+1]"),
    ],
)
@pytest.mark.parametrize("family", ["eagle3", "eagle1"])
def test_tokens_shifted(examine, trained, family, change, name):
    report = examine(trained(family, change))
    assert likely(report) == name
    assert f"--store STORE --init {trained(family, change)}" in fix(report)
    assert "spectrain train-eagle --target" in fix(report)


def test_last_states_without_the_norm(examine, trained, target, new_head):
    head = new_head("medusa")

    def unnormed(batch):
        (found,) = (c for c in causes(target, head, batch) if "without" in c.name)
        return found.batch

    report = examine(trained("medusa", unnormed))
    assert likely(report) == "last state without the final norm"
    assert "spectrain train-medusa --target" in fix(report)


def test_rotary_base(examine, spoilt, target):
    def slower(config):
        config["rope_parameters"]["rope_theta"] = 3.0

    report = examine(spoilt("eagle1", config=slower))
    assert "not the rotary positions of the target" in told(report, "warn")["rope"]
    (row,) = [one for one in report["tried"] if one["name"] == "rotary positions of the target"]
    assert '"rope_theta": 10000.0' in row["fix"]


# ── faults that the files tell of ────────────────────────────────────────────


def test_absolute_ids_in_d2t(examine, spoilt):
    def absolute(tensors):
        tensors["d2t"] += torch.arange(len(tensors["d2t"]))

    report = examine(spoilt("eagle3", absolute))
    assert "ids themselves" in told(report, "fail")["draft vocabulary"]
    assert likely(report) == "d2t read as absolute ids"  # tried, and it is accepted then
    assert report["acceptance"] is None
    assert report["failure"].count("ids themselves") == 1


def test_a_half_of_the_map_is_lost(examine, spoilt):
    report = examine(spoilt("eagle3", lambda t: t.pop("t2d")))
    assert told(report, "fail") == {"tensors": "missing t2d"}


def test_halves_of_the_map_disagree(examine, spoilt):
    report = examine(spoilt("eagle3", lambda t: t["t2d"].logical_not_()))
    assert "name different tokens" in told(report, "fail")["draft vocabulary"]


@pytest.mark.parametrize(("family", "name"), [("eagle3", "lm_head"), ("medusa", "heads.0.1")])
def test_rows_of_lm_head_permuted(examine, spoilt, family, name):
    def permute(tensors):
        weight = tensors[f"{name}.weight"]
        order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))
        tensors[f"{name}.weight"] = weight[order]

    report = examine(spoilt(family, permute))
    failed = told(report, "fail")
    assert name in failed["output rows"]
    assert "other tokens" in failed["output rows"]
    assert likely(report) == "output rows in the order of the target's"
    assert fix(report).startswith(f"sort the rows of {name} by token")


def test_rows_of_lm_head_lost(examine, spoilt):
    report = examine(spoilt("eagle3", lambda t: t["lm_head.weight"][:10].zero_()))
    assert "10 of 300 rows are constant" in told(report, "warn")["output rows"]


def test_stop_token_missing(examine, spoilt, target):
    stop = target.stop_ids[0]

    def forget(tensors):
        """Another token takes the place of the stop token."""
        held = tensors["t2d"].nonzero().flatten().tolist()
        other = next(i for i in range(len(tensors["t2d"])) if i not in held)
        ids = sorted(set(held) - {stop} | {other})
        rows = [held.index(stop if i == other else i) for i in ids]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][rows]
        tensors["t2d"][stop], tensors["t2d"][other] = False, True
        tensors["d2t"] = torch.tensor(ids) - torch.arange(len(ids))

    report = examine(spoilt("eagle3", forget))
    assert repr("<|im_end|>") in told(report, "warn")["draft vocabulary"]
    assert report["healthy"]


def test_norm_lost(examine, spoilt):
    report = examine(spoilt("eagle3", lambda t: t["norm.weight"].fill_(1)))
    assert told(report, "warn")["norms"].endswith("ever loaded: norm")
    assert report["failure"] is None


def test_norm_of_zeros(examine, spoilt):
    report = examine(spoilt("eagle3", lambda t: t["midlayer.hidden_norm.weight"].zero_()))
    assert told(report, "fail")["norms"].endswith("midlayer.hidden_norm")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_a_number(examine, spoilt, value):
    report = examine(spoilt("medusa", lambda t: t["heads.1.1.weight"][3].fill_(value)))
    assert "heads.1.1.weight" in told(report, "fail")["values"]
    assert report["acceptance"] is None
    assert report["tried"] == []


def test_a_new_head(examine, new_head, tmp_path):
    save_head(new_head("eagle1"), tmp_path / "new")
    failed = told(examine(tmp_path / "new"), "fail")
    assert failed["trained"] == "every weight is that of a new head"
    assert failed["acceptance"].startswith("near zero")


def test_a_random_head(examine, new_head, tmp_path):
    """What was never a head of this target: nothing is accepted, and no cause explains it."""
    save_head(new_head("eagle1", random=True), tmp_path / "random")
    report = examine(tmp_path / "random")
    (finding,) = (f for f in report["findings"] if f["check"] == "acceptance")
    assert finding["verdict"] == "fail"
    assert "another target" in finding["fix"]
    assert likely(report) is None


def test_another_target(examine, trained, tiny_path):
    report = examine(trained("eagle1"), target=str(tiny_path))
    assert "this target is" in told(report, "fail")["target"]


def test_weights_as_whole_numbers(examine, spoilt):
    def rounded(tensors):
        tensors["fc.weight"] = tensors["fc.weight"].to(torch.int32)

    assert "fc.weight" in told(examine(spoilt("eagle1", rounded)), "fail")["types"]


# ── the command ──────────────────────────────────────────────────────────────


def test_exit_codes(command, trained, spoilt, tmp_path):
    """0 healthy, 1 with the report where something fails, 2 in one line for bad input."""
    well = command(trained("medusa"), "--json", str(tmp_path / "report.json"))
    assert well.exit_code == 0
    assert "HEALTHY (fail 0, warn 0" in well.stdout
    assert json.loads((tmp_path / "report.json").read_text())["healthy"]
    ill = spoilt("medusa", lambda t: t["heads.0.0.linear.bias"].fill_(float("nan")))
    found = command(ill)
    assert found.exit_code == 1
    assert "NOT HEALTHY" in found.stdout
    assert found.stderr.splitlines()[-1].startswith("error: ")
    assert "heads.0.0.linear.bias" in found.stderr
    weights = ill / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    cut = command(ill)
    assert cut.exit_code == 2
    assert cut.stdout == ""
    assert str(weights) in cut.stderr
    assert len(cut.stderr.splitlines()) == 1
    (ill / "config.json").write_text('{"model_type": "llama"}')
    shutil.copy(trained("medusa") / "model.safetensors", weights)
    assert command(ill).exit_code == 2


def test_nothing_to_measure(examine, trained, replies, monkeypatch):
    """Replies of one token hold no draft."""
    none = replace(replies, reply=torch.zeros_like(replies.reply))
    monkeypatch.setattr(behaviour, "answered", lambda *_: none)
    report = examine(trained("medusa"))
    assert "not measured" in told(report, "note")["acceptance"]
    assert report["healthy"]
    assert report["tried"] == []


def test_nothing_to_examine(examine, trained):
    with pytest.raises(SpectrainError, match="no such folder"):
        examine(trained("medusa") / "nowhere")


@pytest.mark.parametrize("name", KINDS)
def test_heads_of_every_family_can_be_examined(examine, target, tmp_path, name):
    """Random ones: what is tried knows no family, and stumbles over none."""
    save_head(KINDS[name](target, 120), tmp_path / "head")
    report = examine(tmp_path / "head")
    assert report["acceptance"]["positions"][0]["conditional"]["value"] < 0.3
    assert report["acceptance"]["positions"][0]["anchors"] > 100


def test_layers_that_the_target_lacks(examine, spoilt):
    report = examine(spoilt("eagle3", config=lambda c: c.update(aux_layers=[4, 5, 6])))
    assert "no such layer" in told(report, "fail")["auxiliary layers"]


def test_a_target_without_a_template(examine, path, trained, tmp_path):
    """Its prompts are plain texts."""
    bare = tmp_path / "bare"
    shutil.copytree(path, bare)
    (bare / "chat_template.jinja").unlink()
    report = examine(trained("medusa"), target=str(bare))
    assert report["acceptance"]["tokens"] > 0


def test_a_head_that_guesses_once_and_never_again():
    """Position 1 alone does not show what a head makes of its own output."""

    def found(second):
        rows = [{"conditional": {"value": v, "low": v, "high": v}} for v in (0.5, second)]
        return list(next_position({"blind": 0.04, "positions": rows}))

    assert found(0.4) == []
    (one,) = found(0.01)
    assert one.verdict == "fail"
    assert "position 2" in one.text
    rows = [{"conditional": {"value": v, "low": None, "high": None}} for v in (0.5, 0.0)]
    assert list(next_position({"blind": 0.04, "positions": rows})) == []  # too few to say

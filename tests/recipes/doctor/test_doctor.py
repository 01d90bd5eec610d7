"""`doctor`: a healthy head passes without a warning, and every planted fault is named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from eagle_files import edit, export
from head_kinds import KINDS

from spectrain.core.errors import SpectrainError
from spectrain.data.online import read
from spectrain.evaluation import behaviour
from spectrain.evaluation.causes import causes
from spectrain.export import aux_layers
from spectrain.export.eagle3 import Eagle3Reader
from spectrain.export.found import Found
from spectrain.heads.io import load_head, save_head


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
    assert first["low"] > report["acceptance"]["blind"] + 0.1
    assert report["layout"] == "spectrain"


# ── faults that running the head finds ───────────────────────────────────────


def test_layers_one_higher(examine, spoilt):
    report = examine(spoilt("eagle3", config=lambda c: c.update(aux_layers=[2, 3, 4])))
    assert likely(report) == "the layers read are one too high"
    assert "position 1" in (told(report, "warn") | told(report, "fail"))["likely cause"]


def test_layers_one_lower(examine, spoilt):
    report = examine(spoilt("eagle3", config=lambda c: c.update(aux_layers=[0, 1, 2])))
    assert likely(report) == "the layers read are one too low"
    assert fix(report).startswith("in config.json, set aux_layers to [1, 2, 3]: ")


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_no_mistake_is_undone_twice(examine, trained, target, tmp_path, monkeypatch, layout):
    """Also where nothing is accepted, so that outcomes cannot tell them apart."""
    ran, seen = [], behaviour.seen

    def nothing(head, batch, steps):
        ran.append((head.needs.aux_layers, batch))
        return [replace(one, hits=0 * one.hits) for one in seen(head, batch, steps)]

    monkeypatch.setattr(behaviour, "seen", nothing)
    head = load_head(trained("eagle3")).bind(target.readout)
    tried = examine(export(head, target, layout, tmp_path / "out"))["tried"]
    names = [one["name"] for one in tried]
    assert len(set(names)) == len(names) == len(ran) - 1
    assert {"the layers read are one too high", "the layers read are one too low"} <= set(names)
    assert not any("one below" in name or "auxiliary layers" in name for name in names)


@pytest.mark.parametrize(("ids", "meant"), [([2, 3, 4], True), ([3, 4, 5], False)])
def test_ids_that_engines_number_differently(
    examine, trained, target, tmp_path, monkeypatch, ids, meant
):
    """Of a target like this one nobody can tell inputs from outputs by the file: it is said, and
    what is accepted decides. The head reads the outputs of 1, 2 and 3."""
    kind = target.config.model_type
    monkeypatch.setattr(aux_layers, "_INPUTS_TO_SGLANG", {kind})
    head = load_head(trained("eagle3")).bind(target.readout)
    folder = export(head, target, "vllm", tmp_path / "out")
    edit(folder, None, {"eagle_config": {aux_layers.KEY: ids}}, drop=(aux_layers.KEY,))
    report = examine(folder)
    assert f"ambiguous for a {kind}" in told(report, "warn")["auxiliary layers"]
    if meant:
        assert likely(report) is None
    else:
        assert likely(report) == "the layers read are one too high"
        assert f"set {aux_layers.KEY} to [2, 3, 4] (layer inputs)" in fix(report)


def test_parts_of_fc_in_another_order(examine, spoilt):
    def permute(tensors):
        tensors["fc.weight"] = tensors["fc.weight"].unflatten(1, (3, -1))[:, [1, 2, 0]].flatten(1)

    report = examine(spoilt("eagle3", permute))
    assert likely(report) == "fc reads the states in the order 2, 3, 1"
    assert fix(report) == "put the 3 column blocks of fc.weight into the order 3, 1, 2"
    # The blocks lie as [1, 2, 0] of the trained ones: the third of them is the first.
    assert [[1, 2, 0][place - 1] for place in (3, 1, 2)] == [0, 1, 2]


def own_tokens(batch):
    """x[t] beside the state of t."""
    return replace(batch, tokens=batch.tokens.roll(1, dims=1))


def answers(batch):
    return replace(batch, tokens=batch.tokens.roll(-1, dims=1))


@pytest.mark.parametrize(
    ("family", "change", "name"),
    [
        ("eagle3", own_tokens, "trained with x[t] in the place of x[t+1]"),
        ("eagle1", own_tokens, "trained with x[t] in the place of x[t+1]"),
        ("eagle1", answers, "trained with x[t+2] in the place of x[t+1]"),
    ],
)
def test_tokens_shifted(examine, trained, family, change, name):
    report = examine(trained(family, change))
    assert likely(report) == name
    assert f"--store STORE --init {trained(family, change)}" in fix(report)
    assert "spectrain train-eagle --target" in fix(report)


def test_an_honest_head_that_repeats_its_input_leaks_nothing(
    examine, trained, monkeypatch, target, replies
):
    """Fed the answer it gives the answer back: no sign that it was trained so."""
    honest = trained("eagle1")
    seen, answer = behaviour.seen, target_choices(target, replies)

    def repeats(head, batch, steps):
        """Half of its guesses are the target's; of an answer that it is fed it echoes all."""
        fed = torch.equal(batch.tokens, answer)
        return [
            replace(one, hits=one.asked if fed else (one.asked / 2).round())
            for one in seen(head, batch, steps)
        ]

    monkeypatch.setattr(behaviour, "seen", repeats)
    report = examine(honest)
    (row,) = [one for one in report["tried"] if one["name"].startswith("trained with x[t+2]")]
    assert (row["accepted"], row["likely"]) == (1.0, False)
    assert report["healthy"]


def target_choices(target, replies):
    """What a head is fed where the answer leaks."""
    return answers(read(target, replies, ())).tokens


def test_last_states_without_the_norm(examine, trained, target, new_head):
    head = new_head("medusa")

    def unnormed(batch):
        (found,) = (c for c in causes(target, head, batch) if "without" in c.name)
        return found.batch

    report = examine(trained("medusa", unnormed))
    assert likely(report) == "trained on the last state without the final norm"
    assert "spectrain train-medusa --target" in fix(report)


def test_rotary_base(examine, spoilt, target):
    def slower(config):
        config["rope_parameters"]["rope_theta"] = 3.0

    report = examine(spoilt("eagle1", config=slower))
    assert "not the rotary positions of the target" in told(report, "warn")["rope"]
    (row,) = [
        one
        for one in report["tried"]
        if one["name"] == "rotary positions that are not the target's"
    ]
    assert '"rope_theta": 10000.0' in row["fix"]


def test_heads_that_are_cut_otherwise(examine, spoilt):
    """Twice as many of half the size have the same weights."""

    def cut(config):
        config.update(num_attention_heads=8, num_key_value_heads=4, head_dim=8)

    report = examine(spoilt("eagle1", config=cut))
    text = told(report, "warn")["attention heads"]
    assert "8 heads of 8 (4 for keys), the target has 4 of 16 (2)" in text


# ── faults that the files tell of ────────────────────────────────────────────


def test_absolute_ids_in_d2t(examine, spoilt):
    def absolute(tensors):
        tensors["d2t"] += torch.arange(len(tensors["d2t"]))

    report = examine(spoilt("eagle3", absolute))
    assert "ids themselves" in told(report, "fail")["draft vocabulary"]
    assert likely(report) == "d2t holds absolute ids"  # tried, and it is accepted then
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
    assert likely(report) == "output rows of other tokens than the map says"
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


def test_logits_that_are_no_numbers(examine, spoilt):
    """Of finite weights; the first of NaN is taken for the largest, and may be accepted."""
    report = examine(spoilt("medusa", lambda t: t["heads.1.1.weight"].sign_().mul_(3e38)))
    assert told(report, "fail")["logits"].startswith("NaN or infinite at position 2, for ")
    assert not report["healthy"]


def test_a_few_replies_do_not_tell(examine, trained, new_head, tmp_path):
    save_head(new_head("eagle1", random=True), tmp_path / "random")
    for head in (trained("eagle1"), tmp_path / "random"):
        report = examine(head, limit=3)
        assert "3 replies do not tell" in told(report, "warn")["acceptance"]


def test_sizes_come_before_reading(examine, spoilt, monkeypatch):
    """A tensor that is not of the head may have any size."""
    asked = []
    monkeypatch.setattr(Found, "read", lambda self, name: asked.append(name))
    report = examine(spoilt("eagle3", lambda t: t.update(more=torch.zeros(3))))
    assert told(report, "fail") == {"tensors": "unknown more"}
    assert asked == []


def test_a_tensor_beyond_memory(examine, trained, monkeypatch):
    def read(self, name):
        raise MemoryError

    monkeypatch.setattr(Found, "read", read)
    failed = told(examine(trained("eagle1")), "fail")
    assert "does not fit into memory" in failed["values"]


def test_every_file_is_looked_at_once(examine, trained, target, tmp_path, monkeypatch):
    """As it is, and once with each mistake undone."""
    head = load_head(trained("eagle3")).bind(target.readout)
    folder, seen = export(head, target, "vllm", tmp_path / "out"), []
    plain = Eagle3Reader.findings

    def findings(self, found, target):
        assert not any(found is one for one in seen)
        seen.append(found)
        return plain(self, found, target)

    monkeypatch.setattr(Eagle3Reader, "findings", findings)
    assert examine(folder)["healthy"]
    assert len(seen) >= 5


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
    assert well.stdout.splitlines()[-1].startswith("HEALTHY (fail 0, warn 0")
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

"""`spectrain export`: nothing appears that was not read back and compared, and nothing is dropped.

What a format is and what goes wrong in it is played by a toy format beside our own.
"""

from __future__ import annotations

import hashlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from head_kinds import create
from safetensors.torch import load_file
from tiny_models import save_tiny
from typer.testing import CliRunner

from spectrain import cli
from spectrain.commands import export as command_of_export
from spectrain.core.config import load_config
from spectrain.core.errors import RunFailed, SpectrainError
from spectrain.core.target import Target
from spectrain.export import formats, proof
from spectrain.export.layout import Encoded, Launch, Reference
from spectrain.export.own import OwnReader, OwnWriter
from spectrain.heads.io import load_head, save_head
from spectrain.recipes import evaluate
from spectrain.recipes.export import RECORD, ExportConfig, _line, render, run


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")


@pytest.fixture
def head(tiny):
    return create(tiny, "eagle3", steps=2, draft_vocab_size=120)


@pytest.fixture
def place(head, tmp_path):
    """The folder of a run."""
    save_head(head, tmp_path / "run" / "head")
    return tmp_path / "run"


@pytest.fixture
def export(place):
    def make(**flags):
        flags = {"run": str(place), "format": "spectrain"} | flags
        return run(load_config(ExportConfig, "export", flags=flags))

    return make


@pytest.fixture
def toy(monkeypatch):
    """toy(**methods): a format `toy` that is our own but for these methods."""

    def make(reader=OwnReader, **methods):
        kind = type("Toy", (OwnWriter,), {"reader": reader(), **methods})
        monkeypatch.setitem(sys.modules, "toy_format", SimpleNamespace(Toy=kind))
        monkeypatch.setitem(formats.WRITERS, "toy", {"eagle3": "toy_format:Toy"})
        formats._made.cache_clear()

    yield make
    formats._made.cache_clear()


def nothing_in(folder):
    return not folder.exists() or not any(folder.iterdir())


def test_what_is_written_is_the_head(export, place, head):
    report = export()
    out = place / "export" / "spectrain"
    assert report["out"] == str(out)
    assert {path.name for path in out.iterdir()} == {one["file"] for one in report["files"]}
    again = load_head(out).state_dict()
    assert all(torch.equal(again[name], value) for name, value in head.state_dict().items())
    record = json.loads((out / RECORD).read_text())
    assert record["target"] == head.config.target.model_dump()
    for name, told in record["files"].items():
        content = (out / name).read_bytes()
        assert told == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert record["files"].keys() == {p.name for p in out.iterdir()} - {RECORD}
    shown = render(report)
    assert f"--head {out}" in shown
    assert "no measured acceptance was found" in shown
    measure = f"spectrain eval-alpha --target {head.config.target.name} --store STORE"
    assert f"{measure} --head {place / 'head'} --json {place / 'eval-alpha.json'}\n" in shown


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_an_engine_is_told_the_type_that_the_target_is_stored_in(tmp_path, tokenizer, key):
    """However it is loaded here: on a CPU as float32."""
    path = save_tiny(tmp_path / "target", tokenizer, num_hidden_layers=8)
    config = json.loads((path / "config.json").read_text())
    config.pop("dtype", None)
    (path / "config.json").write_text(json.dumps(config | {key: "float16"}))
    target = Target.load(str(path), dtype="float32", pack_weights=False)
    save_head(create(target, "eagle3", draft_vocab_size=120), tmp_path / "run" / "head")
    flags = {"run": str(tmp_path / "run"), "format": "sglang"}
    (line,) = run(load_config(ExportConfig, "export", flags=flags))["launch"]
    assert line["text"].endswith("--dtype float16")


def test_another_type_is_compared_as_it_is_written(export, place):
    """The numbers of the head, rounded: the comparison is exact all the same."""
    export(dtype="bfloat16")
    out = place / "export" / "spectrain"
    kinds = {one.dtype for one in load_file(out / "model.safetensors").values()}
    assert kinds == {torch.bfloat16, torch.int64, torch.bool}
    # `auto` keeps what is stored, although the head is loaded as float32.
    export(run=str(out), out=str(place / "again"))
    assert (place / "again" / "model.safetensors").read_bytes() == (
        out / "model.safetensors"
    ).read_bytes()


def test_all_reasons_are_told_at_once(export, toy, place):
    toy(refusals=lambda self, head, reference: ["it has no second layer", "it has no bias"])
    with pytest.raises(SpectrainError, match=r"no second layer; it has no bias") as refused:
        export(format="toy")
    assert refused.value.fix == "choose another --format"
    toy(refusals=lambda self, head, reference: ["two layers: train it with --set head.layers=1"])
    with pytest.raises(SpectrainError, match="train the head as said"):
        export(format="toy")
    assert not (place / "export").exists()


def changed(head, reference):
    tensors = {name: value.clone() for name, value in head.state_dict().items()}
    tensors["fc.weight"][0, 0] += 1e-3
    return Encoded(head.config.model_dump(mode="json"), tensors)


def without(head, reference):
    tensors = {name: v for name, v in head.state_dict().items() if name != "fc.weight"}
    return Encoded(head.config.model_dump(mode="json"), tensors)


def as_nobody(head, reference):
    return Encoded({}, {"x": torch.zeros(2)})


@pytest.mark.parametrize(
    ("encode", "words"),
    [
        (changed, "is not the head: fc.weight differs"),
        (without, "cannot be read back as spectrain: missing fc.weight"),
        (as_nobody, "cannot be read back as spectrain: no known layout"),
    ],
)
def test_a_mistake_of_a_format_leaves_nothing(export, toy, place, encode, words):
    toy(encode=lambda self, head, reference: encode(head, reference))
    with pytest.raises(RunFailed, match=words) as failed:
        export(format="toy")
    assert "\n" not in str(failed.value)
    assert nothing_in(place / "export")


def test_it_has_to_read_as_the_layout_that_it_was_written_in(export, toy, place):
    toy(reader=type("OtherReader", (OwnReader,), {"name": "other"}))
    with pytest.raises(RunFailed, match="cannot be read back as other: it reads as spectrain"):
        export(format="toy")
    assert nothing_in(place / "export")


@pytest.mark.parametrize("found", [[], ["missing fc.weight", "unknown x"]])
def test_what_the_engine_expects_is_asked(export, toy, monkeypatch, place, found):
    asked = []
    monkeypatch.setattr(proof, "problems", lambda encoded, facts: asked.append(facts) or found)
    toy(facts=(("engine 1.0", "ToyArchitecture"),))
    if found:
        with pytest.raises(RunFailed, match=r"engine 1.0 would not load .* fc.weight; unknown x"):
            export(format="toy")
        assert nothing_in(place / "export")
    else:
        assert any("engine 1.0 loads" in text for text in export(format="toy")["checks"])
    assert asked == [("engine 1.0", "ToyArchitecture")]


def test_a_head_that_was_never_trained_is_refused(export, tiny, tmp_path):
    save_head(create(tiny, "eagle3", random=False, steps=2), tmp_path / "new")
    with pytest.raises(SpectrainError, match="never trained"):
        export(run=str(tmp_path / "new"))
    assert not (tmp_path / "new" / "export").exists()


def test_a_head_of_another_target_is_refused(export, tmp_path, tokenizer):
    from tiny_models import save_tiny

    other = save_tiny(tmp_path / "other", tokenizer, seed=9)
    with pytest.raises(SpectrainError, match="the head was trained for"):
        export(target=str(other))


def test_only_an_export_is_replaced(export, place):
    """Whatever else lies in the folder was put there by somebody."""
    out = place / "export" / "spectrain"
    export()
    (out / "old").write_text("of the earlier export")
    with pytest.raises(SpectrainError, match="--overwrite"):
        export()
    export(overwrite=True)
    assert not (out / "old").exists()
    (place / "mine").mkdir()
    (place / "mine" / "thesis.txt").write_text("text")
    with pytest.raises(SpectrainError, match="it is no export"):
        export(out=str(place / "mine"), overwrite=True)
    for folder in (place, place / "head", place.parent):
        with pytest.raises(SpectrainError, match="the head itself lies there"):
            export(out=str(folder), overwrite=True)
    # A head that was exported is a head; it does not replace itself.
    with pytest.raises(SpectrainError, match="the head itself lies there"):
        export(run=str(out), out=str(out), overwrite=True)


def test_a_link_to_the_targets_own_page_is_not_followed(export, toy, place):
    theirs = place / "README.md"
    theirs.write_text("of the target")

    def encode(self, head, reference):
        made = OwnWriter.encode(self, head, reference)
        return Encoded(made.config, made.tensors, {"README.md": theirs})

    toy(encode=encode)
    export(format="toy", files="link")
    assert theirs.read_text() == "of the target"
    assert "draft head" in (place / "export" / "toy" / "README.md").read_text()


def test_the_name_that_others_use(export, tiny_path, place):
    report = export()
    assert "a folder of the machine" in report["note"]
    report = export(base_model="owner/model", overwrite=True)
    assert (report["base_model"], report["note"]) == ("owner/model", None)
    page = (place / "export" / "spectrain" / "README.md").read_text()
    assert yaml.safe_load(page.split("---\n")[1])["base_model"] == "owner/model"
    assert str(tiny_path) not in page
    with pytest.raises(SpectrainError, match="cannot stand in a command line"):
        export(base_model="a'; rm -rf b", overwrite=True)


def test_it_is_pushed_when_all_is_there(export, place, monkeypatch):
    pushed = []

    def push(folder, repo, private):
        pushed.append((sorted(path.name for path in folder.iterdir()), repo, private))
        return "https://hub/me/head"

    monkeypatch.setattr("spectrain.recipes.export.require_token", lambda: None)
    monkeypatch.setattr("spectrain.recipes.export.push", push)
    report = export(push="me/head")
    assert pushed == [(["README.md", "config.json", "model.safetensors", RECORD], "me/head", True)]
    assert "pushed to https://hub/me/head" in render(report)
    with pytest.raises(SpectrainError, match="OWNER/NAME"):
        export(push="head")


def test_from_training_to_the_page(command, store, tiny_path, tmp_path):
    """Through the commands: what a training measured on its way is told until there is better."""
    done = command("run", eval_every=3)
    assert done.returncode == 0, done.stderr
    export = ["export", str(tmp_path / "run"), "--format", "spectrain", "--overwrite"]
    result = CliRunner().invoke(cli.app, export)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "run" / "export" / "spectrain" / "README.md").read_text()
    assert "Measured by the training itself, of these weights (step 6)" in page
    for text in ("steps: 6", "training rows:", "optimizer adamw"):
        assert text in page
    head = str(tmp_path / "run" / "head")
    flags = ["--target", str(tiny_path), "--store", str(store), "--head", head]
    flags += ["--out", str(tmp_path / "eval"), "--json", str(tmp_path / "run" / "eval-alpha.json")]
    assert CliRunner().invoke(cli.app, ["eval-alpha", *flags]).exit_code == 0
    result = CliRunner().invoke(cli.app, export)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "run" / "export" / "spectrain" / "README.md").read_text()
    alpha = json.loads((tmp_path / "run" / "eval-alpha.json").read_text())
    for one in alpha["temperatures"]:
        assert f"### Temperature {one['temperature']:g}" in page
        assert f"| 1 | {one['positions'][0]['conditional']['value']:.3f} |" in page
    assert evaluate.DEFINITIONS["rule"] in page
    # Once the head is trained further, the old numbers are no longer its own.
    other = load_head(head)
    next(other.parameters()).data += 1e-3
    save_head(other, tmp_path / "run" / "head")
    assert CliRunner().invoke(cli.app, export).exit_code == 0
    page = (tmp_path / "run" / "export" / "spectrain" / "README.md").read_text()
    assert "Not measured" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument 'RUN'"),
        (["{run}"], "format: not given"),
        (["{run}", "--format", "spectrian"], "did you mean 'spectrain'"),
        (["{run}", "--format", "list"], "known: spectrain (every family)"),
        (["{run}", "--format", "spectrain", "--license", "My Own"], "license: 'My Own' refused"),
        (["nowhere", "--format", "spectrain"], "no head here"),
    ],
)
def test_bad_usage_is_one_line(place, arguments, words):
    arguments = [one.format(run=place) for one in arguments]
    result = CliRunner().invoke(cli.app, ["export", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_help_lists_every_format():
    for name in formats.WRITERS:
        assert name in command_of_export.export.__doc__, name


def test_launch_lines_of_an_embedded_target_name_the_target_that_fits(head):
    """The hub's own weights have another fingerprint: our engine would refuse them."""
    target = SimpleNamespace(name="smollm2-135m")
    reference = Reference(target, "HuggingFaceTB/SmolLM2-135M-Instruct")
    (launch,) = OwnWriter().launch(head, reference)
    assert isinstance(launch, Launch)
    assert "--target smollm2-135m" in launch.text


def test_a_folder_whose_name_would_break_a_command_is_left_to_the_reader(head, tmp_path):
    """Inside the quotes of a shell and of JSON no name can be put in without knowing both."""
    launch = Launch("engine", 'run \'{"model": "{folder}"}\'')
    assert _line(launch, "runs/it")["text"] == 'run \'{"model": "runs/it"}\''
    told = _line(launch, "runs/it's here")
    assert told["text"] == 'run \'{"model": "FOLDER"}\''
    assert "FOLDER is runs/it's here" in told["note"]


def test_numbers_too_large_for_the_type_are_named(export, place, head):
    """Written as float16 they would be infinite, and nothing that is drafted would be accepted."""
    with torch.no_grad():
        head.fc.weight[0, 0] = 1e5
    save_head(head, place / "head")
    with pytest.raises(SpectrainError, match=r"float16 cannot hold .* fc.weight"):
        export(dtype="float16")
    assert not (place / "export").exists()
    export(dtype="bfloat16")


def test_no_place_of_this_machine_is_in_what_may_be_uploaded(export, place, tiny):
    export()
    for path in (place / "export" / "spectrain").iterdir():
        if path.suffix in (".md", ".json") and path.name != "config.json":
            text = path.read_text().replace(tiny.name, "")
            assert str(place) not in text
            assert str(place.parent) not in text

"""verify-data: stores as `prepare` makes them are sound; planted faults are named, whatever they
are in; the target finds what no look at the files can."""

from __future__ import annotations

import functools
import shutil
from itertools import pairwise

import pytest
import torch
from damaged import edit, seal
from preparing import PROMPTS, content, talk, write
from typer.testing import CliRunner

from spectrain import cli
from spectrain.core import files
from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json
from spectrain.core.target import Target
from spectrain.data.int8 import group_of, to_int8
from spectrain.data.manifest import fingerprint_of
from spectrain.data.store import FeatureStore
from spectrain.recipes import prepare, verify_data
from spectrain.recipes.prepare import PrepareConfig
from spectrain.recipes.verify_data import MEANING, VerifyConfig

LAYERS = [1, 3, 4]


@pytest.fixture(scope="module")
def load():
    return functools.cache(Target.load)


@pytest.fixture(autouse=True)
def quick(monkeypatch, load):
    """One load of a target; no progress bars; machines are not killed here."""
    monkeypatch.setattr(Target, "load", load)
    monkeypatch.setenv("SPECTRAIN_QUIET", "1")
    monkeypatch.setattr(files.os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_path, load):
    """Folder of a store with these settings, prepared once; a copy of it may be damaged."""
    folder = tmp_path_factory.mktemp("stores")
    prompts = write(folder / "prompts.jsonl", PROMPTS)

    @functools.cache
    def make(**settings):
        path = folder / "-".join(map(str, settings.values()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPECTRAIN_QUIET", "1")
            patch.setattr(prepare.Target, "load", load)
            config = {
                "target": str(tiny_path),
                "prompts": prompts,
                "store": path,
                "heldout": 0.3,
                "max_new_tokens": 12,
                "shard_tokens": 200,
                "temperature": (0.0, 1.0),
            }
            prepare.run(PrepareConfig(**(config | settings)))
        return path

    return make


@pytest.fixture
def store(made, tmp_path):
    """A copy of a store, float32 unless told otherwise."""

    def copy(**settings):
        path = tmp_path / "store"
        shutil.copytree(made(**({"dtype": "float32"} | settings)), path)
        return path

    return copy


def verified(path, **settings) -> dict:
    return verify_data.run(VerifyConfig(store=path, **settings))


def failed(report: dict) -> dict[str, str]:
    """What is wrong, by check."""
    found = {n: " ".join(c["wrong"]) for n, c in report["checks"].items() if c["wrong"]}
    assert report["sound"] == (not found)
    assert report["failure"] == (f"NOT SOUND: {', '.join(found)}" if found else None)
    return found


@pytest.mark.parametrize("last_states", ["everywhere", "replies"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_what_prepare_makes_is_sound(made, dtype, last_states):
    """Every type, with the target asked; nothing is left untried."""
    path = made(dtype=dtype, last_states=last_states, teacher_top=4)
    report = verified(path)
    assert failed(report) == {}
    assert {check["verdict"] for check in report["checks"].values()} == {"holds"}
    assert list(report["checks"]) == list(MEANING)
    text = verify_data.render(report)
    assert text.endswith("\nsound")
    assert max(map(len, text.splitlines()[2:])) <= 80  # below the names of folders


def test_int8_says_nearly_what_was_said(made):
    """The output layer on int8 states: nearly always the stored choice, and close to it."""
    found = verified(made(dtype="int8", last_states="everywhere", teacher_top=4), sample=10_000)
    seen = found["checks"]["output layer"]["seen"]
    assert float(seen.split("same choice at ")[1].split("%")[0]) > 95
    store = FeatureStore.open(made(dtype="int8", last_states="everywhere", teacher_top=4))
    exact = FeatureStore.open(made(dtype="float32", last_states="everywhere", teacher_top=4))
    assert store.bytes_per_token((1, 2, 3), True) < 0.3 * exact.bytes_per_token((1, 2, 3), True)


def test_int8_rerun_gives_the_same_bytes(made, tmp_path, tiny_path):
    """From the replies on, all is made anew."""
    first = made(dtype="int8", last_states="replies", teacher_top=4)
    again = tmp_path / "again"
    config = PrepareConfig(
        target=str(tiny_path),
        prompts=first.parent / "prompts.jsonl",
        store=again,
        heldout=0.3,
        max_new_tokens=12,
        shard_tokens=200,
        temperature=(0.0, 1.0),
        dtype="int8",
        last_states="replies",
        teacher_top=4,
    )
    prepare.run(config)
    assert content(again) == content(first)


def test_a_store_of_tokens_alone(made):
    """Its tokens are checked; there are no features, and the table says what was not tried."""
    report = verified(made(features="none"))
    assert failed(report) == {}
    untried = {n for n, check in report["checks"].items() if check["verdict"] == "untried"}
    assert untried == {"teacher", "likeliest", "features", "output layer", "second reading"}
    assert "sound, as far as the files tell" in verify_data.render(report)


def test_without_the_target_no_model_is_loaded(made, monkeypatch):
    def loaded(*args, **kwargs):
        raise AssertionError("a model was loaded")

    path = made(dtype="float32")
    monkeypatch.setattr(Target, "load", loaded)
    report = verified(path, without_target=True)
    assert failed(report) == {}
    assert report["checks"]["output layer"]["verdict"] == "untried"
    assert "no target was asked" in verify_data.render(report)


# ── files ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-4] + bytes([data[-4] ^ 1]) + data[-3:], "damaged"),
        (lambda data: data[:-9], "truncated|damaged"),
        (None, "missing"),
    ],
)
def test_damaged_files_are_named(store, suffix, change, words):
    """One of several: the others are looked at; the rows as a whole and the target are not."""
    path = store()
    file = path / f"shard-00001.{suffix}"
    if change:
        file.write_bytes(change(file.read_bytes()))
    else:
        file.unlink()
    report = verified(path)
    found = failed(report)
    assert set(found) == {"checksums"}
    assert file.name in found["checksums"]
    assert any(word in found["checksums"] for word in words.split("|"))
    for name in ("counts", "order", "splits", "output layer", "second reading"):
        assert report["checks"][name]["verdict"] in ("untried", "holds")
    assert report["checks"]["splits"]["verdict"] == "untried"
    assert report["checks"]["features"]["verdict"] == "holds"


def test_an_unfinished_store(store):
    path = store()
    edit(path, lambda manifest: manifest.update(complete=False, shards=[]))
    report = verified(path)
    assert set(failed(report)) == {"manifest"}
    others = [check["verdict"] for check in report["checks"].values()][1:]
    assert set(others) == {"untried"}


@pytest.mark.parametrize(
    "forge",
    [
        lambda manifest: manifest["settings"].update(max_length=7),
        lambda manifest: manifest["settings"].pop("source"),
        lambda manifest: manifest.update(fingerprint="0" * 16),
        lambda manifest: manifest.pop("fingerprint"),
    ],
)
def test_a_forged_manifest(store, forge):
    """Settings that no file contradicts: only the fingerprint of all of them tells."""
    path = store()
    edit(path, forge)
    assert "not those it was made with" in failed(verified(path, without_target=True))["manifest"]


def test_exit_codes(store, tmp_path, tiny_path, whole):
    """0 sound, 1 not sound with the verdict as the last line, 2 for what is no store."""
    path = store()
    runner = CliRunner()
    done = runner.invoke(cli.app, ["verify-data", str(path), "--without-target"])
    assert done.exit_code == 0
    edit(path, lambda manifest: manifest["counts"]["rows"].update(train=1))
    done = runner.invoke(cli.app, ["verify-data", str(path), "--without-target"])
    assert done.exit_code == 1
    assert "rows.train: the manifest says 1, the rows say" in done.output
    assert done.output.splitlines()[-1] == "error: NOT SOUND: counts"
    for folder in (tmp_path, tmp_path / "absent"):
        done = runner.invoke(cli.app, ["verify-data", str(folder)])
        assert done.exit_code == 2
        assert "no feature store here" in done.output
    (path / "manifest.json").write_text('{"format": 1')
    assert runner.invoke(cli.app, ["verify-data", str(path)]).exit_code == 2


def test_another_target_is_refused(store, whole):
    with pytest.raises(SpectrainError, match=r"features of another target.*--without-target"):
        verified(store(), target=whole.name)


def test_a_manifest_without_a_target_says_what_to_do(store):
    path = store()
    edit(path, lambda manifest: manifest.update(about={}))
    with pytest.raises(
        SpectrainError, match=r"manifest\.json: the manifest does not name.*--target"
    ):
        verified(path)


# ── inside, with right checksums ─────────────────────────────────────────────


def test_faults_inside_are_told_with_their_shard(store):
    """What tests/data/test_verify.py plants in tensors, here through the files; a fault ends the
    look at its shard or goes on, and others are still looked at."""
    path = store()
    seal(path, 0, lambda t, f: t["reply"].__setitem__(t["reply"] > 0, 2))
    seal(path, 2, lambda t, f: t["aux"].__setitem__((5, 1), float("nan")))
    found = failed(verified(path))
    assert set(found) == {"replies", "features"}
    assert found["replies"].startswith("shard-00000.safetensors: row ")
    assert found["features"].startswith("shard-00002.safetensors: row ")


def test_a_vocabulary_is_known_with_the_target_alone(store):
    path = store()
    seal(path, 1, lambda t, f: t["tokens"].__setitem__(3, 100_000))
    assert failed(verified(path, without_target=True)) == {}
    assert set(failed(verified(path))) == {"tokens"}


def test_rows_in_another_order_and_twice(store):
    path = store()
    first = FeatureStore.open(path).rows("train")[0]

    def rename(tensors, facts):
        facts[-1]["id"], facts[-1]["temperature"] = first.id, first.temperature

    seal(path, len(list(path.glob("shard-*.json"))) - 1, rename)
    assert "comes after" in failed(verified(path, without_target=True))["order"]


@pytest.mark.parametrize(
    ("begin", "end", "wrong"),
    [
        (1, 0, "reply begins"),
        (-1, 0, "reply begins"),
        (-4, 0, "reply begins"),
        (0, -1, "reply ends"),
    ],
)
def test_a_mask_that_the_target_did_not_write(tmp_path, tiny_path, begin, end, wrong):
    """Everything about it agrees in every file; only the tokenizer knows what a turn looks like."""
    path = tmp_path / "store"
    talks = [talk(f"How many of {n}?", "Seven apples.", "Sure?", "Nobody minds.") for n in range(6)]
    prompts = write(tmp_path / "talks.jsonl", talks)
    settings = {"features": "none", "heldout": 0, "shard_tokens": 160}
    prepare.run(PrepareConfig(target=str(tiny_path), prompts=prompts, store=path, **settings))
    assert failed(verified(path)) == {}

    def move(tensors, facts):
        first, last = tensors["offsets"][1:3]
        said = first + (tensors["reply"][first:last] == 2).nonzero().flatten()
        tensors["reply"][said] = 0
        tensors["reply"][said[0] + begin : said[-1] + 1 + end] = 2
        facts[1]["supervised"] += end - begin
        tensors["predicting"][2:] += end - begin

    seal(path, 1, move)
    counted = FeatureStore.open(path).manifest["counts"]["supervised_tokens"]["train"]
    change = {"train": counted + end - begin}
    edit(path, lambda manifest: manifest["counts"]["supervised_tokens"].update(change))
    assert failed(verified(path, without_target=True)) == {}
    found = failed(verified(path))
    assert set(found) == {wrong}
    name = read_json(path / "shard-00001.json")["rows"][1]["id"]
    assert found[wrong].startswith(f"shard-00001.safetensors: row {name}, token ")


def test_another_template_than_the_store_s_tells_nothing_of_beginnings(store):
    path = store()
    edit(path, lambda manifest: manifest["settings"].update(template="0" * 16))
    told = fingerprint_of(read_json(path / "manifest.json")["settings"])
    edit(path, lambda manifest: manifest.update(fingerprint=told))
    report = verified(path)
    assert failed(report) == {}
    assert report["checks"]["reply begins"]["verdict"] == "untried"
    assert "not the one of the store" in report["checks"]["reply begins"]["seen"]


# ── what only the target knows ───────────────────────────────────────────────

everything = {"sample": 10_000}


def each_shard(path, change) -> None:
    for number in range(len(list(path.glob("shard-*.json")))):
        seal(path, number, change)


def test_a_wrong_layer_is_told_with_the_one_that_fits(store, tiny):
    """Stored under the name of the middle layer: the output of the one before it."""
    layers = tiny.default_aux_layers()
    path = store()

    @torch.inference_mode()
    def shift(tensors, facts):
        hidden = tiny.hidden_size
        bounds = tensors["offsets"].tolist()
        for begin, end in pairwise(bounds):
            tokens = tensors["tokens"][None, begin:end].long()
            other = tiny.forward(tokens, aux_layers=(layers[1] - 1,)).aux[0]
            tensors["aux"][begin:end, hidden : 2 * hidden] = other

    each_shard(path, shift)
    found = failed(verified(path))
    assert set(found) == {"second reading"}
    assert f"layer {layers[1]} is not what the target gives" in found["second reading"]
    assert f"layer {layers[1] - 1} fits best" in found["second reading"]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_layers_in_another_order(store, tiny, dtype):
    """Low and high have changed places: a slip that trains without complaint."""
    low, _, high = tiny.default_aux_layers()
    path = store(dtype=dtype)

    def swap(tensors, facts):
        for name in {"aux", "aux_scale"} & set(tensors):
            tensors[name] = torch.cat(tensors[name].chunk(3, 1)[::-1], 1)

    each_shard(path, swap)
    found = failed(verified(path))["second reading"]
    assert f"layer {low} is not what the target gives" in found
    assert f"layer {high} fits best" in found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_last_state_before_the_norm(store, tiny, dtype):
    """CASE 18: both questions to the target find it; the second says what it is."""
    path = store(dtype=dtype)

    @torch.inference_mode()
    def unnorm(tensors, facts):
        bounds = tensors["offsets"].tolist()
        rows = [tensors["tokens"][None, b:e].long() for b, e in pairwise(bounds)]
        top = (tiny.num_layers - 1,)
        states = torch.cat([tiny.forward(row, aux_layers=top).aux[0] for row in rows])
        if dtype == "int8":
            tensors["last"], tensors["last_scale"] = to_int8(states, group_of(tiny.hidden_size))
        else:
            tensors["last"] = states.to(tensors["last"].dtype)

    each_shard(path, unnorm)
    found = failed(verified(path))
    assert set(found) == {"output layer", "second reading"}
    assert f"layer {tiny.num_layers - 1} fits best" in found["second reading"]


@pytest.mark.parametrize("name", ["logprob", "lognorm"])
def test_one_wrong_fact(store, name):
    path = store()

    def change(tensors, facts):
        tensors[name][3] -= 0.05

    seal(path, 1, change)
    found = failed(verified(path, **everything))
    assert set(found) == {"output layer"}
    wanted = {"logprob": "another log-probability", "lognorm": "another normaliser"}[name]
    assert wanted in found["output layer"]
    assert "off by 0.05" in found["output layer"]


def test_one_wrong_choice(store):
    """The runner-up is stored, with its own log-probability: nothing but the logits tells."""
    path = store(teacher_top=4)

    def change(tensors, facts):
        gap = tensors["top_logprob"][:, 0] - tensors["top_logprob"][:, 1]
        place = int(gap.argmax())
        tensors["argmax"][place] = tensors["top_ids"][place, 1]

    seal(path, 1, change)
    found = failed(verified(path, **everything))
    assert set(found) == {"output layer"}


def test_other_tokens_than_were_read(store, monkeypatch):
    """Two tokens of every prompt have changed places after the capture: the file is sound."""
    path = store()

    def swap(tensors, facts):
        for begin in tensors["offsets"][:-1].tolist():
            tensors["tokens"][begin : begin + 4] = tensors["tokens"][begin : begin + 4].flip(0)

    each_shard(path, swap)
    assert failed(verified(path, without_target=True)) == {}
    assert "second reading" in failed(verified(path))

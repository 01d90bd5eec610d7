"""Whatever a value of config.json becomes, in every layout: a reader tells it in findings, or the
head is built; nothing else is raised.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from eagle_files import target_of
from head_kinds import create
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from mtp_checkpoints import save_checkpoint
from tiny_models import save_tiny

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.export import numbers
from spectrain.export.formats import READERS, reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import Finding, Reference, fit, load
from spectrain.export.write import write

NAN, HUGE = float("nan"), 10**30
LAYER = "transformer_layer_config"
# Name → format, family, options. Of every family in our own layout, since each has other keys.
EAGLE3 = {"draft_vocab_size": 90}
WRITTEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eagle1": ("eagle", "eagle1", {"fc_bias": True}),
    "eagle1 of SGLang": ("sglang", "eagle1", {}),
    "eagle3": ("vllm", "eagle3", EAGLE3 | {"aux_layers": (0, 2, 6), "embeddings": "own"}),
    "eagle3 of SGLang": ("sglang", "eagle3", EAGLE3 | {"aux_layers": (0, 2, 6), "layers": 2}),
    "speculators": ("speculators", "eagle3", EAGLE3 | {"embeddings": "own"}),
    "medusa": ("medusa", "medusa", {"layers": 1}),
    "mtp-transformers": ("mtp-transformers", "mtp-sequential", {"pass_on": "after_norm"}),
    "hf": ("hf", "draft", {}),
    "own eagle1": ("spectrain", "eagle1", {}),
    "own eagle3": ("spectrain", "eagle3", EAGLE3),
    "own medusa": ("spectrain", "medusa", {}),
    "own mtp-parallel": ("spectrain", "mtp-parallel", {}),
    "own mtp-sequential": ("spectrain", "mtp-sequential", {}),
    "own draft": ("spectrain", "draft", {}),
}
LAYOUTS = [*WRITTEN, "mtp-deepseek", "mtp-mimo"]
MTP = {"mtp-deepseek": "deepseek_v3", "mtp-mimo": "qwen2"}
DROPPED = "dropped"


@dataclass(frozen=True)
class Sound:
    """A checkpoint, its target, and its config."""

    folder: Path
    target: Target
    config: dict[str, Any]

    def with_value(self, path: tuple[str, ...], value: Any) -> Found:
        """As found when the value at this path is another one."""
        config = copy.deepcopy(self.config)
        inner = config
        for key in path[:-1]:
            inner = inner[key]
        if value is DROPPED:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
        # On the disk, since some layouts are loaded from there.
        (self.folder / "config.json").write_text(json.dumps(config))
        return Found.open(self.folder)


@pytest.fixture(scope="module")
def sound(tmp_path_factory, tokenizer):
    """Name of a layout → one of its checkpoints."""
    made: dict[str, Sound] = {}

    def give(name: str) -> Sound:
        if name not in made:
            folder = tmp_path_factory.mktemp("layout") / "out"
            target = _checkpoint(name, folder, tokenizer)
            made[name] = Sound(folder, target, json.loads((folder / "config.json").read_text()))
        return made[name]

    return give


def _checkpoint(name: str, folder: Path, tokenizer) -> Target:
    if name in MTP:
        save_checkpoint(folder, tokenizer, MTP[name], count=1)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
        return Target.load(str(folder), dtype="float32", pack_weights=False)
    format, family, options = WRITTEN[name]
    if "mtp" in family or family == "draft":
        place = save_tiny(folder.parent / "target", tokenizer, vocab_size=len(tokenizer))
        target = Target.load(str(place), pack_weights=False)
    else:
        target = target_of(padded=0)
    head = create(target, family, steps=2, **options)
    made, reference = writer(format, family), Reference(target, target.name)
    assert made.refusals(head, reference) == []
    folder.mkdir()
    write(made.encode(head, reference), folder)
    return target


def paths(config: dict[str, Any], start: tuple[str, ...] = ()):
    for key, value in config.items():
        yield (*start, key)
        if isinstance(value, dict):
            yield from paths(value, (*start, key))


def failures(found: Found, target: Target) -> list[str]:
    """What fails, by name; after all that a command asks of a reader was asked."""
    try:
        reader = reader_of(found)
    except SpectrainError as error:
        return [error.what]
    told = list(reader.findings(found, target))
    assert all(isinstance(one, Finding) for one in told)
    assert all(one.fix and "\n" not in one.text for one in told if one.verdict == "fail")
    if fit(told):  # as the doctor asks for them
        list(reader.suspects(found, target))
    failed = [one.text for one in told if one.verdict == "fail"]
    try:
        head = load(reader, found, target, told)
    except SpectrainError as error:
        return failed or [error.what]
    assert failed == []
    json.dumps(head.config.model_dump(mode="json"), allow_nan=False)  # as it is saved
    return []


SMALL = st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from([0.5, 1.5, -1.0])
ODD = st.sampled_from([HUGE, -HUGE, 2**31, 2**63, 1e30, NAN, float("inf"), 1e-300, "", "x", "3"])
VALUES = st.one_of(
    SMALL,
    ODD,
    st.lists(SMALL | ODD, max_size=3),
    st.dictionaries(st.just("a"), ODD),
    st.just(DROPPED),
)


def fuzz(made: Sound, name: str, examples: int) -> None:
    @seed(name)
    @settings(max_examples=examples, database=None, deadline=None, phases=[Phase.generate])
    @given(path=st.sampled_from(list(paths(made.config))), value=VALUES)
    def try_one(path, value):
        failures(made.with_value(path, value), made.target)

    try_one()
    made.with_value((next(iter(made.config)),), made.config[next(iter(made.config))])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sound_one_has_no_failure(sound, name):
    made = sound(name)
    found = made.with_value(("note",), "nothing") if "own" not in name else Found.open(made.folder)
    assert failures(found, made.target) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_value_of_any_key(sound, name):
    fuzz(sound(name), name, examples=30)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_many_values_of_any_key(sound, name):
    fuzz(sound(name), name, examples=1000)


def test_every_layout_is_tried(sound):
    tried = {reader_of(Found.open(sound(name).folder)).name for name in LAYOUTS}
    assert tried == READERS.keys() - {"mtp-qwen3next"}  # no target that can be loaded has it


NUMBERS = {
    "rms_norm_eps": (0, 0.0, -1, 1, 1e30, NAN, True, "small"),
    "rope_theta": (0, -1, NAN, float("inf"), True),
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        (0, -1, HUGE, 1.5, True, NAN, "x"),
    ),
    "head_dim": (-1, HUGE, 2**31 - 2),
    "max_position_embeddings": (0, -1, HUGE, NAN),
}


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_that_none_can_be(sound, name, key):
    """Each layout that has the key, wherever in its config, refuses them, and none of them raises
    anything: a base or an epsilon of NaN would make guesses of NaN."""
    made = sound(name)
    places = [path for path in paths(made.config) if path[-1] == key]
    if name in ("eagle1", "eagle3", "speculators", "own eagle3", "hf"):
        assert places
    passed = [
        (path, value)
        for path in places
        for value in NUMBERS[key]
        if not failures(made.with_value(path, value), made.target)
    ]
    assert passed == []


def test_a_model_that_can_be_built_and_not_run(sound):
    """The library asks for this key when the model runs first."""
    made = sound("hf")
    (text,) = failures(made.with_value(("output_hidden_states",), 0.5), made.target)
    assert "the library cannot run it (TypeError" in text


@pytest.mark.parametrize("name", MTP)
def test_a_type_that_the_library_cannot_write(sound, name):
    """It takes the config and stops when it is asked for it."""
    made = sound(name)
    assert failures(made.with_value(("dtype",), [True]), made.target) == []


@pytest.mark.parametrize("family", [[], {}, 3, None, NAN])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_family_that_is_no_name(sound, name, family):
    failures(sound(name).with_value(("family",), family), sound(name).target)


def test_a_head_size_that_would_take_the_memory():
    """Angles are worked out before shapes are compared."""
    assert list(numbers.findings({"head_dim": 2**16})) == []
    (one,) = numbers.findings({"head_dim": 2**16 + 2})
    assert (one.verdict, one.text) == ("fail", "head_dim is 65538, not a size")

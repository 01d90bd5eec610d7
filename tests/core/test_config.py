"""Precedence is defaults < file < --set < flags, and every problem is told in one error."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from spectrain.core import config as config_module
from spectrain.core.config import Config, find_config, load_config, shipped_configs
from spectrain.core.errors import SpectrainError


class Optimizer(Config):
    lr: float = Field(1e-3, gt=0, description="Peak learning rate.")
    name: Literal["adamw", "muon"] = Field("muon", description="Which optimiser.")


class Train(Config):
    target: str = Field("smollm2-135m", description="Target model.")
    steps: int = Field(10, description="Optimiser steps.")
    temperature: list[float] = Field([0.0], description="Temperatures.")
    optimizer: Optimizer = Field(Optimizer(), description="Optimiser.")

    @model_validator(mode="after")
    def muon_is_slow(self):
        if self.steps == 13 and self.optimizer.name == "muon":
            raise ValueError("13 steps do not suit muon")
        return self


class Needs(Config):
    store: str = Field(description="No default.")


def write(tmp_path, text):
    path = tmp_path / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problem(*arguments, model=Train, **named) -> str:
    with pytest.raises(SpectrainError) as caught:
        load_config(model, "train", *arguments, **named)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_precedence(tmp_path):
    file = write(tmp_path, "train:\n  steps: 1\n  optimizer: {lr: 1e-2}\neval:\n  anything: 1\n")
    assert load_config(Train, "train") == Train()
    assert load_config(Train, "train", file).steps == 1
    mixed = load_config(Train, "train", file, ["steps=2", "optimizer.name=adamw"], {"steps": None})
    assert (mixed.steps, mixed.optimizer.lr, mixed.optimizer.name) == (2, 0.01, "adamw")
    assert load_config(Train, "train", file, ["steps=2"], {"steps": 3}).steps == 3
    assert load_config(Train, "generate", file) == Train()  # no such section: the defaults


def test_set_values_are_yaml():
    config = load_config(Train, "train", None, ["temperature=[0, 0.7]", "target=a=b"])
    assert config.temperature == [0, 0.7]
    assert config.target == "a=b"


def test_names_with_dots_in_a_mapping_of_numbers(tmp_path):
    """They are no path, and their order is kept: in a file, one by one, and all at once."""

    class Rates(Config):
        rates: dict[str, float] = Field({}, description="factors by name")
        head: dict[str, Any] = Field({}, description="options")

    file = tmp_path / "rates.yaml"
    file.write_text("train: {rates: {a.x: 1, b: 2, a.*: 3}, head: {deep: {er: 4}}}")
    config = load_config(Rates, "train", file, ["rates.a.x=5", "rates.c.*.d=6", "head.deep.y=7"])
    assert list(config.rates.items()) == [("a.x", 5), ("b", 2), ("a.*", 3), ("c.*.d", 6)]
    assert config.head == {"deep": {"er": 4, "y": 7}}
    given = load_config(Rates, "train", None, ["rates={a.*: 1, a.b: 2}"])
    assert given.rates == {"a.*": 1, "a.b": 2}
    with pytest.raises(SpectrainError, match=r"rates\.a\.x: 'much' refused.*--set"):
        load_config(Rates, "train", None, ["rates.a.x=much"])


def test_all_problems_at_once(tmp_path):
    file = write(tmp_path, "trian: {}\ntrain: {stesp: 3}\n")
    text = problem(file, ["optimizer.name=adam", "optimizer.lrr=1", "nonsense"], {"steps": 1.5})
    for words in (
        "6 problems in the configuration of train",
        "unknown section 'trian', did you mean 'train'?",
        "unknown key 'stesp', did you mean 'steps'?",
        f"from {file}",
        "optimizer.name: 'adam' is not a choice, did you mean 'adamw'? (choices: 'adamw' or 'muon'",
        "unknown key 'optimizer.lrr', did you mean 'lr'?",
        "--set 'nonsense': expected key=value",
        "steps: 1.5 refused",
        "from --steps",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps=many", "steps: 'many' refused"),
        ("steps.more=1", "steps: {'more': 1} refused"),
        ("optimizer.lr=-1", "optimizer.lr: -1 refused, input should be greater than 0"),
        ("optimizer.lr=.nan", "finite"),
        ("steps=13", "13 steps do not suit muon"),
        ("temperature=[", "cannot read '[' as YAML"),
        ("=3", "expected key=value"),
        ("a..b=3", "expected key=value"),
        ("optimizer={lr: 1, lr: 2}", "given twice"),
    ],
)
def test_one_problem_is_one_line(override, words):
    text = problem(None, [override])
    assert words in text
    assert "\n" not in text


def test_missing_value_names_the_flag_only_if_there_is_one():
    assert "use --store, --set store=" in problem(model=Needs, flags={"store": None})
    assert "(use --set store=" in problem(model=Needs)


def test_bad_files(tmp_path, monkeypatch):
    assert "my.yaml:2: not valid YAML" in problem(write(tmp_path, "train: {}\n a: [\n"))
    assert "given twice" in problem(write(tmp_path, "train:\n  steps: 1\n  steps: 2\n"))
    assert "one section for each verb" in problem(write(tmp_path, "- a\n"))
    assert "expected keys and values" in problem(write(tmp_path, "train: 3\n"))
    assert load_config(Train, "train", write(tmp_path, "")) == Train()
    monkeypatch.setattr(config_module, "SHIPPED", tmp_path)
    (tmp_path / "mine.yaml").touch()
    assert find_config("my") == tmp_path / "my.yaml"
    assert "one of: mine, my, did you mean 'mine'?" in problem("mime")


def test_shipped_configurations_are_found_by_name():
    for name in shipped_configs():
        assert find_config(name).is_file()


def test_config_is_frozen_and_described():
    with pytest.raises(ValidationError):
        Train().steps = 3
    with pytest.raises(TypeError, match="without a description: silent"):

        class Bad(Config):
            silent: int = 0


def test_unknown_key_in_a_list_of_models_has_the_names_of_the_model():
    class Several(Config):
        optimizers: tuple[Optimizer, ...] = Field((), description="Some.")

    with pytest.raises(SpectrainError, match=r"'optimizers\.1\.lrr', did you mean 'lr'\?.*name"):
        load_config(Several, "train", overrides=["optimizers=[{lr: 1}, {lrr: 1}]"])

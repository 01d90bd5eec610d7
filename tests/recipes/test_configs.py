"""Every shipped configuration is valid for every command, and says something to each."""

from __future__ import annotations

import pytest
import yaml

from spectrain.core.config import SHIPPED, VERBS, load_config, shipped_configs
from spectrain.heads.registry import family
from spectrain.recipes.evaluate import EvalConfig
from spectrain.recipes.generate import GenerateConfig
from spectrain.recipes.prepare import PrepareConfig
from spectrain.recipes.train import TrainConfig

MODELS = {
    "prepare": (PrepareConfig, {}),
    "train": (TrainConfig, {}),
    "eval": (EvalConfig, {"store": "store", "head": "head"}),
    "generate": (GenerateConfig, {"prompts": "prompts.jsonl", "head": "head"}),
}


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configuration_is_valid(name):
    sections = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
    assert set(sections) == set(VERBS)
    for verb, (model, flags) in MODELS.items():
        config = load_config(model, verb, name, flags=flags)
        for key, value in sections[verb].items():
            got = config.model_dump(mode="json")[key]
            assert got == value or got == [value], (verb, key)
    train = load_config(TrainConfig, "train", name)
    family(train.family).Options.model_validate(train.head)


def test_one_is_shipped():
    assert "demo-smollm2" in shipped_configs()

"""Every shipped configuration is valid, and runs: prepare, train, measure, generate, tiny."""

from __future__ import annotations

import pytest
import yaml
from preparing import PROMPTS, write

from spectrain.core.config import SHIPPED, VERBS, load_config, shipped_configs
from spectrain.heads.registry import FAMILIES, family
from spectrain.recipes import compare, evaluate, generate, plan, prepare, train
from spectrain.recipes.train import tuned_target

MODELS = {
    "prepare": (prepare.PrepareConfig, {}),
    "train": (train.TrainConfig, {}),
    "eval": (evaluate.EvalConfig, {"store": "store", "head": "head"}),
    "plan": (plan.PlanConfig, {"store": "store", "head": "head"}),
    "generate": (generate.GenerateConfig, {"prompts": "prompts.jsonl", "head": "head"}),
    "compare": (compare.CompareConfig, {}),
}
# What a tiny run changes, where the configuration has it: size and nothing else.
TINY_HEAD = {"draft_vocab_size": 60, "model": None}


def sections(name: str) -> dict:
    return yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())


TRAINED = [name for name in shipped_configs() if "train" in sections(name)]


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configuration_is_valid(name):
    found = sections(name)
    assert set(found) <= set(VERBS)
    for verb in found:
        model, flags = MODELS[verb]
        config = load_config(model, verb, name, flags=flags).model_dump(mode="json")
        for key, value in found[verb].items():
            got = config[key]
            if isinstance(value, dict):
                got = {inner: got[inner] for inner in value}
            assert got == value or got == [value], (verb, key)


@pytest.mark.parametrize("name", TRAINED)
def test_shipped_recipe_runs(name, tiny_path, tmp_path):
    """The whole way through the recipe's own settings, on the tiny target and a few prompts."""
    found = sections(name)
    assert set(found) - {"plan"} == {"prepare", "train", "eval", "generate"}
    target, store = str(tiny_path), tmp_path / "store"
    prompts = write(tmp_path / "prompts.jsonl", PROMPTS)
    common = {"target": target}
    flags = common | {"prompts": str(prompts), "store": str(store), "max_new_tokens": 12}
    prepare.run(
        load_config(
            prepare.PrepareConfig,
            "prepare",
            name,
            flags=flags | {"heldout": 0.3, "max_length": 200},
        )
    )
    chosen = load_config(train.TrainConfig, "train", name)
    options = family(chosen.family).Options.model_fields
    head = {
        f"head.{key}": value
        for key, value in TINY_HEAD.items()
        if key in options and key in {**chosen.head, "draft_vocab_size": 0}
    }
    flags = common | {"store": str(store), "out": str(tmp_path / "run"), "batch_size": 2}
    overrides = [f"{key}={'null' if value is None else value}" for key, value in head.items()]
    overrides += ["epochs=null", "steps=3"]
    report = train.run(load_config(train.TrainConfig, "train", name, overrides, flags))
    assert report["loss"] > 0
    tuned = tuned_target(tmp_path / "run")
    assert (tuned is None) == (chosen.trunk.mode == "frozen")
    if tuned is not None:
        common["target"] = str(tuned)
        flags = common | {"prompts": str(prompts), "store": str(tmp_path / "tuned")}
        flags |= {"heldout": 1.0, "max_new_tokens": 12, "max_length": 200}
        prepare.run(load_config(prepare.PrepareConfig, "prepare", name, flags=flags))
        store = tmp_path / "tuned"
    trained = {"head": str(tmp_path / "run"), "out": str(tmp_path / "out")}
    flags = common | trained | {"store": str(store)}
    measured = evaluate.run(load_config(evaluate.EvalConfig, "eval", name, flags=flags))
    assert all(part["tau"][0]["value"] >= 1 for part in measured["temperatures"])
    if "plan" in found:
        flags = common | {"head": trained["head"], "store": str(store)}
        overrides = ["context=20", "repeats=1"]
        plan.run(load_config(plan.PlanConfig, "plan", name, overrides, flags))
    flags = common | trained | {"prompts": str(prompts), "limit": 2, "max_new_tokens": 10}
    flags |= {"compare": True}
    written = generate.run(load_config(generate.GenerateConfig, "generate", name, flags=flags))
    assert written["way"].endswith("as planned") == ("plan" in found)
    own = train_of(name).family == "eagle2" or "plan" in found
    assert (written["tree"] is not None) == own
    # float32 and greedy: the same ids as the library's own decoding
    assert written["identical"]["transformers"] == 2


def train_of(name: str) -> train.TrainConfig:
    return load_config(train.TrainConfig, "train", name)


COMPARED = [name for name in shipped_configs() if "compare" in sections(name)]


@pytest.mark.parametrize("name", COMPARED)
def test_shipped_comparison_runs(name, tiny_path, tmp_path):
    """Every entry, tiny: its own options and the common ones, on one store."""
    store = tmp_path / "store"
    flags = {"target": str(tiny_path), "store": str(store), "heldout": 0.3, "max_new_tokens": 12}
    flags["prompts"] = str(write(tmp_path / "prompts.jsonl", PROMPTS))
    flags["heldout_temperatures"] = [0.0]
    prepare.run(load_config(prepare.PrepareConfig, "prepare", None, flags=flags))
    config = load_config(compare.CompareConfig, "compare", name).model_dump()
    for entry in config["entries"].values():
        if "draft_vocab_size" in family(train_family(config, entry)).Options.model_fields:
            entry.setdefault("head", {})["draft_vocab_size"] = 60
    config["common"] |= {"steps": 2, "batch_size": 2, "micro_batch": 2}
    tiny = {"target": str(tiny_path), "store": store, "out": tmp_path / "out", "prompts": 2}
    report = compare.run(compare.CompareConfig(**config | tiny | {"max_new_tokens": 6}))
    assert set(report["entries"]) == set(sections(name)["compare"]["entries"])
    assert all(entry["tau"][0]["value"] >= 1 for entry in report["entries"].values())


def train_family(config: dict, entry: dict) -> str:
    return entry.get("family") or config["common"]["family"]


def test_the_comparison_has_every_family():
    compared = sections("compare-smollm2")["compare"]["entries"]
    assert {entry["family"] for entry in compared.values()} == set(FAMILIES) - {"eagle2"}
    assert {entry.get("trunk", {}).get("mode") for entry in compared.values()} == {None, "lora"}


def test_every_family_has_a_recipe_for_the_embedded_target_and_for_a_large_one():
    trained = {name: train_of(name) for name in TRAINED}
    for ending, target in (("-smollm2", "smollm2-135m"), ("-8b", "meta-llama/")):
        own = [c for name, c in trained.items() if name.endswith(ending)]
        assert {config.family for config in own} == set(FAMILIES)
        assert {config.trunk.mode for config in own if config.family == "medusa"} == {
            "frozen",
            "lora",
        }
        assert all(config.target.startswith(target) for config in own)

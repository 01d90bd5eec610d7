"""What `--help` says: it comes at once, has examples, one word for one thing, and true defaults."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from spectrain import cli
from spectrain.commands.running import split
from spectrain.core.config import load_config
from spectrain.data.sources import Source
from spectrain.recipes import drafting, evaluate, plan, prepare, train
from spectrain.trainer.settings import DEFAULT_EPOCHS

# command → (recipe module, verb, configuration class)
TRAIN = ("train", "train", "TrainConfig")
RECIPES = {
    "prepare": ("prepare", "prepare", "PrepareConfig"),
    "inspect": ("inspect", "inspect", "InspectConfig"),
    "verify-data": ("verify_data", "verify-data", "VerifyConfig"),
    "draft-vocab": ("draft_vocab", "draft-vocab", "DraftVocabConfig"),
    **dict.fromkeys(("train-eagle", "train-medusa", "train-mtp", "train-draft"), TRAIN),
    "estimate": ("estimate", "train", "EstimateConfig"),
    "compare": ("compare", "compare", "CompareConfig"),
    "eval-alpha": ("evaluate", "eval", "EvalConfig"),
    "plan": ("plan", "plan", "PlanConfig"),
    "generate": ("generate", "generate", "GenerateConfig"),
    "chat": ("chat", "chat", "ChatConfig"),
    "check": ("check", "check", "CheckConfig"),
    "export": ("export", "export", "ExportConfig"),
    "import": ("import_head", "import", "ImportConfig"),
    "doctor": ("doctor", "doctor", "DoctorConfig"),
}
CHOICES = {"version", "stage", "kind"}  # they choose the family (commands/train.py)
NOT_SETTINGS = {"config", "set_", "json", "help"} | CHOICES
# What a command cannot do without; it has no default.
REQUIRED = {
    "inspect": {"prompts": "prompts.jsonl"},
    "draft-vocab": {"store": "store"},
    "eval-alpha": {"store": "store", "head": "head"},
    "plan": {"store": "store", "head": "head"},
    "generate": {"prompt": "text"},
    "export": {"run": "run", "format": "spectrain"},
    "import": {"path": "head"},
    "doctor": {"path": "head"},
}
# Defaults that are no value of the flag, as a person reads them.
IN_WORDS = {
    ("prepare", "prompts"): (
        (Source(path=str(prepare.SHIPPED_PROMPTS)),),
        "the shipped prompts",
    ),
    ("prepare", "limit"): (None, "all"),
    ("inspect", "target"): (None, "the store's, else smollm2-135m"),
    ("verify-data", "target"): (None, "the store's own"),
    ("generate", "limit"): (None, "all"),
    ("compare", "families"): (None, "all"),
    ("check", "prompts"): (prepare.SHIPPED_PROMPTS, "the shipped prompts"),
    ("doctor", "prompts"): (prepare.SHIPPED_PROMPTS, "the shipped prompts"),
    **{
        (name, key): (None, words)
        for name in ("generate", "chat", "check")
        for key, words in (
            ("draft_tokens", f"up to {drafting.DRAFT_TOKENS}"),
            ("tree", "as planned, else grown for EAGLE-2, else chain"),
            ("proposal", "drawn for unplanned chains, else top-k"),
        )
    },
    ("eval-alpha", "limit"): (None, "all"),
    ("eval-alpha", "max_draft"): (None, f"up to {evaluate.MAX_DRAFT}"),
    ("plan", "max_draft"): (None, f"up to {plan.MAX_DRAFT}"),
    ("plan", "limit"): (None, "all"),
    ("plan", "out"): (None, "the head's"),
    **{
        (name, "steps"): (None, f"{DEFAULT_EPOCHS:g} epochs")
        for name, recipe in RECIPES.items()
        if recipe == TRAIN or name == "estimate"
    },
    **{(name, "init"): (None, "a new one") for name, recipe in RECIPES.items() if recipe == TRAIN},
    ("estimate", "conversations"): (None, "the store's, or 1000"),
    ("export", "target"): (None, "the head's own"),
    ("export", "out"): (None, "RUN/export/NAME"),
    ("export", "alpha"): (None, "RUN/eval-alpha.json"),
    ("export", "base_model"): (None, "its hub id or folder"),
}


def commands() -> dict:
    return typer.main.get_command(cli.app).commands


def options_of(name: str) -> dict:
    return {option.name: option for option in commands()[name].params}


def shown_default(option) -> str | None:
    found = re.search(r"  \[default: (.+)\]$", option.help)
    return found and found[1]


def settings_of(name: str, **flags):
    module, verb, model = RECIPES[name]
    model = getattr(importlib.import_module(f"spectrain.recipes.{module}"), model)
    return load_config(model, verb, flags=REQUIRED.get(name, {}) | flags)


def test_help_does_not_load_torch():
    """What keeps `spectrain --help` far below half a second."""
    code = (
        "import sys; sys.argv = ['spectrain', '--help']\n"
        "from spectrain.cli import main\n"
        "try: main()\n"
        "finally: print([m for m in ('torch', 'transformers', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "train-eagle" in done.stdout


@pytest.mark.parametrize("name", [*RECIPES, "targets"])
def test_every_help_has_an_example_and_fits(name):
    result = CliRunner().invoke(cli.app, [name, "--help"])
    assert result.exit_code == 0
    assert f"  spectrain {name}" in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert not re.search(r"\{[a-z]", result.output)  # arguments are in capitals: {PATH}
    assert "--json FILE" in result.output


def test_one_word_has_one_meaning():
    """The same flag has the same help wherever it appears, apart from its default, from a head that
    is optional, from a family that only says what is kept, and from the type of a file."""
    others = {("family", "prepare"), ("dtype", "export")}
    meanings: dict[str, set] = {}
    for name in commands():
        for option in options_of(name).values():
            optional = option.name == "head" and name in ("generate", "chat", "check")
            if not optional and (option.name, name) not in others:
                text = option.help.split("  [default")[0]
                single = text.split("; repeat it")[0].rstrip(".")
                meanings.setdefault(option.opts[-1], set()).add(single)
    assert {flag: texts for flag, texts in meanings.items() if len(texts) > 1} == {}


@pytest.mark.parametrize("name", RECIPES)
def test_every_flag_is_a_setting_of_the_recipe(name):
    assert set(options_of(name)) - NOT_SETTINGS <= set(type(settings_of(name)).model_fields)


@pytest.mark.parametrize("name", RECIPES)
def test_shown_defaults_are_the_real_ones(name):
    """All of them: a flag with a default shows it, and giving what is shown changes nothing."""
    plain = settings_of(name)
    for key in set(options_of(name)) - NOT_SETTINGS - set(REQUIRED.get(name, ())):
        shown, real = shown_default(options_of(name)[key]), getattr(plain, key)
        if (name, key) in IN_WORDS:
            assert (real, shown) == IN_WORDS[name, key]
        elif real is None or real is False or real == ():
            assert shown is None, key
        else:
            assert shown is not None, key
            given = split([shown]) if isinstance(real, (list, tuple)) else shown
            assert getattr(settings_of(name, **{key: given}), key) == real, key


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name] == TRAIN])
def test_the_shown_choice_is_what_is_trained_without_the_flag(name, monkeypatch):
    asked = []
    monkeypatch.setattr(train, "run", lambda config: asked.append(config) or {})
    monkeypatch.setattr(train, "render", lambda report: "")
    own = [option for key, option in options_of(name).items() if key in CHOICES]
    assert len(own) == (name != "train-draft")
    for option in own:
        for arguments in ([], [option.opts[-1], shown_default(option)]):
            assert CliRunner().invoke(cli.app, [name, *arguments]).exit_code == 0
        assert asked[0] == asked[1]

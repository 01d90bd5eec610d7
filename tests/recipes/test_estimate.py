"""`spectrain estimate`: from a configuration alone, with the settings of a training."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from spectrain import cli
from spectrain.core.config import load_config
from spectrain.core.errors import SpectrainError
from spectrain.heads.registry import FAMILIES
from spectrain.recipes import estimate
from spectrain.recipes.estimate import EstimateConfig
from spectrain.recipes.estimate_report import clock
from spectrain.trainer.speeds import Speeds

# As Llama-3.1-8B's config.json has them.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def known_speeds(monkeypatch):
    """A machine of 1 TFLOP/s: nothing is measured."""
    monkeypatch.setattr(Speeds, "_product", lambda self, *sizes: 1e12)
    monkeypatch.setattr(Speeds, "_attention", lambda self, *sizes: 1e12)
    monkeypatch.setattr(Speeds, "_pass", lambda self: 1e10)
    monkeypatch.setattr(Speeds, "_scores", lambda self: 1e10)
    monkeypatch.setattr(Speeds, "_stream", lambda self: 1e10)


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


def total(report, name="trained"):
    return sum(row[name] for row in report["parameters"])


def test_a_configuration_is_enough(llama):
    """The EAGLE-3 head of an 8B target by hand: fc 3H², q/k/v over 2H, o, MLP, norms, lm_head."""
    report = estimate.run(EstimateConfig(target=llama, length=2048))
    hidden, wide, kv = 4096, 14336, 1024
    expected = 3 * hidden**2 + 2 * hidden * (hidden + 2 * kv) + hidden**2 + 3 * hidden * wide
    expected += 4 * hidden + 32000 * hidden
    assert total(report) == total(report, "parameters") == expected
    memory, disk = report["memory"], report["disk"]
    assert memory["gradients"] * 2 == memory["optimizer"] == 8 * expected
    assert memory["shared"] == 2 * 128256 * hidden * 4
    assert memory["host"]["loading"] == 8030261248 * 4
    assert disk["head"] == 4 * expected + 32000 * 8 + 128256
    assert disk["checkpoint"] == disk["head"] + 8 * expected


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_told(tiny_path, name):
    report = estimate.run(EstimateConfig(target=str(tiny_path), family=name))
    assert report["memory"]["fits"]
    assert total(report) > 0
    seconds = report["speed"]["by_part"]
    assert sum(seconds.values()) == pytest.approx(report["speed"]["step_seconds"])
    flops = report["flops"]
    assert sum(flops["by_part"].values()) == pytest.approx(flops["step"])
    assert flops["run"] == pytest.approx(flops["step"] * report["steps"])
    assert report["steps"] == 500  # 1000 conversations, 8 a step, 4 times
    assert "in all" in estimate.render(report)
    assert max(map(len, estimate.render(report).splitlines()[2:])) <= 80


def test_a_shipped_configuration_is_read(llama):
    """Its section of training, with the target's name replaced by a flag."""
    config = load_config(EstimateConfig, "train", "medusa2-8b", [], {"target": llama})
    report = estimate.run(config)
    parts = {row["part"]: row for row in report["parameters"]}
    assert parts["trunk"]["parameters"] > 8e9 > 1e9 > parts["trunk"]["trained"] > 0
    assert report["trunk"] == "lora"
    assert not report["memory"]["fits"] or report["memory"]["free"] > 30e9


def test_what_does_not_fit_comes_with_advice(llama, monkeypatch):
    """A smaller micro-batch where that is enough, and then it really is."""
    config = EstimateConfig(target=llama, length=4096, batch_size=16, micro_batch=16)
    need = estimate.run(config)["memory"]["peak"]
    monkeypatch.setattr(estimate, "free_memory", lambda device: int(0.9 * need))
    report = estimate.run(config)
    assert not report["memory"]["fits"]
    assert "does NOT fit" in estimate.render(report)
    size = int(report["advice"][0].partition("micro_batch=")[2].split()[0])
    assert estimate.run(config.model_copy(update={"micro_batch": size}))["memory"]["fits"]
    monkeypatch.setattr(estimate, "free_memory", lambda device: 1 << 30)
    assert "head.draft_vocab_size" in " ".join(estimate.run(config)["advice"])


def test_part_of_the_training_without_the_trunk_costs_less(tiny_path):
    """The heads learn alone in a share of the steps; the trunk is only read then."""
    found = []
    for first in (0.0, 0.5):
        trunk = {"mode": "full", "heads_first": first}
        config = EstimateConfig(target=str(tiny_path), family="medusa", trunk=trunk)
        found.append(estimate.run(config)["flops"]["by_part"]["trunk"])
    assert found[1] == pytest.approx(found[0] * (0.5 + 0.5 / 3))


def test_a_target_that_is_asked_costs_a_forward(tiny_path):
    plain = estimate.run(EstimateConfig(target=str(tiny_path)))
    asked = estimate.run(EstimateConfig(target=str(tiny_path), online=True))
    assert set(asked["flops"]["by_part"]) - set(plain["flops"]["by_part"]) == {"target"}
    assert asked["memory"]["shared"] > plain["memory"]["shared"]


def test_mistakes_are_told(tiny_path):
    for options, word in (({"nonsense": 1}, "nonsense"), ({"draft_vocab_size": 10**9}, "vocab")):
        with pytest.raises(SpectrainError, match=word):
            estimate.run(EstimateConfig(target=str(tiny_path), head=options))


def test_the_command_takes_what_a_training_takes(llama, tmp_path):
    file = tmp_path / "report.json"
    command = ["estimate", "--config", "eagle3-8b", "--target", llama, "--steps", "10"]
    command += ["--out", str(tmp_path / "run"), "--lr", "1e-4", "--batch-size", "4"]
    result = CliRunner().invoke(cli.app, [*command, "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert (report["steps"], report["batch_size"], report["micro_batch"]) == (10, 4, 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5 s"), (200, "3.3 min"), (9000, "2.5 h"), (864000, "10.0 days")]
)
def test_long_times_are_readable(seconds, text):
    assert clock(seconds) == text

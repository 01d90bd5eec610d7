"""The script that reads an engine's source: on a small engine that is written here.

Its class is made as the real ones are (a base from another file, a layer that differs at place 0,
branches on the config, a fused layer, a fallback that is unknown), so that every rule by which the
tables came about is seen to work, and to notice a change.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "engine_facts.py"
REGISTRY = '_MODELS = {"TinyEagle": ("tiny", "TinyHead")}\n'
BASE = """
from vllm.layers import Linear, QKV, RMSNorm

class Layer:
    def __init__(self, config, bias=False):
        self.size = getattr(config, "head_dim", None) or config.hidden_size // config.heads
        self.norm = RMSNorm(config.hidden_size, eps=config.eps)
        self.qkv_proj = QKV(config.hidden_size, self.size, config.heads, config.kv_heads, bias=bias)
        if config.deep:
            self.odd = Surprise(config.hidden_size)
"""
TINY = """
from vllm.model_executor.models.base import Layer
from torch import nn

class Layer(Layer):
    def __init__(self, config, first):
        super().__init__(config, bias=getattr(config, "biased", False))
        if first:
            del self.norm

class TinyHead:
    def __init__(self, *, vllm_config):
        config = vllm_config.draft.hf_config
        self.layers = nn.ModuleList([Layer(config, i == 0) for i in range(config.depth)])
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def load_weights(self, weights):
        stacked = [("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k")]
        stacked.append(("qkv_proj", "v_proj", "v"))
        for name, value in weights:
            if "t2d" in name:
                continue
            if "d2t" in name:
                name = name.replace("d2t", "map")
            elif "lm_head" not in name:
                name = "model." + name
"""
LAYERS = """
class QKVParallelLinear:
    def __init__(self, hidden_size, head_size, total_num_heads, total_num_kv_heads, bias=True): ...
QKV = QKVParallelLinear
class RMSNorm:
    def __init__(self, hidden_size, eps): ...
"""
HAND = {"optional": "^$", "unknown": "raises", "demands": [], "evidence": []}
HEAD = "(config.get('head_dim', None) or (hidden_size // heads))"


@pytest.fixture
def engine(tmp_path) -> Path:
    root = tmp_path / "engine"
    models = root / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    for name, text in {"registry": REGISTRY, "base": BASE, "tiny": TINY}.items():
        (models / f"{name}.py").write_text(text)
    (root / "vllm" / "layers.py").write_text(LAYERS)
    (root / "vllm-1.2.dist-info").mkdir()
    (root / "vllm-1.2.dist-info" / "METADATA").write_text("Name: vllm\n")
    return root


@pytest.fixture
def table(tmp_path) -> Path:
    evidence = [["vllm/model_executor/models/tiny.py", "load_weights", "'lm_head' not in name"]]
    content = {"engine": "vllm", "version": "", "derived": {}}
    content["by_hand"] = {"TinyEagle": {**HAND, "evidence": evidence}}
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps(content))
    return path


def run(source: Path, table: Path, *more: str) -> tuple[int, str]:
    command = [sys.executable, SCRIPT, source, "--table", table, *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_what_is_derived(engine, table):
    assert run(engine, table, "--write")[0] == 0
    found = json.loads(table.read_text())
    assert found["version"] == "1.2"
    facts = found["derived"]["TinyEagle"]
    further, biased = "layers.{1..depth}.", "config.get('biased', False)"
    kv = [f"(kv_heads * {HEAD})", "hidden_size"]
    expected = [["fc.weight", ["hidden_size", "(2 * hidden_size)"], ""]]
    for prefix in ("layers.0.", further):
        sizes = {"q": [f"(heads * {HEAD})", "hidden_size"], "k": kv, "v": kv}
        for one, shape in sizes.items():
            expected.append([f"{prefix}{one}_proj.weight", shape, ""])
            expected.append([f"{prefix}{one}_proj.bias", shape[:1], biased])
        expected.append([f"{prefix}odd.*", None, "deep"])
    expected.append([f"{further}norm.weight", ["hidden_size"], ""])
    assert sorted(facts["parameters"]) == sorted(expected)
    assert facts["steps"] == [["^(?!.*(?:d2t|lm_head))", "model."], ["d2t", "map"]]
    assert facts["skipped"] == ["t2d"]
    assert facts["required"] == ["deep", "depth", "eps", "heads", "hidden_size", "kv_heads"]
    assert facts["defaults"] == {"biased": "False", "head_dim": "None"}


def test_a_change_is_told_and_the_table_kept(engine, table):
    run(engine, table, "--write")
    assert run(engine, table)[0] == 0
    before = table.read_text()
    path = engine / "vllm" / "model_executor" / "models" / "tiny.py"
    path.write_text(
        TINY.replace("2 * config", "3 * config").replace('"lm_head" not in', '"x" not in')
    )
    code, told = run(engine, table)
    assert code == 1
    assert "parameter fc.weight" in told
    assert "'lm_head' not in name\" does not occur in load_weights" in told
    assert "2 changes, 1 without evidence" in told  # the width, and the step's pattern
    assert table.read_text() == before


def test_a_row_that_nothing_is_known_of_counts(engine, table):
    run(engine, table, "--write")
    path = engine / "vllm" / "model_executor" / "models" / "base.py"
    path.write_text(BASE.replace("self.odd", "self.even"))
    assert "4 changes" in run(engine, table)[1]  # one gone and one new, at two places


def test_the_wheel_says_what_its_folder_says(engine, table, tmp_path):
    run(engine, table, "--write")
    wheel = tmp_path / "vllm-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in engine.rglob("*"):
            if path.is_file():
                archive.write(path, path.relative_to(engine))
    assert run(wheel, table)[0] == 0

"""The wheel puts `spectrain/…` into site-packages and nothing else, with its data files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"]
LEFT_OUT = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "wandb", "tests"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built offline from a copy, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    done = subprocess.run(
        [sys.executable, "-c", build],
        cwd=folder / "source",
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(folder / done.stdout.splitlines()[-1])


def test_only_the_package_is_installed(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"spectrain"}
    assert not [name for name in wheel.namelist() if "/tests/" in name or "/scripts/" in name]


def test_every_module_and_data_file_is_in_it(wheel):
    names = set(wheel.namelist())
    for path in [*ROOT.glob("*.py"), *(p for room in ROOMS for p in room.glob("*.py"))]:
        assert f"spectrain/{path.relative_to(ROOT)}" in names
    assert "spectrain/data/prompts.jsonl" in names
    for path in (ROOT / "recipes" / "configs").glob("*.yaml"):
        assert f"spectrain/recipes/configs/{path.name}" in names
    for path in (ROOT / "export" / "facts").glob("*.json"):
        assert f"spectrain/export/facts/{path.name}" in names


def test_every_dependency_is_used():
    """One that nothing imports costs every user its download. accelerate starts wandb, transformers
    reads GGUF files with gguf."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {re.split("[<>=]", line)[0] for line in project["dependencies"]} - {"wandb", "gguf"}
    sources = [*ROOT.glob("*.py"), *(p for room in ROOMS for p in room.glob("*.py"))]
    found = {
        name.split(".")[0]
        for source in sources
        for name in re.findall(r"^\s*(?:from|import) ([\w.]+)", source.read_text(), re.M)
    }
    assert {"yaml" if name == "pyyaml" else name for name in asked} <= found


def test_console_script(wheel):
    entry = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "spectrain = spectrain.cli:main" in wheel.read(entry).decode()

"""Imports run one way, from cli down to core (the layers are drawn in docs/ARCHITECTURE.md), and
no checkpoint's code is run.

Read from the source with `ast`, so that what stands inside a function counts as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RANK = {
    "core": 0,
    "heads": 1,
    "data": 1,
    "generator": 2,
    "trainer": 3,
    "evaluation": 3,
    "export": 3,
    "recipes": 4,
    "commands": 5,
    "cli": 6,
    "__main__": 7,
}
SOURCES = sorted(
    path
    for path in [*ROOT.glob("*.py"), *(p for room in RANK for p in (ROOT / room).rglob("*.py"))]
    if path.name != "__init__.py" or path.parent != ROOT
)


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer; write spectrain.…"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_is_told_whether_code_may_run(path):
    """Where `trust_remote_code` is left out, transformers asks, and runs it after a yes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        made = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if made and node.func.attr in ("from_pretrained", "from_config"):
            name = ast.unparse(node.func.value)
            told = any(keyword.arg == "trust_remote_code" for keyword in node.keywords)
            assert told or not name.startswith("Auto"), f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    room = room_of(path)
    for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        top, *rest = name.split(".")
        assert top not in RANK, f"{path.name} imports {name}: write spectrain.{name}"
        assert top not in ("scripts", "tests"), f"{path.name} imports {name}"
        if top != "spectrain" or not rest or rest[0] not in {*RANK, "scripts", "tests"}:
            continue
        assert rest[0] not in ("scripts", "tests"), f"nothing imports {rest[0]}: {path.name}"
        lower = RANK[rest[0]] < RANK[room]
        assert lower or rest[0] == room, f"{room}/{path.name} imports upward: {name}"


@pytest.mark.parametrize("name", ["cli.py", "core/errors.py", "core/config.py", "core/progress.py"])
def test_no_torch_at_the_top(name):
    """`spectrain --help` and a bad flag answer at once only while these stay light."""
    pending, seen = [name], set()
    while pending:
        current = pending.pop()
        seen.add(current)
        tree = ast.parse((ROOT / current).read_text(encoding="utf-8"))
        top_level = ast.Module(
            [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))], []
        )
        for found in imported(top_level):
            heavy = found.split(".")[0]
            assert heavy not in ("torch", "transformers", "accelerate", "datasets"), current
            parts = found.split(".")
            if parts[0] == "spectrain":  # follow our own modules: their top level runs too
                for size in range(len(parts), 1, -1):
                    below = "/".join(parts[1:size]) + ".py"
                    if below not in seen and (ROOT / below).is_file():
                        pending.append(below)


def test_every_room_is_packaged():
    """A room that pyproject.toml does not list would be missing from the wheel."""
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = {
        "spectrain." + str(path.parent.relative_to(ROOT)).replace("/", ".")
        for path in ROOT.glob("*/**/__init__.py")
        if room_of(path) in RANK
    }
    assert rooms | {"spectrain"} == set(listed)

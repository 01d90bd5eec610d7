"""The tables of what an engine's loader expects (export/facts/ENGINE.json), made from its source.

    python scripts/engine_facts.py WHEEL_OR_FOLDER [--engine vllm|sglang] [--write]

WHEEL_OR_FOLDER: the engine's wheel (`pip download --no-deps vllm`), or the folder that it was
unpacked into. Nothing of the engine is imported. Tells what differs from the stored table, and
whether what was written into it by hand (`by_hand`, which is kept) has lost its evidence in the
source; exit status 1 if so. --write stores what was found.

by_hand, for each architecture that an exported config.json names:
    registered   the engine's name for what it makes of it, where that is another one
    nested       a key that holds the config of the model, and the keys beside it that join it
    known        keys of the config that the engine sets itself, with their values
    opaque       classes that are not looked into
    steps        renamings [pattern, replacement] of a loader that cannot be read, in order;
                 {key} in a pattern stands for the value of a key of the config
    foreign      names that the loader passes over since they are the target's (a pattern)
    skipped      further names that are passed over
    also         rows that the loader reads beside parameters · optional: parameters (a pattern)
                 that need not be in the file · replaced: parameters that the engine overwrites
                 with the target's, and when
    demands      what has to hold of the config · unknown: what becomes of other names
    elsewhere    keys of the config that the engine reads outside the model
    evidence     [file, class or function in it, text that occurs there]
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_run import Run
from engine_source import Class, Config, Source, rows

FACTS = Path(__file__).resolve().parent.parent / "export" / "facts"
MODELS = {"vllm": "vllm/model_executor/models", "sglang": "sglang/srt/models"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="wheel, or folder it was unpacked into")
    parser.add_argument("--engine", choices=MODELS, help="default: the one that is there")
    parser.add_argument("--table", type=Path, help="another table than export/facts/ENGINE.json")
    parser.add_argument("--write", action="store_true", help="store what was found")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = options.source
        if root.suffix == ".whl":
            unpack(root, Path(temporary))
            root = Path(temporary)
        there = [name for name in MODELS if (root / name).is_dir()]
        engine = options.engine or (there[0] if there else "")
        if engine not in there:
            parser.error(f"neither of {', '.join(MODELS)} is in {options.source}")
        if not any(root.glob(f"{engine}-*.dist-info")):
            parser.error(f"{options.source} is not a whole wheel: it has no {engine}-….dist-info")
        path = options.table or FACTS / f"{engine}.json"
        stored = json.loads(path.read_text(encoding="utf-8"))
        found = stored | {"version": version(root, engine)}
        found["derived"] = {
            name: derived(root, engine, name, hand) for name, hand in stored["by_hand"].items()
        }
        stale = list(lost_evidence(root, stored["by_hand"]))
    changes = list(differences(stored, found))
    for line in [*changes, *stale]:
        print(line)
    print(f"{engine} {found['version']}: {len(changes)} changes, {len(stale)} without evidence")
    if options.write:
        path.write_text(written(found) + "\n", encoding="utf-8")
    return int(bool(stale or (changes and not options.write)))


def unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith((".py", "METADATA")) and ".." not in n]
        archive.extractall(folder, names)


def version(root: Path, engine: str) -> str:
    folders = sorted(root.glob(f"{engine}-*.dist-info"))
    return folders[-1].name.removesuffix(".dist-info").split("-")[1]


# ── what is read from the source ─────────────────────────────────────────────


def derived(root: Path, engine: str, architecture: str, hand: dict[str, Any]) -> dict[str, Any]:
    source = Source(root, engine, MODELS[engine], hand.get("opaque", []))
    name = hand.get("registered", architecture)
    if (kind := registered(source, name)) is None:
        return {"class": None}
    config = Config(hand.get("known", {}))
    made = list(rows(Run(source, config).make(kind, [], {})))
    loader = Loader([source.tree(file) for file in sorted(source.visited)], source.tree(kind.file))
    return {
        "class": f"{kind.file.relative_to(root)}:{kind.node.name}",
        "parameters": [
            [loader.unfused(name), shape, " and ".join(dict.fromkeys(when))]
            for name, shape, when in made
        ],
        "steps": loader.steps(),
        "fallback": loader.fallback,
        "skipped": sorted(loader.skipped),
        "required": sorted(config.required - config.defaults.keys() - config.known.keys()),
        "defaults": dict(sorted(config.defaults.items())),
    }


def registered(source: Source, name: str) -> Class | None:
    """The class that the engine's registry has for an architecture."""
    registry = source.models / "registry.py"
    for node in ast.walk(source.tree(registry)):  # vLLM: "Architecture": ("file", "Class")
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name:
                    file, kind = ast.literal_eval(value)
                    return source.find(source.models / f"{file}.py", kind)
    for file in sorted(source.models.glob("*.py")):  # SGLang: EntryClass = [Class, …] in a file
        for node in source.tree(file).body if name in file.read_text(encoding="utf-8") else []:
            entry = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass"
            if entry and re.search(rf"\b{name}\b", ast.unparse(node.value)):
                return source.find(file, name)
    return None


class Loader:
    """Renamings in `load_weights` and the mappings of a model's own file; the pieces of fused
    layers in all files that were looked into."""

    def __init__(self, files: list[ast.Module], own: ast.Module) -> None:
        self.pieces: dict[tuple[str, str], str] = {}
        self.prefixes: list[tuple[str, list[str]]] = []
        self.replaced: dict[str, str] = {}
        self.skipped: set[str] = set()
        self.fallback = ""
        for node in (node for file in files for node in ast.walk(file)):
            self._piece(node)
        for node in ast.walk(own):
            if isinstance(node, ast.FunctionDef) and node.name == "load_weights":
                self._body(node.body, [])
            if isinstance(node, ast.keyword) and node.arg == "orig_to_new_substr":
                self._pairs(node.value)

    def _piece(self, node: ast.AST) -> None:
        """("fused", "piece", place), or "piece": ("fused", place)."""
        if isinstance(node, ast.Tuple) and len(node.elts) == 3:
            values = [getattr(one, "value", None) for one in node.elts]
            if isinstance(values[0], str) and isinstance(values[1], str):
                self.pieces[values[0].strip("."), str(values[2])] = values[1].strip(".")
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    fused = [getattr(one, "value", None) for one in value.elts]
                    if len(fused) == 2 and isinstance(fused[0], str):
                        self.pieces[fused[0].strip("."), str(fused[1])] = key.value.strip(".")

    def _pairs(self, node: ast.expr) -> None:
        for key, value in zip(getattr(node, "keys", []), getattr(node, "values", []), strict=True):
            both = getattr(key, "value", None), getattr(value, "value", None)
            if all(isinstance(one, str) for one in both):
                self.replaced[both[0]] = both[1]

    def _body(self, body: list[ast.stmt], unless: list[str]) -> None:
        """Statements that are reached by names without any of `unless`."""
        for node in body:
            if isinstance(node, ast.If):
                text, negated = contained(node.test)
                if text and not negated and isinstance(node.body[-1], ast.Continue):
                    self.skipped |= {text} if len(node.body) == 1 else set()
                self._body(node.body, [*unless, text] if negated else unless)
                self._body(node.orelse, [*unless, text] if text and not negated else unless)
                continue
            if isinstance(node, (ast.For, ast.FunctionDef, ast.With)):
                self._body([*node.body, *getattr(node, "orelse", [])], unless)
                continue
            for one in ast.walk(node):
                if isinstance(one, ast.BinOp) and ast.unparse(one.right) == "name":
                    self.prefixes.append((one.left.value, unless))
                elif isinstance(one, ast.JoinedStr) and ast.unparse(one).endswith("{name}'"):
                    self.fallback = one.values[0].value
                elif isinstance(one, ast.Call) and ast.unparse(one.func) == "name.replace":
                    self._pairs(ast.Dict(one.args[:1], one.args[1:2]))
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                self._pairs(node.value)

    def steps(self) -> list[list[str]]:
        """[pattern, replacement] in the order in which they hold: a prefix is decided upon by the
        name as it comes."""
        steps = []
        for prefix, unless in self.prefixes:
            others = "|".join(re.escape(one) for one in dict.fromkeys(unless))
            steps.append([f"^(?!.*(?:{others}))" if others else "^", prefix])
        return steps + [[re.escape(old), new] for old, new in self.replaced.items()]

    def unfused(self, name: str) -> str:
        """x.fused.<q>.weight → x.q_proj.weight"""
        return re.sub(r"([^.]+)\.<(\w+)>", lambda m: self.pieces.get((m[1], m[2]), m[0]), name)


def contained(test: ast.expr) -> tuple[str, bool]:
    """The text that a test looks for in a name, and whether it must not be there."""
    if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Constant):
        return "", False
    named = ast.unparse(test.comparators[0]) == "name"
    return (test.left.value, isinstance(test.ops[0], ast.NotIn)) if named else ("", False)


# ── what is compared, and how it is written ──────────────────────────────────


def lost_evidence(root: Path, by_hand: dict[str, Any]) -> Iterator[str]:
    for architecture, hand in by_hand.items():
        for file, place, text in hand["evidence"]:
            source = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
            nodes = [
                node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") == place
            ]
            if not any(text in ast.unparse(node) for node in nodes):
                yield f"{architecture}: {text!r} does not occur in {place} of {file}"


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    if old["version"] != new["version"]:
        yield f"version {old['version']} → {new['version']}"
    for architecture, facts in new["derived"].items():
        before = flat(old["derived"].get(architecture, {}))
        after = flat(facts)
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                yield f"{architecture}: {key}: {before.get(key)} → {after.get(key)}"


def flat(facts: dict[str, Any]) -> dict[str, Any]:
    rows_ = facts.get("parameters", [])
    parameters = {f"parameter {n}" + f" if {w}" * bool(w): s or "anything" for n, s, w in rows_}
    return parameters | {key: one for key, one in facts.items() if key != "parameters"}


def written(value: Any, indent: str = "") -> str:
    """JSON with a line for each thing that fits into one, and for each row of parameters."""
    flat = json.dumps(value, ensure_ascii=False)
    row = isinstance(value, list) and not any(isinstance(one, (list, dict)) for one in value[2:])
    if not isinstance(value, (list, dict)) or row or len(indent) + len(flat) < 100:
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {written(one, inner)}" for key, one in value.items()]
    else:
        parts = [written(one, inner) for one in value]
    marks = "{}" if isinstance(value, dict) else "[]"
    return f"{marks[0]}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{marks[1]}"


if __name__ == "__main__":
    sys.exit(main())

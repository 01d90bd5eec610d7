"""What parameters an engine's model class makes, read from its source alone (nothing is imported).

`Source` finds classes, bases and methods; engine_run.py runs an `__init__` on the values below:
what comes of the config is a `Formula` in its keys, what cannot be known is `Unknown`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Layers by the names of their constructors' arguments: shape of the weight.
_OUT_IN = ("output_size", "input_size")
LAYERS = {
    "Linear": ("out_features", "in_features"),
    "ReplicatedLinear": _OUT_IN,
    "ColumnParallelLinear": _OUT_IN,
    "RowParallelLinear": _OUT_IN,
    "VocabParallelEmbedding": ("num_embeddings", "embedding_dim"),
    "RMSNorm": ("hidden_size",),
    "GemmaRMSNorm": ("hidden_size",),
}
FUSED = ("QKVParallelLinear", "MergedColumnParallelLinear")
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Eq: "=="}
SIGNS |= {ast.NotEq: "!=", ast.Gt: ">", ast.Lt: "<", ast.Is: "is", ast.IsNot: "is not"}
SIGNS |= {ast.In: "in", ast.NotIn: "not in"}
_FUNCTIONS: dict[str, Any] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_FUNCTIONS |= {"//": operator.floordiv, "==": operator.eq, "!=": operator.ne, ">": operator.gt}
_FUNCTIONS |= {"<": operator.lt, "is": operator.is_, "is not": operator.is_not}
_FUNCTIONS |= {"in": lambda a, b: a in b, "not in": lambda a, b: a not in b}


@dataclass(frozen=True)
class Formula:
    """An expression in keys of the config, as Python."""

    text: str


@dataclass(frozen=True)
class Unknown:
    name: str = ""


# Some place of a list, other than the first.
PLACE = Unknown("place")


@dataclass(frozen=True)
class Class:
    file: Path
    node: ast.ClassDef


@dataclass(frozen=True)
class Choice:
    condition: str
    then: Any
    otherwise: Any


@dataclass(eq=False)
class Module:
    """An instance; rows: (name, shape or None, condition or "") of a layer's own parameters."""

    kind: Class | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, list[str | None] | None, str]] = field(default_factory=list)


class Config:
    """The model's config; what is read of it is written down."""

    def __init__(self, known: dict[str, Any]) -> None:
        """known: keys with the values that the engine gives them, whatever the file says."""
        self.known = known
        self.defaults: dict[str, str | None] = {}
        self.required: set[str] = set()

    def read(self, key: str, always: bool) -> Any:
        if always:
            self.required.add(key)
        return self.known.get(key, Formula(key))

    def get(self, key: str, default: Any) -> Any:
        self.defaults[key] = text(default)
        return self.known.get(key, Formula(f"config.get({key!r}, {text(default)})"))


def text(value: Any) -> str | None:
    """The value as it stands in a formula, None for what cannot stand there."""
    if isinstance(value, Formula):
        return value.text
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else None


def joined(sign: str, left: Any, right: Any) -> Any:
    if isinstance(left, Module) or isinstance(right, Module) or PLACE in (left, right):
        equal = {"is": False, "==": False, "is not": True, "!=": True}
        return equal.get(sign, Unknown())
    if isinstance(left, list) and sign == "*":
        return left * right
    if text(left) is None or text(right) is None:
        return Unknown()
    if (sign, left) == ("+", 0) or (sign, right) == ("//", 1):
        return right if left == 0 else left
    if isinstance(left, Formula) or isinstance(right, Formula):
        return Formula(f"({text(left)} {sign} {text(right)})")
    return _FUNCTIONS[sign](left, right)


def chosen(condition: Any, then: Any, otherwise: Any) -> Any:
    if not isinstance(condition, Formula):
        return otherwise if condition in (False, None, 0, "") else then
    if text(then) is not None and text(otherwise) is not None:
        same = text(then) == text(otherwise)
        return (
            then if same else Formula(f"({text(then)} if {condition.text} else {text(otherwise)})")
        )
    return then if then is otherwise else Choice(condition.text, then, otherwise)


def pieces_of(kind: str, given: dict) -> list[tuple[str, list[str | None]]]:
    """(prefix, shape) of a layer's weights; given: the arguments of its constructor."""
    if kind == "QKVParallelLinear":
        kv_heads = given.get("total_num_kv_heads") or given["total_num_heads"]
        heads = {"q": given["total_num_heads"], "k": kv_heads, "v": kv_heads}
        width = given["hidden_size"]
        sizes = {name: joined("*", one, given["head_size"]) for name, one in heads.items()}
        return [(f"<{name}>.", [text(one), text(width)]) for name, one in sizes.items()]
    if kind == "MergedColumnParallelLinear":
        sizes, width = given["output_sizes"], text(given["input_size"])
        return [(f"<{place}>.", [text(one), width]) for place, one in enumerate(sizes)]
    return [("", [text(given.get(name)) for name in LAYERS[kind]])]


def rows(value: Any, prefix: str = "", when: tuple[str, ...] = ()) -> Iterator[tuple]:
    """(name, shape or None, conditions) of every parameter in a value."""
    if isinstance(value, Choice):
        yield from rows(value.then, prefix, (*when, value.condition))
        yield from rows(value.otherwise, prefix, (*when, f"not {value.condition}"))
    elif isinstance(value, Module):
        for name, shape, condition in value.rows:
            own = (condition,) if condition else ()
            yield ".".join(filter(None, (prefix, name))), shape, when + own
        for name, one in value.attributes.items():
            yield from rows(one, f"{prefix}.{name}".lstrip("."), when)


class Source:
    """An engine's folder. models: the folder of the classes that are looked into, less `opaque`."""

    def __init__(self, root: Path, package: str, models: str, opaque: list[str]) -> None:
        self.root, self.package, self.models = root, package, root / models
        self.opaque = opaque
        self.trees: dict[Path, ast.Module] = {}
        self.visited: set[Path] = set()

    def tree(self, file: Path) -> ast.Module:
        if file not in self.trees:
            self.trees[file] = ast.parse(file.read_text(encoding="utf-8"))
        return self.trees[file]

    def find(self, file: Path, name: str, besides: ast.ClassDef | None = None) -> Class | None:
        """The class that `name` means in a file; `besides`: one that hides its base's name."""
        nodes: list[ast.stmt] = []
        for node in self.tree(file).body:
            checked = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            nodes += node.orelse if checked else [node]
        for node in reversed(nodes):
            if isinstance(node, ast.ClassDef) and node.name == name and node is not besides:
                return Class(file, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    place = name == (alias.asname or alias.name) and self._place(file, node)
                    if place:
                        return self.find(place, alias.name)
            same = isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
            if same and name in map(ast.unparse, node.targets):
                return self.find(file, node.value.id)
        return None

    def _place(self, file: Path, node: ast.ImportFrom) -> Path | None:
        parts = (node.module or "").split(".")
        if not node.level and parts[0] != self.package:
            return None
        place = (file.parents[node.level - 1] if node.level else self.root).joinpath(*parts)
        options = (place.with_suffix(".py"), place / "__init__.py")
        return next((path for path in options if path.is_file()), None)

    def bases(self, kind: Class) -> list[Class]:
        names = [ast.unparse(base) for base in kind.node.bases]
        return [b for name in names if (b := self.find(kind.file, name, kind.node))]

    def method(self, kind: Class, name: str) -> tuple[Class, ast.FunctionDef] | None:
        for node in kind.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return kind, node
        return next((m for base in self.bases(kind) if (m := self.method(base, name))), None)

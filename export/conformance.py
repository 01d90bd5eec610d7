"""Hold an export against what an engine's loader expects, without the engine.

`facts/ENGINE.json` has what scripts/engine_facts.py read in the engine's source: for each
architecture the parameters with their shapes as formulas in keys of the config, how names of a
checkpoint become names of parameters, which keys of the config are read, and what those are taken
for that it lacks: keys make another head of the same tensors. A name may stand for
several places, "layers.{1..num_hidden_layers}.", and "name.*" is a module that was not looked into:
anything may be in it, and something has to.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from spectrain.export import layer_keys
from spectrain.export.layout import Encoded

# Keys that make another head of an EAGLE head, with the only value that leaves it as it is.
PLAIN = layer_keys.FLAGS | {"layer_types": None, "sliding_window": None}
FOLDER = Path(__file__).parent / "facts"
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}


class _Missing(Exception):
    """A key that the config lacks."""


@cache
def table(engine: str) -> dict[str, Any]:
    """What is known of an engine: version, by_hand, derived."""
    return json.loads((FOLDER / f"{engine}.json").read_text(encoding="utf-8"))


def problems(encoded: Encoded, facts: tuple[str, str]) -> list[str]:
    """Why an engine would not load an export as it is meant; empty when nothing speaks against it.

    facts: the engine, and the architecture as the config names it or as the engine registers it.
    """
    engine, architecture = facts
    known = table(engine)
    for name, hand in known["by_hand"].items():
        if architecture in (name, hand.get("registered")) and known["derived"][name]["class"]:
            break
    else:
        return [f"{engine} has no architecture {architecture}"]
    if name not in (encoded.config.get("architectures") or []):
        return [f"config.json does not name the architecture {name}"]
    config = dict(encoded.config)
    if "nested" in hand:
        inner, beside = hand["nested"]
        config = config.get(inner, {}) | {key: config[key] for key in beside if key in config}
    derived = known["derived"][name]
    if missing := [key for key in derived["required"] if key not in config]:
        return [f"config.json lacks {key}" for key in missing]
    try:
        others = list(_others(encoded, config, derived["defaults"])) if "Eagle" in name else []
        return others + list(_problems(encoded, config | hand.get("known", {}), derived, hand))
    except _Missing as error:
        return [f"config.json lacks {error}"]


def _others(encoded: Encoded, config: dict[str, Any], defaults: dict[str, str]) -> Iterator[str]:
    """What makes another head of it than the one that was trained."""
    for name, ours in PLAIN.items():
        said = [one[name] for one in (encoded.config, config) if name in one]  # where nested: two
        values = said or [evaluate(defaults.get(name, "None"), config)]
        if wrong := [value for value in values if value is not None and value != ours]:
            yield f"{name} is {wrong[0]!r}, which makes another head of it"
    for name in ("d2t", "t2d"):
        if name in encoded.tensors and encoded.tensors[name].is_floating_point():
            yield f"{name} holds fractions, where the engine takes whole numbers"


def _problems(
    encoded: Encoded, config: dict[str, Any], derived: dict[str, Any], hand: dict[str, Any]
) -> Iterator[str]:
    for demand in hand["demands"]:
        if not evaluate(demand, config):
            yield f"the engine asks for {demand}"
    rows = [*derived["parameters"], *hand.get("also", [])]
    parameters = dict(_expected(rows, config))
    modules = [name[:-1] for name in parameters if name.endswith(".*")]
    skipped = [*derived["skipped"], *hand.get("skipped", [])]
    steps = [
        (re.compile(_filled(pattern, config)), replacement)
        for pattern, replacement in hand.get("steps", derived["steps"])
    ]
    loaded = set()
    for name, tensor in encoded.tensors.items():
        if any(part in name for part in skipped):
            continue
        found = name
        for pattern, replacement in steps:
            found = pattern.sub(replacement, found)
        if found not in parameters and derived["fallback"] + found in parameters:
            found = derived["fallback"] + found
        if found in parameters:
            loaded.add(found)
            shape = parameters[found]
            if shape is not None and tuple(tensor.shape) != shape:
                yield f"{name} has shape {tuple(tensor.shape)}, the engine expects {shape}"
            if evaluate(hand.get("replaced", {}).get(found, "False"), config):
                yield f"{name} is replaced by the target's"
        elif within := [one for one in modules if found.startswith(one)]:
            loaded |= {f"{one}*" for one in within}
        elif not _matches(hand.get("foreign"), name, config):
            fate = "refuses it" if hand["unknown"] == "raises" else "skips it without a word"
            yield f"{name} is no parameter ({found}): the engine {fate}"
    for name in sorted(parameters.keys() - loaded):
        if not re.search(hand["optional"], name):
            yield f"nothing is loaded into {name}"


def _expected(
    rows: list[list[Any]], config: dict[str, Any]
) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """Parameters that there are with this config, with their shapes, None where it is not known."""
    for name, shape, condition in rows:
        if condition and not evaluate(condition, config):
            continue
        for one in _places(name, config):
            yield one, shape and tuple(evaluate(size, config) for size in shape)


def _places(name: str, config: dict[str, Any]) -> Iterator[str]:
    """All names that a.{1..n}.b stands for: a.1.b and so on, without a.n.b."""
    if (found := re.search(r"\{(.+?)\.\.(.+)\}", name)) is None:
        yield name
        return
    for place in range(*(evaluate(bound, config) for bound in found.groups())):
        yield from _places(name[: found.start()] + str(place) + name[found.end() :], config)


def _matches(pattern: str | None, name: str, config: dict[str, Any]) -> bool:
    return pattern is not None and re.search(_filled(pattern, config), name) is not None


def _filled(pattern: str, config: dict[str, Any]) -> str:
    """{key} → the value of that key."""
    return re.sub(r"\{([a-z_]+)\}", lambda found: str(evaluate(found[1], config)), pattern)


def evaluate(formula: str, config: dict[str, Any]) -> Any:
    """A formula of a table: arithmetic, comparisons and `config.get(…)`, and nothing else."""
    return _value(ast.parse(formula, mode="eval").body, config)


def _value(node: ast.expr, config: dict[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name(id="config"):
            return config
        case ast.Name():
            if node.id not in config:
                raise _Missing(node.id)
            return config[node.id]
        case ast.BinOp():
            return _BINARY[type(node.op)](_value(node.left, config), _value(node.right, config))
        case ast.Compare():
            sides = _value(node.left, config), _value(node.comparators[0], config)
            return _BINARY[type(node.ops[0])](*sides)
        case ast.BoolOp():
            for one in node.values[:-1]:
                if bool(value := _value(one, config)) == isinstance(node.op, ast.Or):
                    return value
            return _value(node.values[-1], config)
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, config)
        case ast.IfExp():
            return _value(node.body if _value(node.test, config) else node.orelse, config)
        case ast.Dict(keys=[]):
            return {}
        case ast.Subscript():
            return _value(node.value, config)[_value(node.slice, config)]
        case ast.Call(func=ast.Attribute(attr="get")):
            owner, key = _value(node.func.value, config), _value(node.args[0], config)
            if key in owner or len(node.args) == 1:
                return owner.get(key)
            return _value(node.args[1], config)
        case ast.Call(func=ast.Name(id="len")):
            return len(_value(node.args[0], config))
    raise ValueError(f"not a formula: {ast.unparse(node)}")

"""Run the `__init__` of an engine's model class on symbols: which parameters come of it.

Both ways of a branch on a formula are taken, each with its condition; of a branch on something
unknown the first. A layer that is not known here becomes one row "name.*" without a shape, so that
nothing is left out in silence.
"""

from __future__ import annotations

import ast
from typing import Any

from engine_source import (
    FUSED,
    LAYERS,
    PLACE,
    SIGNS,
    Class,
    Config,
    Formula,
    Module,
    Source,
    Unknown,
    chosen,
    joined,
    pieces_of,
    text,
)

_TORCH = {"Linear": ["in_features", "out_features", "bias"]}
_EMPTY = {"Attention", "EncoderOnlyAttention", "RadixAttention", "LogitsProcessor", "Module"}
_EMPTY |= {"Identity", "SiluAndMul", "get_rope", "DualGemm", "DenseSiluAndMulQuant", "Stream"}
# Functions that hand on what they are given, and the size of a group of one process.
_SAME = ("bool", "str", "int", "copy.deepcopy")
_ONE = "get_tensor_model_parallel_world_size"


class Run:
    """conditions: those of the branches that are being run."""

    def __init__(self, source: Source, config: Config) -> None:
        self.source, self.config = source, config
        self.conditions: list[str] = []

    # ── making modules ───────────────────────────────────────────────────────

    def make(self, kind: Class, args: list, kwargs: dict) -> Module:
        made = Module(kind)
        if found := self.source.method(kind, "__init__"):
            self.call(*found, made, args, kwargs)
        return made

    def call(
        self, owner: Class, function: ast.FunctionDef, made: Module, args: list, kwargs: dict
    ) -> None:
        self.source.visited.add(owner.file)
        known = function.args
        plain = [one.arg for one in known.args]
        scope: dict[str, Any] = {"": owner}
        for name, node in zip(
            plain[len(plain) - len(known.defaults) :], known.defaults, strict=True
        ):
            scope[name] = self.value(node, scope)
        for one, node in zip(known.kwonlyargs, known.kw_defaults, strict=True):
            scope[one.arg] = self.value(node, scope) if node else Unknown()
        scope |= dict(zip(plain, [made, *args], strict=False)) | kwargs
        for name in plain:  # what nobody hands to the class that we begin with
            scope.setdefault(name, self.config if name == "config" else Unknown())
        self.block(function.body, scope)

    def layer(self, name: str, args: list, kwargs: dict, scope: dict) -> Module:
        """Rows of a layer that is known; shapes in formulas, one row for each piece of a fused
        one, "<piece>.weight"."""
        if name in _EMPTY:
            return Module()
        found = self.source.find(scope[""].file, name)
        while found and found.node.name not in {*LAYERS, *FUSED}:  # another name, or a subclass
            found = next(iter(self.source.bases(found)), None)
        if found:
            known = self.source.method(found, "__init__")[1].args
            names = [one.arg for one in [*known.args[1:], *known.kwonlyargs]]
        elif (names := _TORCH.get(name)) is None:
            return Module(rows=[("*", None, "")])
        kind = found.node.name if found else name
        given = dict(zip(names, args, strict=False)) | kwargs
        pieces = pieces_of(kind, given)
        bias = given.get("bias", True) if "Linear" in kind else False
        made = Module(rows=[(f"{piece}weight", shape, "") for piece, shape in pieces])
        if bias is True or isinstance(bias, Formula):
            when = bias.text if isinstance(bias, Formula) else ""
            made.rows += [(f"{piece}bias", shape[:1], when) for piece, shape in pieces]
        return made

    # ── statements ───────────────────────────────────────────────────────────

    def block(self, body: list[ast.stmt], scope: dict) -> None:
        for node in body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self.assign(target, self.value(node.value, scope), scope)
            elif isinstance(node, ast.Expr):
                self.value(node.value, scope)
            elif isinstance(node, ast.With):
                self.block(node.body, scope)
            elif isinstance(node, ast.Delete):
                for target in node.targets:
                    self.value(target.value, scope).attributes.pop(target.attr, None)
            elif isinstance(node, ast.If):
                self.branch(node, scope)

    def assign(self, target: ast.expr, value: Any, scope: dict) -> None:
        if isinstance(target, ast.Tuple):
            for one in target.elts:
                self.assign(one, value if isinstance(value, Module) else Unknown(), scope)
        elif isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value, scope)
            if isinstance(owner, Module):
                owner.attributes[target.attr] = value

    def branch(self, node: ast.If, scope: dict) -> None:
        test = self.value(node.test, scope)
        if not isinstance(test, Formula):
            self.conditions += ["?"] * isinstance(test, Unknown)
            self.block(node.body if test else node.orelse, scope)
            self.conditions = self.conditions[:-1] if isinstance(test, Unknown) else self.conditions
            return
        self.conditions.append(test.text)
        places = [scope, *(one.attributes for one in scope.values() if isinstance(one, Module))]
        before = [dict(one) for one in places]
        self.block(node.body, scope)
        then = [dict(one) for one in places]
        for place, old in zip(places, before, strict=True):
            place.clear()
            place.update(old)
        self.block(node.orelse, scope)
        for place, one in zip(places, then, strict=True):
            for key in {*one, *place}:
                place[key] = chosen(test, one.get(key), place.get(key))
        self.conditions.pop()

    # ── expressions ──────────────────────────────────────────────────────────

    def value(self, node: ast.expr, scope: dict) -> Any:
        handle = getattr(self, f"_{type(node).__name__.lower()}", None)
        return handle(node, scope) if handle else Unknown()

    def _constant(self, node: ast.Constant, scope: dict) -> Any:
        return node.value

    def _name(self, node: ast.Name, scope: dict) -> Any:
        if node.id in scope:
            return scope[node.id]
        found = self.source.find(scope[""].file, node.id)
        return found if found and self.source.models in found.file.parents else Unknown(node.id)

    def _attribute(self, node: ast.Attribute, scope: dict) -> Any:
        owner = self.value(node.value, scope)
        if node.attr == "hf_config":
            return self.config
        if isinstance(owner, Config):
            return owner.read(node.attr, not self.conditions)
        if isinstance(owner, Module):
            return owner.attributes.get(node.attr, Unknown())
        return Unknown(node.attr)

    def _list(self, node: ast.List | ast.Tuple, scope: dict) -> list:
        return [self.value(one, scope) for one in node.elts]

    _tuple = _list

    def _dict(self, node: ast.Dict, scope: dict) -> Any:
        return Unknown() if node.keys else Formula("{}")

    def _subscript(self, node: ast.Subscript, scope: dict) -> Any:
        owner, key = self.value(node.value, scope), text(self.value(node.slice, scope))
        known = isinstance(owner, Formula) and key is not None
        return Formula(f"{owner.text}[{key}]") if known else Unknown()

    def _namedexpr(self, node: ast.NamedExpr, scope: dict) -> Any:
        scope[node.target.id] = self.value(node.value, scope)
        return scope[node.target.id]

    def _binop(self, node: ast.BinOp, scope: dict) -> Any:
        sides = self.value(node.left, scope), self.value(node.right, scope)
        return joined(SIGNS[type(node.op)], *sides) if type(node.op) in SIGNS else Unknown()

    def _compare(self, node: ast.Compare, scope: dict) -> Any:
        sides = self.value(node.left, scope), self.value(node.comparators[0], scope)
        sign = SIGNS.get(type(node.ops[0]))
        return joined(sign, *sides) if sign else Unknown()

    def _unaryop(self, node: ast.UnaryOp, scope: dict) -> Any:
        value = self.value(node.operand, scope)
        if not isinstance(node.op, ast.Not) or isinstance(value, Unknown):
            return Unknown()
        return Formula(f"(not {value.text})") if isinstance(value, Formula) else not value

    def _boolop(self, node: ast.BoolOp, scope: dict) -> Any:
        result = self.value(node.values[0], scope)
        for one in node.values[1:]:
            if not isinstance(result, (Formula, Unknown)):
                ends = bool(result) == isinstance(node.op, ast.Or)
                result = result if ends else self.value(one, scope)
            else:
                sign = "or" if isinstance(node.op, ast.Or) else "and"
                sides = text(result), text(other := self.value(one, scope))
                if isinstance(result, Unknown) and isinstance(other, Config):
                    result = other
                else:
                    known = None not in sides
                    result = Formula(f"({sides[0]} {sign} {sides[1]})") if known else Unknown()
        return result

    def _ifexp(self, node: ast.IfExp, scope: dict) -> Any:
        test = self.value(node.test, scope)
        return chosen(test, self.value(node.body, scope), self.value(node.orelse, scope))

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp, scope: dict) -> Any:
        return self._places(node, node.elt, scope)

    _generatorexp = _listcomp

    def _dictcomp(self, node: ast.DictComp, scope: dict) -> Any:
        return self._places(node, node.value, scope)

    def _places(self, node: Any, item: ast.expr, scope: dict) -> Any:
        """A module for the place 0, one for all the others."""
        loop = node.generators[0]
        bounds = [text(self.value(one, scope)) for one in getattr(loop.iter, "args", [])]
        if len(bounds) == 1:
            bounds = ["0", *bounds]
        if len(bounds) != 2 or None in bounds:
            return Unknown()
        made = Module()
        if bounds[0] == "0" and isinstance(node, ast.ListComp):
            made.attributes["0"] = self.value(item, scope | {loop.target.id: 0})
            bounds[0] = "1"
        inner = scope | {loop.target.id: PLACE}
        made.attributes[f"{{{bounds[0]}..{bounds[1]}}}"] = self.value(item, inner)
        return made

    def _call(self, node: ast.Call, scope: dict) -> Any:
        args = [self.value(one, scope) for one in node.args]
        kwargs = {one.arg: self.value(one.value, scope) for one in node.keywords if one.arg}
        name = ast.unparse(node.func)
        if name == "super().__init__" or (name.endswith(".__init__") and name[0].isupper()):
            for base in self.source.bases(scope[""]):
                if name.startswith("super") and (found := self.source.method(base, "__init__")):
                    self.call(*found, scope["self"], args, kwargs)
                    break
            return None
        if name in ("getattr", "hasattr"):
            return self._read(name, *args)
        if name in _SAME:
            return args[0]
        if name == _ONE:
            return 1
        last = name.rsplit(".", 1)[-1]
        if last == "get" and isinstance(owner := self.value(node.func.value, scope), Formula):
            return Formula(f"{owner.text}.get({', '.join(map(str, map(text, args)))})")
        if last == "len" and isinstance(args[0], Formula):
            return Formula(f"len({args[0].text})")
        if last == "get_vocab_size":  # the target's, which the draft's config repeats
            return Formula("vocab_size")
        if last in ("ModuleList", "ModuleDict"):
            return args[0]
        if last in ("zeros", "empty", "ones"):
            return [text(one) for one in args]
        if last == "Parameter":
            shape = args[0] if isinstance(args[0], list) else None
            return Module(rows=[("", shape, "")])
        function = self.value(node.func, scope)
        if isinstance(function, Class) and function.node.name not in self.source.opaque:
            return self.make(function, args, kwargs)
        if last in ("make_layers", "make_pp_layers"):  # by a function that is handed over
            return Module(rows=[("*", None, "")])
        last = getattr(function, "name", "") or last
        is_layer = last[0].isupper() or last in _EMPTY
        return self.layer(last, args, kwargs, scope) if is_layer else Unknown()

    def _read(self, how: str, owner: Any, key: Any, default: Any = None) -> Any:
        if isinstance(owner, Config):
            value = owner.get(key, default)
            known = how == "getattr" or not isinstance(value, Formula)
            return value if known else Formula(f"({value.text} is not None)")
        if isinstance(owner, Module) and how == "getattr":
            return owner.attributes.get(key, default)
        return Unknown()

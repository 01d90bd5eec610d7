"""Configuration: typed, described field by field, and every problem told at once.

Precedence, from weak to strong: defaults < file < ``--set key=value`` < flags.
A file is YAML with one section for each verb that it has something to say about::

    train:
      steps: 400
      optimizer: muon
      head: {steps: 5}
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from spectrain.core.errors import SpectrainError

VERBS = (
    *("prepare", "inspect", "verify-data", "draft-vocab", "train", "eval", "plan", "check"),
    *("generate", "chat", "compare", "export", "import", "doctor"),
)
SHIPPED = Path(__file__).resolve().parent.parent / "recipes" / "configs"


class Config(BaseModel):
    """Base of every configuration: immutable, no unknown keys, a description for each field."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        bare = [name for name, field in cls.model_fields.items() if not field.description]
        if bare:
            raise TypeError(f"{cls.__name__}: fields without a description: {', '.join(bare)}")


def as_list(value: Any) -> Any:
    """A single value where a list is expected: `temperature: 0` means `[0]`."""
    return value if isinstance(value, (list, tuple)) else [value]


C = TypeVar("C", bound=Config)


def shipped_configs() -> list[str]:
    """Names of the configurations inside the package, in alphabetical order."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_config(name: str | Path) -> Path:
    """The file behind `--config`: a path, or the name of a shipped configuration.

    Raises SpectrainError with the nearest shipped names when there is neither.
    """
    for path in (Path(name), SHIPPED / f"{name}.yaml"):
        if path.is_file():
            return path
    raise SpectrainError(
        f"no such configuration {str(name)!r}",
        where="--config",
        fix=f"give a YAML file or one of: {', '.join(shipped_configs()) or '(none shipped)'}"
        + nearest(str(name), shipped_configs()),
    )


def load_config(
    model: type[C],
    verb: str,
    file: str | Path | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> C:
    """Merge defaults, file section, `--set` overrides and flags into a validated `model`.

    overrides: texts `key=value`, nested keys with dots, values read as YAML.
    flags: values of explicit flags by (dotted) key; None means not given.
    Raises one SpectrainError that tells every problem: key, value, choices, nearest known name.
    """
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}  # dotted key -> where its value came from
    problems: list[str] = []
    if file is not None:
        path = find_config(file)
        section, file_problems = _read_section(path, verb)
        problems += file_problems
        for key, value in _leaves(section):
            problems += _put(model, merged, origin, key, value, str(path))
    for text in overrides:
        key, equals, raw = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            problems.append(f"--set {text!r}: expected key=value")
            continue
        try:
            value = yaml.load(raw, _Loader)
        except yaml.YAMLError as error:
            problems.append(f"{key}: cannot read {raw!r} as YAML, {_yaml_reason(error)} (--set)")
            continue
        problems += _put(model, merged, origin, key, value, "--set")
    flags = flags or {}
    for key, value in flags.items():
        if value is not None:
            problems += _put(model, merged, origin, key, value, _flag(key))
    try:
        config = model.model_validate(merged)
    except ValidationError as error:
        problems += [_explain(model, item, origin, flags) for item in error.errors()]
    if problems:
        raise SpectrainError(_together(problems, verb))
    return config


def nearest(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where PyYAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _yaml_reason(error: yaml.YAMLError) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())


def _read_section(path: Path, verb: str) -> tuple[dict[str, Any], list[str]]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise SpectrainError(
            f"not valid YAML ({_yaml_reason(error)})", where=where, fix="repair the file"
        ) from None
    except (UnicodeDecodeError, OSError) as error:
        raise SpectrainError(f"cannot read it ({error})", where=str(path)) from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise SpectrainError(
            "expected one section for each verb", where=str(path), fix=f"use {', '.join(VERBS)}"
        )
    problems = [
        f"unknown section {str(name)!r}{nearest(str(name), VERBS)} "
        f"(choices: {', '.join(VERBS)}; {path})"
        for name in content
        if name not in VERBS
    ]
    section = content.get(verb)
    section = {} if section is None else section
    if not isinstance(section, dict):
        problems.append(f"section {verb}: expected keys and values, got {section!r} ({path})")
        section = {}
    return section, problems


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted keys and values; an empty mapping counts as a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _put(
    model: type[BaseModel],
    tree: dict[str, Any],
    origin: dict[str, str],
    key: str,
    value: Any,
    source: str,
) -> list[str]:
    """Set a dotted key; a problem when one of its parents already holds a plain value."""
    *parents, last = _parts(model, key)
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            return [f"{key}: {parent!r} is a plain value, nothing can lie under it ({source})"]
    tree[last] = value
    origin[key] = source
    return []


def _parts(model: type[BaseModel], key: str) -> list[str]:
    """A dotted key in its parts; in a mapping of names to numbers what follows is one name."""
    first, _, rest = key.partition(".")
    field = model.model_fields.get(first)
    if rest and field and typing.get_origin(field.annotation) is dict:
        values = typing.get_args(field.annotation)[1]
        if values is not Any and typing.get_origin(values) is not dict:
            return [first, rest]
    return key.split(".")


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _explain(
    model: type[BaseModel], item: Any, origin: Mapping[str, str], flags: Mapping[str, Any]
) -> str:
    """One pydantic error as: key, value, what is allowed, where the value came from."""
    location = [str(part) for part in item["loc"]]
    key = ".".join(location) or model.__name__
    source = _source(location, origin)
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        near = nearest(location[-1], known)
        return f"unknown key {key!r}{near} (known: {', '.join(known)}{source})"
    if item["type"] == "missing":
        flag = f"{_flag(key)}, " if key in flags else ""
        return f"{key}: not given (use {flag}--set {key}=… or a --config file)"
    if item["type"] in ("literal_error", "enum"):
        choices = item["ctx"]["expected"]
        near = nearest(str(item["input"]), re.findall(r"'([^']*)'", choices))
        return f"{key}: {item['input']!r} is not a choice{near} (choices: {choices}{source})"
    reason = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if not location:  # a rule over several fields; its input is the whole configuration
        return reason
    origin_text = f" ({source[2:]})" if source else ""
    return f"{key}: {item['input']!r} refused, {reason[:1].lower()}{reason[1:]}{origin_text}"


def _source(location: list[str], origin: Mapping[str, str]) -> str:
    """`; from --set`, looked up at the key itself or the closest parent that was given."""
    for length in range(len(location), 0, -1):
        if found := origin.get(".".join(location[:length])):
            return f"; from {found}"
    return ""


def _fields_at(model: type[BaseModel], location: list[str]) -> list[str]:
    """Field names of the model nested at `location`."""
    for part in location:
        if part.isdigit():  # a place in a list of models
            continue
        field = model.model_fields.get(part)
        inner = _nested_model(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        if found := _nested_model(argument):
            return found
    return None


def _together(problems: list[str], verb: str) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems in the configuration of {verb}:" + "".join(
        f"\n  {problem}" for problem in problems
    )

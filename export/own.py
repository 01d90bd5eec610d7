"""Our own layout: the folder that training writes and `generate` loads."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import ClassVar

from pydantic import ValidationError

from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.export import numbers, rope
from spectrain.export.found import Found
from spectrain.export.layout import (
    Encoded,
    Finding,
    Launch,
    Reader,
    Reference,
    Suspect,
    Writer,
    compare_names,
)
from spectrain.heads import io
from spectrain.heads.base import DraftHead, HeadConfig
from spectrain.heads.eagle_layer import EagleConfig
from spectrain.heads.registry import FAMILIES, family


class OwnReader(Reader):
    """`family` in config.json, tensors under the names that the modules have."""

    name: ClassVar[str] = "spectrain"

    def recognises(self, found: Found) -> bool:
        return str(found.config.get("family")) in FAMILIES

    def findings(self, found: Found, target: Target) -> Iterator[Finding]:
        kind = family(found.config["family"])
        try:
            config = kind.Config.model_validate(dict(found.config))
        except ValidationError as error:
            for one in error.errors():
                key = ".".join(str(part) for part in one["loc"])
                fix = "correct it, or take the config.json that training wrote"
                yield Finding("config", "fail", f"{key}: {one['msg']}", fix)
            return
        yield Finding("config", "ok", f"family {config.family}, {config.steps} steps")
        yield self._target(config, target)
        try:
            expected = io.expected(kind, config, str(found.path))
        except SpectrainError as error:
            fix = error.fix or "take the config.json that training wrote"
            yield Finding("config", "fail", error.what, fix)
            return
        checks = [
            *compare_names(found, {n: tuple(t.shape) for n, t in expected.items()}),
            *numbers.findings(found.config),
        ]
        yield from checks
        if isinstance(config, EagleConfig) and all(one.verdict != "fail" for one in checks):
            yield from numbers.layer_findings(found.config)
            size, most = config.head_dim, config.max_position_embeddings
            yield from rope.findings(found, size, most, target)

    def build(self, found: Found, target: Target) -> DraftHead:
        kind = family(found.config["family"])
        head = kind(kind.Config.model_validate(dict(found.config)))
        head.load_state_dict({name: found.read(name) for name in found.shapes}, strict=True)
        return head

    def suspects(self, found: Found, target: Target) -> Iterator[Suspect]:
        other = {"after_norm": "before_norm", "before_norm": "after_norm"}
        if value := other.get(found.config.get("pass_on")):
            name = f"the next step reads the state {value.replace('_', ' the ')}"
            fix = f"in config.json, set pass_on to {value}"
            yield Suspect(name, fix, found.edited(config={"pass_on": value}), position=2)

    def layers_key(self, layers: tuple[int, ...]) -> str:
        return f"aux_layers to {list(layers)}"

    @staticmethod
    def _target(config: HeadConfig, target: Target) -> Finding:
        trained = config.target
        if trained.fingerprint == target.fingerprint:
            return Finding("target", "ok", f"trained for {trained.name}")
        return Finding(
            "target",
            "fail",
            f"trained for {trained.name} ({trained.fingerprint}), this target is {target.name} "
            f"({target.fingerprint})",
            f"use --target {trained.name} or a head of this target",
        )


class OwnWriter(Writer):
    """Config and tensors as they are."""

    reader = OwnReader()

    def refusals(self, head: DraftHead, reference: Reference) -> list[str]:
        return []

    def encode(self, head: DraftHead, reference: Reference) -> Encoded:
        return Encoded(head.config.model_dump(mode="json"), head.state_dict())

    def launch(self, head: DraftHead, reference: Reference) -> list[Launch]:
        name = shlex.quote(reference.here)
        text = f'spectrain generate --target {name} --head {{folder}} --prompt "Hello"'
        return [Launch("spectrain", text)]

"""What a checkpoint layout is: a reader and a writer for the heads of one family.

A layout is read without asking which engine wrote it, by its tensors and its config (`Reader`); it
is written for one engine, which wants its own keys (`Writer`). What a layout cannot say is refused
by the writer and found by the reader, never dropped: a head that is wrong raises nothing where it
runs, its drafts are merely not accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from spectrain.core.embedded import EMBEDDED
from spectrain.core.errors import SpectrainError
from spectrain.core.target import Target
from spectrain.core.tensor_files import FLOATING, WHOLE
from spectrain.export.found import Found
from spectrain.heads.base import DraftHead
from spectrain.heads.io import require_finite

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    check: what was looked at, in two or three words ("keys", "draft vocabulary", "rope")
    verdict: ok; note, worth knowing; warn, may cost acceptance; fail, cannot work
    text: what was seen · fix: what to do about it
    """

    check: str
    verdict: Literal["ok", "note", "warn", "fail"]
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Suspect:
    """A common mistake, undone: `found` with it mended, to see whether drafts are accepted then.

    name: the mistake ("d2t holds absolute ids") · fix: how the checkpoint is mended for good
    position: the first one of a draft that it changes
    seen: whether the files themselves show it, by a finding that is not of every good head
    """

    name: str
    fix: str
    found: Found
    position: int = 1
    seen: bool = False


class Reader(ABC):
    """Reads one layout, whoever wrote it."""

    name: ClassVar[str]
    tells_steps: ClassVar[bool] = True  # whether its files say for how many draft steps
    norm_keys: ClassVar[bool] = False  # whether its config has a place for norm_placement's keys

    @abstractmethod
    def recognises(self, found: Found) -> bool:
        """Whether this is the layout, by the names of the tensors and the config; of all readers
        one at most says yes."""

    @abstractmethod
    def findings(self, found: Found, target: Target) -> Iterator[Finding]:
        """Everything that can be told without running the head. Never raises for a bad file."""

    @abstractmethod
    def build(self, found: Found, target: Target) -> DraftHead:
        """The head, on the CPU, unbound; only for what has no finding that fails."""

    def suspects(self, found: Found, target: Target) -> Iterator[Suspect]:
        """What to try when nothing is accepted; asked only where the tensors `fit`."""
        return iter(())

    def layers_key(self, layers: tuple[int, ...]) -> str:
        """The key of config.json, with its value, that says that these outputs of the target's
        layers are read; "" where the layout has none."""
        return ""

    def called(self, found: Found, name: str) -> str:
        """What the file calls a tensor, or a module, of the head that `build` makes of it."""
        return name


@dataclass(frozen=True)
class Reference:
    """The target of an export: loaded, and as others call it.

    name: hub id or path that engines are started with
    stored: the type its own config names, which engines run it in; None where it is not known
    """

    target: Target
    name: str
    stored: torch.dtype | None = None

    @property
    def here(self) -> str:
        """What our own commands call it. An embedded target's weights are not quite those of the
        hub's model: the head fits them alone."""
        return self.target.name if self.target.name in EMBEDDED else self.name


@dataclass(frozen=True)
class Encoded:
    """A checkpoint that is not written yet.

    config: of config.json · tensors: of the weights' file, by name
    beside: further files by name: a path is linked or copied, a text or JSON value written
    weights: name of the weights' file, where a layout asks for another one
    own_config: whether the config is of these tensors alone, or of a target that they lie beside
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    beside: Mapping[str, Path | str | Mapping[str, Any]] = field(default_factory=dict)
    weights: str = WEIGHTS
    own_config: bool = True


@dataclass(frozen=True)
class Launch:
    """How an engine is started with the export; {folder} stands for where it lies.

    engine: name and the version whose source was read · language: of `text`
    """

    engine: str
    text: str
    language: Literal["shell", "python"] = "shell"
    note: str = ""


class Writer(ABC):
    """Writes one family's heads for one engine."""

    reader: ClassVar[Reader]
    # Engines that the format is for, each with the architecture under which `export/facts` records
    # the names that its loader expects.
    facts: tuple[tuple[str, str], ...] = ()

    @abstractmethod
    def refusals(self, head: DraftHead, reference: Reference) -> list[str]:
        """What of this head the format cannot express, a sentence each."""

    @abstractmethod
    def encode(self, head: DraftHead, reference: Reference) -> Encoded:
        """The head in this layout; only for one without refusals."""

    @abstractmethod
    def launch(self, head: DraftHead, reference: Reference) -> list[Launch]:
        """The command lines that run it."""


def load(
    reader: Reader, found: Found, target: Target, findings: Iterable[Finding] | None = None
) -> DraftHead:
    """The head in `found`, bound to the target. Raises SpectrainError with all that is wrong.

    findings: the reader's, where they are there already.
    """
    findings = reader.findings(found, target) if findings is None else findings
    failed = [one for one in findings if one.verdict == "fail"]
    if failed:
        raise SpectrainError(
            "; ".join(one.text for one in failed[:5])
            + (f" and {len(failed) - 5} more" if len(failed) > 5 else ""),
            where=str(found.path),
            fix=next((one.fix for one in failed if one.fix), "see spectrain doctor"),
        )
    head = reader.build(found, target)
    head.check_vocabulary(str(found.path))
    require_finite(head, str(found.path), lambda name: reader.called(found, name))
    return head.to(target.device).bind(target.readout).eval()


def fit(findings: Iterable[Finding]) -> bool:
    """Whether names, shapes and types of the tensors are the layout's, by the findings of its
    reader: what was not compared may be of any size."""
    return any(one.check == "tensors" and one.verdict == "ok" for one in findings)


def compare_names(
    found: Found,
    expected: Mapping[str, Iterable[int]],
    ignored: Iterable[str] = (),
    ids: Iterable[str] = ("d2t", "t2d"),
) -> Iterator[Finding]:
    """Findings about the tensors: every expected name [shape] there, in a type that can be read,
    and none besides.

    ignored: names that may be there and are looked at elsewhere. ids: names whose values are whole
    numbers or truths about tokens; all others are weights.
    """
    wanted = {name: tuple(shape) for name, shape in expected.items()}
    missing = wanted.keys() - found.shapes.keys()
    problems = [f"missing {found.called(name)}" for name in sorted(missing)]
    unknown = found.shapes.keys() - wanted.keys() - set(ignored)
    problems += [f"unknown {found.called(name)}" for name in sorted(unknown)]
    problems += [
        f"{found.called(name)} has shape {found.shapes[name]}, expected {shape}"
        for name, shape in sorted(wanted.items())
        if found.shapes.get(name, shape) != shape
    ]
    ids = set(ids)
    for name in sorted(wanted.keys() & found.dtypes.keys()):
        types = WHOLE if name in ids else FLOATING
        if found.dtypes[name] not in types:
            text = f"{found.called(name)} is stored as {found.dtypes[name]}"
            problems.append(f"{text}, not as one of {', '.join(types)}")
    for text in problems:
        yield Finding("tensors", "fail", text, "export the head again for this format")
    if not problems:
        yield Finding("tensors", "ok", f"{len(found.shapes)} tensors, all names and shapes known")

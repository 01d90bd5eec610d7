"""What the files of a run tell of its head: what was measured, how it was trained, and on what.

RUN/head/              head: config, weights, training.json, provenance.json, plan.json
RUN/best/              head: the same, and best.json in the place of training.json
RUN/eval-alpha.json    the report of `eval-alpha`; also looked for in the head's folder, above RUN

Nothing is made up: what no file tells is None.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json
from spectrain.core.target import Target
from spectrain.data.manifest import read_manifest
from spectrain.generator.saved_plan import SavedPlan
from spectrain.heads.io import weights_digest

ALPHA = "eval-alpha.json"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Interval(_Part):
    value: float | None
    low: float | None
    high: float | None


class Position(_Part):
    """Acceptance at a draft position, counted from 1."""

    position: int
    marginal: Interval
    conditional: Interval
    anchors: int
    reached: float


class Tau(Interval):
    """Tokens per target forward at a length of the draft."""

    draft: int
    forwards: float


class Numbers(_Part):
    conversations: int
    tokens: int
    positions: tuple[Position, ...] = Field(min_length=1)
    tau: tuple[Tau, ...] = Field(min_length=1)


class AtTemperature(Numbers):
    temperature: float
    note: str | None
    domains: dict[str, Numbers]


class Alpha(_Part):
    """The report of `eval-alpha`; weights: digest of the head's file, None in older ones."""

    head: str
    split: str
    weights: str | None = None
    temperatures: tuple[AtTemperature, ...] = Field(min_length=1)
    definitions: dict[str, str]


class Heldout(_Part):
    """Measured during the training, greedy, without intervals; draft: the γ of τ.

    As best.json has it, or as a row of the metrics: {"step": …, "heldout": {…}}.
    """

    step: int
    rows: int
    tokens: int
    draft: int
    tau: float | None
    conditional: tuple[float | None, ...]
    marginal: tuple[float | None, ...]

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        inner = value.get("heldout") if isinstance(value, dict) else None
        return {**value, **inner} if isinstance(inner, dict) else value


class Report(_Part):
    """What a training run tells of itself."""

    steps: int
    supervised_tokens: int
    seconds: float
    trained_parameters: int | None = None
    store: str | None = None
    store_path: str | None = None
    environment: dict[str, Any] = {}
    vocabulary: dict[str, Any] | None = None
    heldout: Heldout | None = None


class _Training(_Part):
    report: Report


class Provenance(_Part):
    """Settings that a run was started with."""

    arguments: dict[str, Any] = {}
    store: str | None = None
    time_utc: str | None = None


@dataclass(frozen=True)
class Known:
    """heldout: of these very weights · store: the manifest of the store, if it is still there"""

    alpha: Alpha | None = None
    heldout: Heldout | None = None
    plan: SavedPlan | None = None
    report: Report | None = None
    provenance: Provenance | None = None
    store: dict[str, Any] | None = None


M = TypeVar("M", bound=BaseModel)


def known(run: Path, head: Path, target: Target, alpha: Path | None = None) -> Known:
    """run: what the user named · head: the folder of the head in it · alpha: a report that the user
    named. Raises SpectrainError for a file that cannot be read, or of another head."""
    report = _read(head / "training.json", _Training)
    report = report and report.report
    best = _read(head / "best.json", Heldout)
    heldout = best or (report and report.heldout)
    if best is None and heldout and heldout.step != report.steps:
        heldout = None  # of weights that were trained further
    provenance = _read(head / "provenance.json", Provenance)
    plan = SavedPlan.beside(head, target)
    return Known(
        alpha=_given(alpha, run, head, target) if alpha else _found(run, head),
        heldout=heldout,
        plan=plan if plan and plan.target == target.fingerprint else None,
        report=report,
        provenance=provenance,
        store=_store(report, provenance),
    )


def place_for(run: Path) -> Path:
    """Where the report on the head of a run belongs; a model kept elsewhere has no folder."""
    return run / ALPHA if run.is_dir() else Path(ALPHA)


def measure_command(run: Path, head: Path, target: str, store: str = "STORE") -> str:
    """What measures the head, and puts the report where it belongs."""
    given = {"target": target, "store": store, "head": str(head), "json": str(place_for(run))}
    parts = [part for name, value in given.items() for part in (f"--{name}", value)]
    return shlex.join(["spectrain", "eval-alpha", *parts])


def _given(path: Path, run: Path, head: Path, target: Target) -> Alpha:
    report = _read(path, Alpha)
    if report is None:
        raise SpectrainError("no such file", where=str(path), fix="give what --json wrote")
    if report.weights not in (None, weights_digest(head)):
        raise SpectrainError(
            f"this was measured of another head ({report.head})",
            where=str(path),
            fix=f"for the numbers of this one: {measure_command(run, head, target.name)}, then "
            f"--alpha {place_for(run)}",
        )
    return report


def _found(run: Path, head: Path) -> Alpha | None:
    """A report that lies where it would, if it is of this very head."""
    for folder in dict.fromkeys((head, run, run.absolute().parent)):
        report = _read(folder / ALPHA, Alpha)
        if report is None:
            continue
        if report.weights:
            same = report.weights == weights_digest(head)
        else:  # by its path, perhaps as seen from another folder
            named, here = Path(report.head).parts, head.resolve()
            same = any(place.parts[-len(named) :] == named for place in (here, here.parent))
        if same:
            return report
    return None


def _store(report: Report | None, provenance: Provenance | None) -> dict[str, Any] | None:
    named = report and report.store_path
    named = named or (provenance and provenance.arguments.get("store"))
    fingerprint = (report and report.store) or (provenance and provenance.store)
    manifest = read_manifest(Path(str(named))) if named else None
    return manifest if manifest and manifest.get("fingerprint") == fingerprint else None


def _read(path: Path, model: type[M]) -> M | None:
    """A file of ours; None where there is none."""
    if not path.is_file():
        return None
    try:
        return model.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "content"
        raise SpectrainError(
            f"not what spectrain writes there ({key}: {first['msg']})",
            where=str(path),
            fix="make it again, or move it away",
        ) from None

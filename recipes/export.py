"""`spectrain export`: a trained head in the format of an engine, read back and compared before it
is there at all.

out/                       appears as a whole or not at all
out/…                      what the format consists of
out/README.md              the page of the head, with the command lines that run it
out/spectrain-export.json  format, target, checks, measured numbers, provenance, checksums
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, field_validator

from spectrain.core import on_disk
from spectrain.core.config import Config
from spectrain.core.embedded import EMBEDDED
from spectrain.core.errors import SpectrainError
from spectrain.core.files import atomic_folder, atomic_write, read_json, sha256_file, write_json
from spectrain.core.pretrained import stored_dtype
from spectrain.core.provenance import provenance
from spectrain.core.target import Target
from spectrain.export import card
from spectrain.export.formats import writer
from spectrain.export.found import Found
from spectrain.export.layout import Encoded, Launch, Reference
from spectrain.export.measured import Known, known, measure_command, place_for
from spectrain.export.proof import beyond, conform, read_back, rounded
from spectrain.export.push import push, require_token
from spectrain.export.record import RECORD
from spectrain.export.untouched import judged
from spectrain.export.write import write
from spectrain.heads.base import TargetFacts
from spectrain.heads.io import find_head
from spectrain.recipes.export_report import render
from spectrain.recipes.given_head import given_head

__all__ = ["ExportConfig", "render", "run"]

_HUB_NAME = r"[\w-][\w.-]*/[\w-][\w.-]*"
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class ExportConfig(Config):
    """Settings of `export`."""

    run: Path = Field(description="training run, or the folder of a head")
    format: str = Field(description="whose format: spectrain, or that of another engine")
    out: Path | None = Field(None, description="folder to write to; default: RUN/export/FORMAT")
    target: str | None = Field(None, description="target; default: the one the head was made for")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number type of the tensors; auto: as they are stored"
    )
    files: Literal["copy", "link"] = Field(
        "copy", description="whether files of the target that belong to the export are copied"
    )
    base_model: str | None = Field(
        None, description="the target as others call it: hub id or path; default: its own name"
    )
    license: str = Field(
        "other", pattern=r"^[a-z0-9][a-z0-9.+-]*$", description="licence id of the model hub"
    )
    datasets: tuple[str, ...] = Field((), description="hub ids of the training data, for the page")
    alpha: Path | None = Field(None, description="what `eval-alpha --json` wrote of this head")
    push: str | None = Field(None, description="OWNER/NAME on the model hub to upload to")
    private: bool = Field(True, description="whether a repository made by push is private")
    overwrite: bool = Field(False, description="replace an earlier export in the same folder")

    @field_validator("push")
    @classmethod
    def _a_repository(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(_HUB_NAME, value):
            raise ValueError("give OWNER/NAME")
        return value

    @property
    def folder(self) -> Path:
        return self.out or self.run / "export" / self.format


def run(config: ExportConfig) -> dict[str, Any]:
    """Write the export; returns the report as plain JSON values.

    Raises SpectrainError for what cannot be exported, with all reasons at once; RunFailed when what
    was written is not what it should be, and nothing is there then.
    """
    place = find_head(config.run)
    head = given_head(config.run, config.target or "TARGET")
    made = writer(config.format, head.family)
    _require_room(config, place)
    if config.push:
        require_token()
    target = on_disk.load(config.target or head.config.target.name)
    head.check_target(target, str(config.run))
    head.to(target.device).bind(target.readout)
    reference = Reference(target, _name_for_others(config, target), stored_dtype(target.name))
    told = known(config.run, place, target, config.alpha)

    reasons = made.refusals(head, reference)
    if reasons:
        trained = any("train it with" in reason for reason in reasons)
        raise SpectrainError(
            f"the format {config.format} cannot say what this head is: {'; '.join(reasons)}",
            where=str(config.run),
            fix=f"choose another --format{', or train the head as said' if trained else ''}",
        )
    beside = judged(head, target)
    if beside.never_trained:
        raise SpectrainError(
            "this head was never trained: its weights are those of a new one",
            where=str(place),
            fix="train it, or give the folder of the trained head",
        )
    dtype = _dtype(config, place)
    rounding = rounded(head, dtype)
    if rounding and (large := beyond(head, dtype)):
        raise SpectrainError(
            f"{config.dtype} cannot hold numbers as large as those in {', '.join(large[:3])}",
            where="--dtype",
            fix="choose bfloat16 or float32",
        )
    encoded = made.encode(head, reference)
    checks = [conform(made, encoded)]
    folder = config.folder
    launches = made.launch(head, reference)
    with atomic_folder(folder) as temporary:
        write(encoded, temporary, dtype, config.files)
        checks += read_back(made, head, target, temporary, dtype)
        page = card.About(
            format=config.format,
            layout=made.reader.name,
            config=head.config,
            base=reference.name,
            here=reference.here,
            on_hub=_on_hub(reference.name),
            base_note=_note(config, target),
            license=config.license,
            dtype=_types(encoded, dtype),
            rounded=rounding,
            parameters=_numbers(encoded),
            launches=launches,
            files=_sizes(temporary),
            known=told,
            datasets=config.datasets,
            repo=config.push,
        )
        # A file of that name may be a link to the target's own.
        for name in (card.README, RECORD):
            (temporary / name).unlink(missing_ok=True)
        atomic_write(temporary / card.README, card.readme(page))
        write_json(temporary / RECORD, _record(config, page, target, checks, temporary, place))
        sizes = _sizes(temporary)
    pushed = push(folder, config.push, config.private) if config.push else None
    return {
        "format": config.format,
        "layout": made.reader.name,
        "family": head.family,
        "target": target.name,
        "base_model": reference.name,
        "note": page.base_note,
        "dtype": page.dtype,
        "out": str(folder),
        "files": [{"file": name, "bytes": size} for name, size in sizes.items()],
        "checks": checks,
        "untouched": beside.untouched,
        "measured": _measured(told),
        "to_measure": {
            "report": str(place_for(config.run)),
            "command": measure_command(config.run, place, target.name),
        },
        "launch": [_line(one, str(folder)) for one in launches],
        "pushed": pushed,
    }


def _require_room(config: ExportConfig, place: Path) -> None:
    """Nothing but an earlier export is ever replaced, and never the head itself."""
    folder, inside = config.folder, place.resolve()
    if config.out is None and not config.run.is_dir():  # the name of a model kept elsewhere
        raise SpectrainError(
            "this head has no folder to put the export into",
            where=str(config.run),
            fix="give --out FOLDER",
        )
    if folder.resolve() == inside or folder.resolve() in inside.parents:
        raise SpectrainError("the head itself lies there", where=str(folder), fix="choose another")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / RECORD).is_file():
        raise SpectrainError(
            "there is something already, and it is no export",
            where=str(folder),
            fix="choose another --out",
        )
    if not config.overwrite:
        raise SpectrainError(
            "there is an export already", where=str(folder), fix="add --overwrite to replace it"
        )


def _name_for_others(config: ExportConfig, target: Target) -> str:
    """What engines are started with."""
    known_as = EMBEDDED[target.name].hub if target.name in EMBEDDED else target.name
    name = config.base_model or known_as
    if not re.fullmatch(r"[^\s'\"`$\\;&|<>(){}*?!#]+", name):
        raise SpectrainError(
            f"the target's name {name!r} cannot stand in a command line",
            where="--base-model",
            fix="give its hub id, or move it to a folder with a plain name",
        )
    return name


def _on_hub(name: str) -> bool:
    return re.fullmatch(_HUB_NAME, name) is not None and not Path(name).exists()


def _note(config: ExportConfig, target: Target) -> str | None:
    """What others have to know of the target's name."""
    if target.name in EMBEDDED:
        model = EMBEDDED[target.name]
        return (
            f"the head was trained for the weights in the package {model.requirement}, "
            f"{model.differs}; with the original weights fewer drafts may be accepted"
        )
    name = config.base_model or target.name
    if not _on_hub(name):
        return f"{name} is a folder of the machine that this was made on"
    return None


def _dtype(config: ExportConfig, place: Path) -> torch.dtype | None:
    """What floating tensors are written as; None: as they are loaded."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if not any(place.glob("*.safetensors")):  # a model that is kept elsewhere, or otherwise
        return None
    stored = {kind for kind in Found.open(place).dtypes.values() if kind in _TYPES}
    return _TYPES[stored.pop()] if len(stored) == 1 else None


def _types(encoded: Encoded, dtype: torch.dtype | None) -> str:
    kinds = {dtype or one.dtype for one in encoded.tensors.values() if one.is_floating_point()}
    return ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def _numbers(encoded: Encoded) -> int:
    """In floating tensors: a vocabulary map is no parameter."""
    return sum(one.numel() for one in encoded.tensors.values() if one.is_floating_point())


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in _files(folder)}


def _files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _measured(told: Known) -> dict[str, Any]:
    plan = told.plan
    return {
        "alpha": told.alpha and told.alpha.model_dump(mode="json"),
        "heldout": told.heldout and told.heldout.model_dump(mode="json"),
        "speedup": plan and {n: one.speedup for n, one in plan.choices.items()},
    }


def _record(
    config: ExportConfig,
    page: card.About,
    target: Target,
    checks: list[str],
    folder: Path,
    place: Path,
) -> dict[str, Any]:
    """What is kept beside the files."""
    trained = place / "provenance.json"
    return {
        "format": page.format,
        "layout": page.layout,
        "family": page.config.family,
        "dtype": page.dtype,
        "steps": page.config.steps,
        "target": TargetFacts.of(target).model_dump(mode="json"),
        "base_model": page.base,
        "launch": [asdict(one) for one in page.launches],
        "checks": checks,
        "measured": _measured(page.known),
        "provenance": _public(provenance(config.model_dump(mode="json"))),
        "training": _public(read_json(trained)) if trained.is_file() else None,
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for path in _files(folder)
        },
    }


def _public(record: dict[str, Any]) -> dict[str, Any]:
    """A provenance without its command line: the files may be uploaded, and where folders lie on a
    machine is nobody's business."""
    return {key: value for key, value in record.items() if key not in ("command", "arguments")}


def _line(launch: Launch, folder: str) -> dict[str, str]:
    note = launch.note
    if not card.plain_name(folder):
        note += f" FOLDER is {folder}: quote it as shell, JSON or YAML ask for."
    return {"engine": launch.engine, "text": card.launched(launch, folder), "note": note.strip()}

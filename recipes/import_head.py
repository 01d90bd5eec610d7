"""`spectrain import`: a head that others trained, or wrote, becomes a run of ours.

out/head/   the head, with a provenance.json that names what it was read from
"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from spectrain.core import on_disk
from spectrain.core.config import Config
from spectrain.core.errors import SpectrainError
from spectrain.core.files import atomic_folder, require_writable, write_json
from spectrain.core.provenance import provenance
from spectrain.core.target import Target
from spectrain.export import record
from spectrain.export.formats import reader_of, writer
from spectrain.export.found import Found
from spectrain.export.layout import load
from spectrain.export.proof import read_back
from spectrain.heads.base import DraftHead
from spectrain.heads.io import expected, write_head
from spectrain.recipes.train_config import REPORT
from spectrain.recipes.train_report import HEAD
from spectrain.trainer.checkpoint import FOLDER

TRAINED_BY = ("eagle", "medusa", "mtp", "draft")  # what follows "train-" begins a family's name


class ImportConfig(Config):
    """Settings of `import`."""

    path: str = Field(description="folder of a head, a file of its weights, or a hub id")
    target: str = Field("smollm2-135m", description="target: embedded name, folder or hub id")
    out: Path = Field(Path("runs/import"), description="folder of the run; the head is out/head")
    draft_steps: int | None = Field(
        None,
        ge=1,
        le=64,
        description="draft steps the head was trained for, where its files do not say; default: "
        "what they say, else the family's",
    )
    overwrite: bool = Field(False, description="replace a head that is there already")


def run(config: ImportConfig) -> dict[str, Any]:
    """Read the head, check it against the target and write it as our own; returns the report."""
    folder = config.out / HEAD
    _require_free(config, folder)
    found = Found.open(config.path)
    reader = reader_of(found)
    target = on_disk.load(config.target)
    findings = [*reader.findings(found, target), *record.findings(found, target)]
    steps = config.draft_steps or (None if reader.tells_steps else record.steps(found))
    head = _with_steps(load(reader, found, target, findings), steps, target)
    files = [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": found.sha256(file)}
        for file in found.files
    ]
    source = {"path": str(found.path.resolve()), "layout": reader.name, "files": files}
    about = provenance(config.model_dump(mode="json"), source=source)
    with atomic_folder(folder) as temporary:
        write_head(head, temporary)
        checks = read_back(writer("spectrain", head.family), head, target, temporary, None)
        write_json(temporary / "provenance.json", about)
    return {
        "head": str(folder),
        "source": config.path,
        "layout": reader.name,
        "files": files,
        "family": head.family,
        "steps": head.config.steps,
        "steps_told": reader.tells_steps or steps is not None,
        "draft_vocab_size": head.config.draft_vocab_size,
        "of": head.readout.usable,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "target": config.target,
        "fingerprint": target.fingerprint,
        "findings": [asdict(finding) for finding in findings],
        "checks": checks,
    }


def render(report: dict[str, Any]) -> str:
    """What a person reads: what was found, what may be wrong with it, what to do with it."""
    lines = [
        f"head {report['head']} ({report['family']} for {report['target']}), read from "
        f"{report['source']} in the layout {report['layout']}",
        f"{report['steps']} draft steps, {report['parameters']:,} parameters, guesses "
        f"{min(report['draft_vocab_size'], report['of']):,} of {report['of']:,} tokens",
    ]
    if not report["steps_told"]:
        text = f"{report['steps']} draft steps is the family's default, its files say none"
        lines.append(f"note: {text}; give --draft-steps if you know better")
    for one in report["findings"]:
        if one["verdict"] != "ok":
            fix = f"; {one['fix']}" if one["fix"] else ""
            lines.append(f"{one['verdict']}: {one['check']}: {one['text']}{fix}")
    lines += [f"checked: {one}" for one in report["checks"]]
    on = {"target": report["target"]}
    examined = ["spectrain", "doctor", report["head"], "--target", report["target"]]
    lines += [
        "does it guess at all: " + shlex.join(examined),
        "what it is worth: " + _command("eval-alpha", on, store="STORE", head=report["head"]),
        "use it: " + _command("generate", on, head=report["head"], prompt="Hello"),
        "train it further: " + further(report["family"], report["target"], report["head"]),
    ]
    return "\n".join(lines)


def further(family: str, target: str, head: str) -> str:
    """The command that trains a head further, on a store that is still to be named."""
    trained_by = next(name for name in TRAINED_BY if family.startswith(name))
    sets = ["--set", f"family={family}"] if trained_by != family else []
    return _command(f"train-{trained_by}", {"target": target}, *sets, store="STORE", init=head)


def _command(verb: str, on: dict[str, str], *more: str, **flags: str) -> str:
    given = [part for key, value in (on | flags).items() for part in (f"--{key}", value)]
    return shlex.join(["spectrain", verb, *given, *more])


def _require_free(config: ImportConfig, folder: Path) -> None:
    """Refuse a place that holds something else, before anything is loaded."""
    require_writable(folder / REPORT)
    if (config.out / FOLDER).exists() or (config.out / REPORT).exists():
        raise SpectrainError(
            "this is the folder of a training run",
            where=str(config.out),
            fix="choose another --out",
        )
    if folder.exists() and not config.overwrite:
        raise SpectrainError(
            "there is a head already",
            where=str(folder),
            fix="choose another --out, or give --overwrite to replace it",
        )


def _with_steps(head: DraftHead, steps: int | None, target: Target) -> DraftHead:
    """The head, said to be trained for so many steps; refused where its tensors say otherwise."""
    if steps in (None, head.config.steps):
        return head
    kind, where = type(head), "--draft-steps"
    try:
        config = kind.Config.model_validate({**head.config.model_dump(), "steps": steps})
    except ValidationError as error:
        raise SpectrainError(f"{steps}: {error.errors()[0]['msg']}", where=where) from None
    state = head.state_dict()
    wanted = {name: value.shape for name, value in expected(kind, config, where).items()}
    if wanted != {name: value.shape for name, value in state.items()}:
        raise SpectrainError(
            f"the weights are those of {head.config.steps} draft steps, not of {steps}",
            where=where,
            fix="leave it out",
        )
    again = kind(config)
    again.load_state_dict(state, strict=True)
    return again.to(target.device).bind(target.readout).eval()

"""`spectrain doctor`: what is wrong with a head's checkpoint, and does the head guess at all?

A head that is wrong raises nothing where it runs, its drafts are merely not accepted. So everything
that can be told without running is told (export/), the head then guesses on replies that the target
writes, and common mistakes are undone one at a time to see whether drafts are accepted then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from spectrain.core.batch import Batch
from spectrain.core.config import Config
from spectrain.core.errors import SpectrainError
from spectrain.core.progress import progress
from spectrain.core.target import Target
from spectrain.data.conversations import Conversation
from spectrain.data.online import read
from spectrain.data.reading import read_conversations
from spectrain.evaluation import behaviour
from spectrain.evaluation.causes import Cause, causes
from spectrain.evaluation.summary import DEFINITIONS
from spectrain.export import health, record, stored
from spectrain.export.formats import reader_of
from spectrain.export.found import Found
from spectrain.export.layout import Finding, Reader, load
from spectrain.heads.base import DraftHead
from spectrain.heads.io import find_head
from spectrain.recipes.doctor_report import render
from spectrain.recipes.doctor_verdicts import ranked, verdicts
from spectrain.recipes.evaluate import MAX_DRAFT
from spectrain.recipes.generate import ids_of
from spectrain.recipes.import_head import further
from spectrain.recipes.prepare import SHIPPED_PROMPTS

__all__ = ["DoctorConfig", "render", "run"]


class DoctorConfig(Config):
    """Settings of `doctor`."""

    path: Path = Field(description="folder of a head, in any known layout")
    target: str = Field("smollm2-135m", description="target: embedded name, folder or hub id")
    prompts: Path = Field(
        SHIPPED_PROMPTS, description="JSONL of prompts; last replies are left out"
    )
    limit: int = Field(10, ge=1, description="only the first so many prompts of the file")
    max_new_tokens: int = Field(48, ge=3, description="longest reply in tokens")
    seed: int = Field(0, ge=0, description="seed of the bootstrap")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number type of target and head; auto: float32 on a CPU"
    )


def run(config: DoctorConfig) -> dict[str, Any]:
    """Examine the head and return the report; `failure` says what is wrong with it."""
    found = Found.open(find_head(config.path))
    reader = reader_of(found)
    conversations = read_conversations(config.prompts, "last", "stop", keep_order=True)
    target = Target.load(config.target, dtype=config.dtype, pack_weights=False)
    prompts = [_ids(target, conversation) for conversation in conversations[: config.limit]]

    findings = [*reader.findings(found, target), *record.findings(found, target)]
    said = {one.check: _badness(one) for one in sorted(findings, key=_badness)}
    findings += [one for one in stored.findings(found) if _news(one, said)]
    head = None
    if not any(one.verdict == "fail" for one in findings):
        head = _loaded(reader, found, target)
        seen = health.findings(head, target, partial(reader.called, found))
        findings += [one for one in seen if _news(one, said)]
        if not health.can_be_fed(head, target):
            head = None
    patient = _Patient(reader, found, target, head, config, prompts)
    accepted = patient.behave()
    tried = patient.tried()
    findings += verdicts(accepted, tried, patient.further() if head else "")

    failed = [one for one in findings if one.verdict == "fail"]
    return {
        "path": str(found.path),
        "layout": reader.name,
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": len(prompts),
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "findings": [asdict(one) for one in findings],
        "acceptance": accepted,
        "tried": tried,
        "healthy": not failed,
        "failure": _failure(str(found.path), failed),
        "definitions": DEFINITIONS | behaviour.DEFINITIONS,
    }


class _Patient:
    """The head, as it is and with one thing changed, on replies that the target writes once."""

    def __init__(
        self,
        reader: Reader,
        found: Found,
        target: Target,
        head: DraftHead | None,
        config: DoctorConfig,
        prompts: list[Tensor],
    ) -> None:
        self.reader, self.found, self.target, self.head = reader, found, target, head
        self.config, self.prompts = config, prompts
        self._replies: Batch | None = None
        self._batches: dict[tuple[int, ...], Batch] = {}

    def called(self, name: str) -> str:
        """What the file calls a tensor of the head."""
        return self.reader.called(self.found, name)

    def further(self) -> str:
        """How the head is trained further; one of another layout is imported for that first."""
        path = str(self.found.path) if self.reader.name == "spectrain" else "IMPORTED"
        return further(self.head.family, self.config.target, path)

    def _fix(self, cause: Cause) -> str:
        if cause.training:
            return f"{cause.fix}: {self.further()}"
        key = self.reader.layers_key(cause.layers) if cause.layers else ""
        return f"in config.json, set {key}: {cause.fix}" if key else cause.fix

    def batch(self, head: DraftHead) -> Batch:
        """The replies with what this head reads."""
        if self._replies is None:
            longest = self.config.max_new_tokens
            self._replies = behaviour.answered(self.target, self.prompts, longest)
        layers = head.needs.aux_layers
        if layers not in self._batches:
            self._batches[layers] = read(self.target, self._replies, layers)
        return self._batches[layers]

    def behave(self) -> dict[str, Any] | None:
        """Acceptance of the head as it is; None where it cannot be run."""
        if self.head is None:
            return None
        batch = self.batch(self.head)
        steps = min(MAX_DRAFT, self.head.longest_draft)
        return {
            "blind": behaviour.blind(batch),
            **behaviour.measured(self.target, self.head, batch, steps, self.config.seed),
        }

    def tried(self) -> list[dict[str, Any]]:
        """What was changed, and acceptance at position 1 then, as `ranked`."""
        plain = behaviour.first(self.head, self.batch(self.head)) if self.head else None
        if plain is not None and plain.value is None:
            return []
        rows: list[dict[str, Any]] = []
        outcomes = [] if plain is None else [plain.hits]
        for name, fix, head, batch, hint in self._told(self._changes()):
            changed = behaviour.first(head, batch)
            if changed.hits.any() and any(np.array_equal(changed.hits, h) for h in outcomes):
                continue  # what this head does not read, or the same change by another name
            outcomes.append(changed.hits)
            if plain is None:
                known, gain = changed.value, None
                likely = known is not None and known >= behaviour.least(behaviour.blind(batch))
            else:
                gain = behaviour.lift(plain, changed, self.config.seed)
                likely = behaviour.lifts(plain, gain)
                if hint == "leak":
                    likely &= behaviour.leaked(plain, changed, behaviour.blind(batch))
            row = {"name": name, "position_1": changed.value, "gain": gain, "likely": likely}
            rows.append(row | {"seen": hint == "seen", "fix": fix})
        return ranked(rows)

    @staticmethod
    def _told(changes: Iterator[Any]) -> Iterator[Any]:
        """Each mistake once, also where a layout and the head's kind both know of it."""
        names: set[str] = set()
        with progress(None, "undo common mistakes", "tried") as bar:
            for change in changes:
                if change[0] not in names:
                    names.add(change[0])
                    yield change
                    bar.update()

    def _changes(self) -> Iterator[tuple[str, str, DraftHead, Batch, str]]:
        """name, fix, head, its batch, and a hint of everything tried: "leak" where the batch leaks
        the answer, "seen" where a finding tells of the mistake."""
        own = list(self.reader.suspects(self.found, self.target))
        for one in own or stored.suspects(self.found):
            findings = self.reader.findings(one.found, self.target)
            if any(f.verdict == "fail" for f in findings):
                continue
            try:
                head = _loaded(self.reader, one.found, self.target)
            except SpectrainError:  # more is wrong with it, which its findings say
                continue
            yield one.name, one.fix, head, self.batch(head), "seen" if one.seen else ""
        if self.head is None:
            return
        batch = self.batch(self.head)
        for cause in causes(self.target, self.head, batch, self.called):
            yield cause.name, self._fix(cause), self.head, cause.batch, "leak" if cause.leak else ""
        for name, fix, mend in health.mends(self.head, self.target, self.called):
            head = _loaded(self.reader, self.found, self.target)
            mend(head)
            yield name, fix, head, batch, "seen"


def _ids(target: Target, conversation: Conversation) -> Tensor:
    """The prompt's ids; for a target without a chat template those of its last message alone."""
    if target.tokenizer.chat_template:
        return ids_of(target, conversation)
    return torch.tensor(target.tokenizer(str(conversation.messages[-1]["content"]))["input_ids"])


def _loaded(reader: Reader, found: Found, target: Target) -> DraftHead:
    return load(reader, found, target).to(target.dtype)


def _badness(finding: Finding) -> int:
    return ("ok", "note", "warn", "fail").index(finding.verdict)


def _news(finding: Finding, said: Mapping[str, int]) -> bool:
    """Whether a general finding is worse than all that the reader said of the same thing."""
    return _badness(finding) > said.get(finding.check, -1)


def _failure(path: str, failed: list[Finding]) -> str | None:
    if not failed:
        return None
    what = "; ".join(f"{one.check}: {one.text}" for one in failed[:2])
    more = f"; and {len(failed) - 2} more" if len(failed) > 2 else ""
    return f"{path}: {what}{more}"

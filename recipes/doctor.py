"""`spectrain doctor`: what is wrong with a head's checkpoint, and does the head guess at all?

A head that is wrong raises nothing where it runs, its drafts are merely not accepted. So everything
that can be told without running is told (export/), the head then guesses on replies that the target
writes, and common mistakes are undone one at a time to see whether drafts are accepted then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from spectrain.core.config import Config
from spectrain.core.target import Target
from spectrain.data.conversations import Conversation
from spectrain.data.reading import read_conversations
from spectrain.evaluation import behaviour
from spectrain.evaluation.summary import DEFINITIONS
from spectrain.export import record, stored
from spectrain.export.formats import reader_of
from spectrain.export.found import Found
from spectrain.export.layout import Finding, fit
from spectrain.heads.io import find_head
from spectrain.recipes.doctor_patient import Patient
from spectrain.recipes.doctor_report import render
from spectrain.recipes.doctor_verdicts import verdicts
from spectrain.recipes.generate import ids_of
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

    own = list(reader.findings(found, target))
    patient = Patient(reader, found, target, own, prompts, config.max_new_tokens, config.seed)
    findings = [*own, *record.findings(found, target)]
    said = {one.check: _badness(one) for one in sorted(findings, key=_badness)}
    # Beyond the headers only where they are what they should be: else they may claim any size.
    general = [stored.types(found), *(stored.values(found) if fit(own) else ())]
    findings += [one for one in general if _news(one, said)]
    if not any(one.verdict == "fail" for one in findings):
        findings += [one for one in patient.examine() if _news(one, said)]
    accepted = patient.behave()
    tried = patient.tried()
    findings += verdicts(accepted, tried, patient.further())

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


def _ids(target: Target, conversation: Conversation) -> Tensor:
    """The prompt's ids; for a target without a chat template those of its last message alone."""
    if target.tokenizer.chat_template:
        return ids_of(target, conversation)
    return torch.tensor(target.tokenizer(str(conversation.messages[-1]["content"]))["input_ids"])


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

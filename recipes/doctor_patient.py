"""A head that `doctor` runs: as it is, and with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from spectrain.core.batch import Batch
from spectrain.core.errors import SpectrainError
from spectrain.core.progress import progress
from spectrain.core.target import Target
from spectrain.data.online import read
from spectrain.evaluation import behaviour
from spectrain.evaluation.behaviour import Seen
from spectrain.evaluation.causes import Cause, causes
from spectrain.export import health, norm_placement, stored
from spectrain.export.found import Found
from spectrain.export.layout import Finding, Reader, Suspect, fit, load
from spectrain.heads.base import DraftHead
from spectrain.recipes.doctor_verdicts import ranked
from spectrain.recipes.evaluate import MAX_DRAFT
from spectrain.recipes.import_head import further


@dataclass(frozen=True)
class _Change:
    """What was changed and how it is mended for good; the head and what it reads then.

    position: the first one that is another one then · against: the head as its files say, where
    that is not the one that is examined · leak: whether the batch tells the head the answer · seen:
    whether a finding tells of it, too
    """

    name: str
    fix: str
    head: DraftHead
    batch: Batch
    position: int = 1
    against: DraftHead | None = None
    leak: bool = False
    seen: bool = False


class Patient:
    """The head, as it is and with one thing changed, on replies that the target writes once.

    findings: the reader's · head: None where it cannot be run, as before it is loaded
    """

    def __init__(
        self,
        reader: Reader,
        found: Found,
        target: Target,
        findings: list[Finding],
        prompts: list[Tensor],
        longest: int,
        seed: int,
    ) -> None:
        self.reader, self.found, self.target = reader, found, target
        self.findings = findings
        self.head: DraftHead | None = None
        self.prompts, self.longest, self.seed = prompts, longest, seed
        self._replies: Batch | None = None
        self._batches: dict[tuple[int, ...], Batch] = {}
        self._plain: list[Seen] = []

    def examine(self) -> list[Finding]:
        """Load the head and look at it; it can be run then if it can be fed."""
        head = self._loaded(self.found, self.findings)
        self.head = head if health.can_be_fed(head, self.target) else None
        return list(health.findings(head, self.target, self._called))

    def further(self) -> str:
        """How the head is trained further; one of another layout is imported for that first."""
        if self.head is None:
            return ""
        path = str(self.found.path) if self.reader.name == "spectrain" else "IMPORTED"
        return further(self.head.family, self.target.name, path)

    def batch(self, head: DraftHead) -> Batch:
        """The replies with what this head reads."""
        if self._replies is None:
            self._replies = behaviour.answered(self.target, self.prompts, self.longest)
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
        self._plain = behaviour.seen(self.head, batch, steps)
        accepted = behaviour.measured(self.target, self.head, batch, steps, self.seed)
        for row, one in zip(accepted["positions"], self._plain, strict=True):
            over = behaviour.over_blind(one, self.seed)
            row |= {"blind": one.blind_value, "over_blind": over}
            row |= {"knows": behaviour.knows(one, over), "not_finite": one.broken}
        return {"blind": self._plain[0].blind_value, **accepted}

    def tried(self) -> list[dict[str, Any]]:
        """What was changed, and acceptance at the first position that this changes, the best first;
        asked behind `behave`."""
        if self._plain and self._plain[0].value is None:
            return []
        rows: list[dict[str, Any]] = []
        outcomes = [(place, one.hits) for place, one in enumerate(self._plain, 1)]
        names: set[str] = set()  # a layout and the head's kind may know of the same mistake
        with progress(None, "undo common mistakes", "tried") as bar:
            for change in self._changes():
                at = change.position
                if at > change.head.longest_draft or change.name in names:
                    continue
                names.add(change.name)
                bar.update()
                changed = behaviour.seen(change.head, change.batch, at)[-1]
                if changed.hits.any() and any(
                    at == place and np.array_equal(changed.hits, hits) for place, hits in outcomes
                ):
                    continue  # what this head does not read, or the same change by another name
                outcomes.append((at, changed.hits))
                rows.append(self._row(change, changed))
        return ranked(rows)

    def _row(self, change: _Change, changed: Seen) -> dict[str, Any]:
        plain = self._plain[change.position - 1] if self._plain else None
        if change.against is not None:
            plain = behaviour.seen(change.against, change.batch, change.position)[-1]
        if plain is None:
            gain = None
            likely = behaviour.knows(changed, behaviour.over_blind(changed, self.seed)) is True
        else:
            gain = behaviour.lift(plain, changed, self.seed)
            likely = behaviour.lifts(plain, gain)
            if change.leak:
                likely &= behaviour.leaked(plain, changed, self.seed)
        return {
            "name": change.name,
            "position": change.position,
            "before": None if plain is None else plain.value,
            "accepted": changed.value,
            "gain": gain,
            "likely": likely,
            "seen": change.seen,
            "fix": change.fix,
        }

    def _changes(self) -> Iterator[_Change]:
        """Everything that is tried."""
        for one, say in norm_placement.said(self.found, self.reader):
            if (head := self._built(one)) is not None:
                against = self._built(one)
                say(against)
                yield _Change(one.name, one.fix, head, self.batch(head), one.position, against)
        if fit(self.findings):
            for source in (
                self.reader.suspects(self.found, self.target),
                stored.suspects(self.found),
            ):
                for one in source:
                    if (head := self._built(one)) is not None:
                        batch = self.batch(head)
                        seen = one.seen
                        yield _Change(one.name, one.fix, head, batch, one.position, seen=seen)
        if self.head is None:
            return
        batch = self.batch(self.head)
        for cause in causes(self.target, self.head, batch, self._called):
            yield _Change(cause.name, self._fix(cause), self.head, cause.batch, leak=cause.leak)
        for name, fix, mend in health.mends(self.head, self.target, self._called):
            yield _Change(name, fix, self._mended(mend), batch, seen=True)
        for name, fix, mend, position in norm_placement.mends(self.head, self.reader):
            yield _Change(name, fix, self._mended(mend), batch, position)

    def _mended(self, mend: Callable[[DraftHead], None]) -> DraftHead:
        head = self._loaded(self.found, self.findings)
        mend(head)
        return head

    def _loaded(self, found: Found, findings: list[Finding]) -> DraftHead:
        return load(self.reader, found, self.target, findings).to(self.target.dtype)

    def _built(self, one: Suspect) -> DraftHead | None:
        """None where more is wrong with it, which its findings say."""
        try:
            findings = list(self.reader.findings(one.found, self.target))
            return self._loaded(one.found, findings)
        except SpectrainError:
            return None

    def _called(self, name: str) -> str:
        """What the file calls a tensor of the head."""
        return self.reader.called(self.found, name)

    def _fix(self, cause: Cause) -> str:
        if cause.training:
            return f"{cause.fix}: {self.further()}"
        key = self.reader.layers_key(cause.layers) if cause.layers else ""
        return f"in config.json, set {key}: {cause.fix}" if key else cause.fix

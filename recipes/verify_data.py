"""`spectrain verify-data`: is a feature store what `prepare` writes, and what its target says?

files and checksums → every invariant, shard by shard; with the target at hand, where its replies
begin and end → the rows as a whole → the target: its output layer on stored states, and a second
reading of a few rows
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from spectrain.core.config import Config
from spectrain.core.errors import SpectrainError
from spectrain.core.files import read_json
from spectrain.core.progress import progress
from spectrain.core.show import WIDTH
from spectrain.core.target import Target
from spectrain.data.manifest import (
    MANIFEST,
    fingerprint_of,
    map_tensors,
    read_manifest,
    require_intact,
)
from spectrain.data.store import FeatureStore
from spectrain.data.tokenise import rendering_hash
from spectrain.data.verify import GROUND, Expected, Shard, check_shard
from spectrain.data.verify_rows import Across
from spectrain.data.verify_target import READ, check_facts, check_states, sample
from spectrain.data.verify_text import OF_WORDS, Speech, check_text

# Each check and what it states, in the order of the table.
MEANING = {
    "manifest": "the store is finished, its settings as they were",
    "checksums": "every file is there and as it was written",
    "facts": "each row is described and has something to learn",
    "shapes": "tensors are there, of the right types and shapes",
    "offsets": "rows follow each other from first token to last",
    "lengths": "lengths and supervised tokens are those of the facts",
    "replies": "replies are counted from 1 on, each one stretch",
    "predicting": "a state before every reply token",
    "tokens": "tokens are in the vocabulary",
    "teacher": "the target's choices and log-probabilities can be",
    "likeliest": "further log-probabilities fall from the choice's",
    "features": "features are finite, scales above 0",
    "reply begins": "each reply stands behind a generation prompt",
    "reply ends": "and ends in an end-of-turn token, its only one",
    "counts": "the manifest's counts are those of the rows",
    "order": "rows by hash, each once at a temperature",
    "splits": "no prompt is in both splits",
    "output layer": "lm_head(last state) gives what is stored beside it",
    "second reading": "the target, reading again, gives the stored states",
}
OF_TARGET = ("output layer", "second reading")
TOLD = 3  # problems of one check that are shown


class VerifyConfig(Config):
    """Settings of `verify-data`."""

    store: Path = Field(Path("runs/store"), description="feature store that `prepare` wrote")
    target: str | None = Field(
        None, description="target: embedded name, folder or hub id; default: the manifest's"
    )
    without_target: bool = Field(
        False, description="look at the files alone: no model is loaded, nothing computed"
    )
    device: str = Field("auto", description="where the target runs: auto, cpu, cuda, cuda:1")
    sample: int = Field(256, ge=1, description="positions at which the output layer is asked")
    seed: int = Field(0, ge=0, description="of what is sampled")


class Findings:
    """What the checks found: how often each was made, and what was wrong."""

    def __init__(self) -> None:
        self.made = dict.fromkeys(MEANING, 0)
        self.wrong: dict[str, list[str]] = {name: [] for name in MEANING}
        self.seen: dict[str, str] = {}

    def add(self, name: str, wrong: str | None, seen: str | None = None) -> bool:
        """Note a check that was made; whether it holds."""
        self.made[name] += 1
        if wrong is not None:
            self.wrong[name].append(wrong)
        if seen is not None:
            self.seen[name] = seen
        return wrong is None

    @property
    def failed(self) -> list[str]:
        return [name for name, wrong in self.wrong.items() if wrong]

    def report(self) -> dict[str, dict[str, Any]]:
        """By check: verdict (holds, fails, untried), what it states, what was seen or is wrong."""
        return {
            name: {
                "verdict": "fails" if self.wrong[name] else "holds" if made else "untried",
                "states": MEANING[name],
                "seen": self.seen.get(name),
                "wrong": self.wrong[name][:TOLD],
                "times_wrong": len(self.wrong[name]),
            }
            for name, made in self.made.items()
        }


def run(config: VerifyConfig) -> dict[str, Any]:
    """Check everything and return the report; `failure` says what does not hold.

    Raises SpectrainError for a folder without a store, a target that cannot be had, or one that
    the store was not made with.
    """
    manifest = read_manifest(config.store)
    if manifest is None:
        raise SpectrainError(
            "no feature store here", where=str(config.store), fix="check the folder"
        )
    findings = Findings()
    if findings.add("manifest", _not_of_a_store(manifest)):
        settings = manifest["settings"]
        target = None if config.without_target else _target(config, manifest)
        expected = Expected.of(
            settings, target and target.vocab_size, target and target.hidden_size
        )
        speech = target and _speech(target, settings, findings)
        across = _look(config.store, manifest, expected, speech, findings)
        if across is not None:
            findings.add("counts", across.wrong_counts(manifest["counts"]))
            findings.add("order", across.wrong_order())
            findings.add("splits", across.shared_prompts(), f"{across.told:,} prompts")
        if target is not None and expected.features and not findings.failed:
            _ask(config, target, findings)
    return {
        "store": str(config.store),
        "target": manifest.get("about", {}).get("target"),
        "shards": len(manifest["shards"]),
        "rows": sum(shard["rows"] for shard in manifest["shards"]),
        "bytes": sum(shard["bytes"] for shard in manifest["shards"]),
        "sound": not findings.failed,
        "checks": findings.report(),
        "failure": f"NOT SOUND: {', '.join(findings.failed)}" if findings.failed else None,
    }


def _not_of_a_store(manifest: dict) -> str | None:
    if not manifest["complete"]:
        return "its preparation was interrupted; run it again"
    own = fingerprint_of(manifest["settings"])
    if (told := manifest.get("fingerprint")) != own:
        return f"its settings are not those it was made with: fingerprint {told}, they give {own}"
    return None


def _target(config: VerifyConfig, manifest: dict) -> Target:
    """The target that the store was made with, computing in the type that it then did."""
    name = config.target or manifest["about"].get("target")
    if name is None:
        raise SpectrainError(
            "the manifest does not name its target",
            where=str(config.store / MANIFEST),
            fix="give it with --target, or look at the files alone with --without-target",
        )
    made = manifest["settings"]["target"]
    dtype = made.get("dtype", "auto").removeprefix("torch.")
    target = Target.load(name, dtype=dtype, device=config.device)
    if target.fingerprint != made["fingerprint"]:
        raise SpectrainError(
            f"the store holds features of another target ({made['fingerprint']}) than {name} "
            f"({target.fingerprint})",
            where=str(config.store),
            fix="give the one it was prepared with as --target, or --without-target",
        )
    return target


def _speech(target: Target, settings: dict, findings: Findings) -> Speech:
    """How the target's turns begin and end; how they begin only with the store's own template."""
    speech = Speech.of(target.tokenizer, target.stop_ids)
    if rendering_hash(target.tokenizer) != settings.get("template"):
        findings.seen["reply begins"] = "the target's template is not the one of the store"
        return replace(speech, prompts=())
    texts = ", ".join(repr(text) for text in speech.texts)
    findings.seen["reply begins"] = texts or "the template puts nothing there"
    return speech


def _look(
    store: Path, manifest: dict, expected: Expected, speech: Speech | None, findings: Findings
) -> Across | None:
    """Every shard; what the rows are as a whole, None where not all of them could be looked at."""
    across, whole = Across(), True
    size = sum(shard["bytes"] for shard in manifest["shards"])
    with progress(round(size / 1e6), "verify", "MB") as bar:
        for record in manifest["shards"]:
            shard = _read(store, record, findings)
            found = dict(check_shard(shard, expected)) if shard is not None and shard.facts else {}
            if found and speech is not None and not any(map(found.get, (*GROUND, *OF_WORDS))):
                found |= check_text(shard, speech)
            for name, wrong in found.items():
                findings.add(name, wrong and f"{record['file']}: {wrong}")
            sure = shard is not None and not any(found.get(name) for name in GROUND)
            if sure and shard.facts:
                across.add(shard)
            whole &= sure
            bar.update(record["bytes"] / 1e6)
    return across if whole else None


def _read(store: Path, record: dict, findings: Findings) -> Shard | None:
    """A shard whose files are as they were written, and mapped."""
    try:
        require_intact(store / record["facts"], record["facts_sha256"], None)
        require_intact(store / record["file"], record["sha256"], record["bytes"])
        shard = Shard(
            map_tensors(store / record["file"]), read_json(store / record["facts"])["rows"]
        )
    except SpectrainError as error:
        findings.add("checksums", f"{error.where}: {error.what}")
        return None
    findings.add("checksums", None)
    findings.add("counts", _as_counted(record, shard))
    return shard


def _as_counted(record: dict, shard: Shard) -> str | None:
    if record["rows"] == len(shard.facts):
        return None
    return (
        f"{record['file']}: the manifest says {record['rows']} rows, {len(shard.facts)} are there"
    )


def _ask(config: VerifyConfig, target: Target, findings: Findings) -> None:
    """What the target says; only of a store whose files are sound."""
    store = FeatureStore.open(config.store)
    rows = sample(store, config.sample, config.seed)
    facts = check_facts(store, target, rows, config.sample, config.seed)
    findings.add(
        "output layer",
        facts.wrong,
        f"{facts.positions:,} positions, the same choice at {facts.same:.1%}; at most "
        f"{facts.worst:.2g} of the largest logit off (allowed {facts.allowed:.2g})",
    )
    reading = check_states(store, target, rows[:: max(1, len(rows) // READ)][:READ])
    found = ", ".join(f"{name} {worst:.2g}" for name, worst in reading.worst.items())
    findings.add(
        "second reading",
        reading.wrong,
        f"{reading.tokens:,} tokens; differences, at most: {found} (allowed {reading.allowed:.2g})",
    )


def render(report: dict[str, Any]) -> str:
    """What a person reads: a line for each check, what is wrong, the verdict."""
    lines = [
        f"store {report['store']}",
        f"of {report['target']}: {report['rows']:,} rows, {report['shards']:,} shards, "
        f"{report['bytes'] / 1e6:,.0f} MB",
        "",
    ]
    for name, check in report["checks"].items():
        lines.append(f"{name:<16}{check['verdict']:<9}{check['states']}")
        told = ([check["seen"]] if check["seen"] else []) + check["wrong"]
        if check["times_wrong"] > len(check["wrong"]):
            told.append(f"and {check['times_wrong'] - len(check['wrong']):,} more")
        for text in told:
            lines += textwrap.wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
    lines += ["", report["failure"] or _verdict(report["checks"])]
    return "\n".join(lines)


def _verdict(checks: dict[str, dict[str, Any]]) -> str:
    asked = all(checks[name]["verdict"] == "holds" for name in OF_TARGET)
    return "sound" if asked else "sound, as far as the files tell: no target was asked"

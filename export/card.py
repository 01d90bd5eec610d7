"""The page of an exported head, README.md of its folder: how it is started, what it is worth, what
it was made of. Numbers are those that were measured; what was not measured says so, and how to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spectrain.export.card_numbers import acceptance, speed, valued
from spectrain.export.layout import Launch
from spectrain.export.markdown import code, front_matter, listed, plain, table
from spectrain.export.measured import Known, Report
from spectrain.heads.base import HeadConfig

README = "README.md"
_PLACE = "FOLDER"  # what stands for the folder where nobody knows yet where it will lie
_SETTINGS = (
    *("optimizer", "lr", "matrix_lr", "weight_decay", "schedule", "warmup", "clip"),
    *("batch_size", "mixed_precision", "init", "seed"),
)


@dataclass(frozen=True)
class About:
    """What the page tells.

    base: the target as others call it · here: as our own commands do
    on_hub: whether `base` is a name of the model hub
    base_note: what to know of it · rounded: whether the trained head has other numbers than `dtype`
    holds · parameters: numbers in the written tensors
    files: name → bytes · repo: where it is pushed to
    """

    format: str
    layout: str
    config: HeadConfig
    base: str
    here: str
    on_hub: bool
    base_note: str | None
    license: str
    dtype: str
    rounded: bool
    parameters: int
    launches: list[Launch]
    files: dict[str, int]
    known: Known
    datasets: tuple[str, ...] = ()
    repo: str | None = None


def readme(about: About) -> str:
    """The whole page."""
    return "\n\n".join(_parts(about)) + "\n"


def launched(launch: Launch, folder: str) -> str:
    """The command line for an export that lies in `folder`. Its text may have braces of its own,
    and quotes: a name that would break them is left for the reader to fill in."""
    return launch.text.replace("{folder}", folder if plain_name(folder) else _PLACE)


def plain_name(folder: str) -> bool:
    return re.fullmatch(r"[\w./~+@=-]+", folder) is not None


def _parts(about: About) -> Iterator[str]:
    config, known = about.config, about.known
    yield front_matter(
        {
            "license": about.license,
            "base_model": about.base if about.on_hub else None,
            "library_name": "spectrain",
            "pipeline_tag": "text-generation",
            "tags": ["speculative-decoding", "draft-head", config.family, about.format],
            "datasets": list(about.datasets),
        }
    )
    yield f"# {plain(config.family)} draft head for {plain(about.base)}"
    yield (
        "A draft head for speculative decoding. It guesses the next tokens, the target model "
        "checks them in one forward pass and keeps those that it would have written itself."
    )
    yield table(("", ""), _facts(about))
    if about.base_note:
        yield f"Note: {plain(about.base_note)}."
    if about.known.alpha is None and about.known.heldout is None:
        yield "Note: what this head is worth was not measured."
    yield "## How to run it"
    yield from _launch(about)
    yield "## Acceptance"
    if about.rounded:
        yield f"Of the head as it was trained, before it was rounded to {about.dtype}."
    yield from acceptance(known, about.here)
    yield "## Speed"
    yield speed(known.plan)
    yield "## Training"
    yield from _training(known)
    yield "## Files"
    yield table(("file", "bytes"), ((n, f"{size:,}") for n, size in about.files.items()))
    yield (
        "`spectrain-export.json` holds the checksum of each file, and where all of it comes from. "
        "The weights were read back from the written files and compared with the trained head"
        f"{f', rounded to {about.dtype}' if about.rounded else ''}, tensor by tensor and draft by "
        "draft."
    )
    yield "## Licence"
    chosen = about.license != "other"
    yield (
        f"{plain(about.license) if chosen else 'No licence was chosen'} for the head. It was "
        f"trained on what its target says and is of use with it alone: the licence of "
        f"{plain(about.base)} governs all the same."
    )


def _facts(about: About) -> Iterator[tuple[str, str]]:
    config, target = about.config, about.config.target
    yield "format", f"{about.format} (layout {about.layout}), {about.dtype}"
    yield "target", f"{about.base}: {target.num_layers} layers, hidden size {target.hidden_size:,}"
    yield "fingerprint of the target's weights", target.fingerprint
    yield "draft steps it was trained for", str(config.steps)
    yield "draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
    yield "parameters", f"{about.parameters:,}"
    if about.known.alpha is not None:
        first = about.known.alpha.temperatures[0]
        tau = first.tau[min(config.steps, len(first.tau)) - 1]
        value, interval = valued(tau, 2)
        yield (
            f"τ, tokens per target forward (temperature {first.temperature:g}, {tau.draft} "
            "drafted; see below)",
            f"{value} ({interval})" if interval else value,
        )


def _launch(about: About) -> Iterator[str]:
    folder = _PLACE
    if about.repo:
        folder = about.repo.rsplit("/", 1)[-1]
        yield code(f"hf download {about.repo} --local-dir {folder}", "bash")
    elif about.launches:
        yield f"`{_PLACE}` is the folder of these files."
    for one in about.launches:
        yield f"### {plain(one.engine)}"
        yield code(launched(one, folder), "bash" if one.language == "shell" else one.language)
        if one.note:
            yield plain(one.note)
    if not about.launches:
        yield "No command line is known for this format."


def _training(known: Known) -> Iterator[str]:
    facts = [*_data(known), *_run(known.report)]
    if facts:
        yield listed(facts)
    elif known.provenance is None:
        yield "Nothing is known of it: the head came without the files of its run."
    if known.provenance is not None:
        settings = _settings(known.provenance.arguments)
        yield "Settings: " + ", ".join(f"{plain(name)} {plain(value)}" for name, value in settings)


def _data(known: Known) -> Iterator[tuple[str, str]]:
    if known.store is not None:
        counts, about = known.store["counts"], known.store["about"]
        rows, replies = counts["rows"]["train"], counts["supervised_tokens"]["train"]
        yield "data", str(about.get("source", "not known"))
        settings = known.store["settings"]
        if settings.get("backend"):
            asked = ", ".join(f"{one:g}" for one in settings["temperature"])
            yield "replies", f"written by the target itself, at temperature {asked}"
        yield "training rows", f"{rows:,}, with {replies:,} reply tokens that are learnt"
        yield "held-out rows", f"{counts['rows']['heldout']:,}"
        yield "fingerprint of the data", str(known.store["fingerprint"])
    elif known.report is not None and known.report.store:
        yield "fingerprint of the data", known.report.store


def _run(report: Report | None) -> Iterator[tuple[str, str]]:
    if report is None:
        return
    yield "steps", f"{report.steps:,}"
    yield "reply tokens seen, repetitions included", f"{report.supervised_tokens:,}"
    if report.trained_parameters is not None:
        yield "trained parameters", f"{report.trained_parameters:,}"
    machine = report.environment
    device = machine.get("device")
    on = (machine.get("cpu") if device == "cpu" else device) or "a machine that is not known"
    yield "time", f"{report.seconds:,.0f} s on {on}"
    held = report.vocabulary
    if held and held.get("heldout") is not None:
        yield (
            "of the target's choices the draft vocabulary holds",
            f"{held['heldout']:.1%} on held-out rows; what is outside is always rejected",
        )


def _settings(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those that shape the head; paths of somebody's machine are no part of a page."""
    for name in _SETTINGS:
        if name != "init" and arguments.get(name) is not None:
            yield name, arguments[name]
    if arguments.get("init") is not None:
        yield "init", "from another head"
    trunk = arguments.get("trunk")
    if isinstance(trunk, dict) and trunk.get("mode", "frozen") != "frozen":
        yield "target trained along", trunk["mode"]
    head = arguments.get("head")
    for name, value in (head if isinstance(head, dict) else {}).items():
        yield f"head.{name}", value

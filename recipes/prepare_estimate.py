"""`prepare --dry-run`: rows, tokens, bytes and time, before anything is spent.

Exact where replies are given. Where the target is to answer, nobody knows how long it will talk:
what is told takes every reply for as long as it may be, and a conversation for one row (or for a
row a turn where the template shows older turns otherwise). Speeds are measured on a few rows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path

import torch

from spectrain.core.errors import SpectrainError
from spectrain.core.files import free_bytes
from spectrain.core.target import Target
from spectrain.data.encode import encode
from spectrain.data.fates import Fates
from spectrain.data.reading import read_into
from spectrain.data.render import keeps_history
from spectrain.data.replies import plan_units
from spectrain.data.rows import RowRules, ask_round, questions_of, rows_of
from spectrain.data.shard import DTYPES, bytes_needed
from spectrain.data.spool import Spool
from spectrain.data.tokenise import require_template
from spectrain.generator.answering import OwnTarget
from spectrain.recipes.prepare_config import PrepareConfig

_PROBE_TOKENS = 2048  # read once to learn how fast the target reads
_AROUND = 16  # tokens that a template may put around a later text of a user
_PROBE_REPLY = 17  # tokens of each reply made to learn how fast it answers


@dataclass
class Extent:
    """rows, those of them that are held out, their tokens, and those of replies."""

    rows: int = 0
    heldout: int = 0
    tokens: int = 0
    supervised: int = 0

    def add(self, tokens: int, supervised: int, split: str) -> None:
        self.rows += 1
        self.heldout += split == "heldout"
        self.tokens += tokens
        self.supervised += supervised

    def __add__(self, other: Extent) -> Extent:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Extent(*(one + two for one, two in pairs))


def estimate(
    config: PrepareConfig, target: Target, rules: RowRules, layers: tuple[int, ...]
) -> dict:
    """The report of a dry run; `estimate` are the lines to print. Nothing is written."""
    fates, start = Fates(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Spool(Path(folder)) as spool:
        sources = read_into(
            spool, config.prompts, config.regenerate, config.on_bad_row, config.limit, fates
        )
        if any(conversation.text is None for _, conversation in spool.conversations()):
            require_template(target.tokenizer)
        given = _given(spool, target, rules, fates)
        ask_round(spool, 0, target.tokenizer, rules, "", fates)
        text_seconds = time.perf_counter() - start
        asked, replies = _asked(spool, target, rules, config.max_new_tokens)
        if not (given + asked).rows:
            raise SpectrainError(
                f"no row is left: {', '.join(f'{n} {why}' for why, n in sorted(fates.items()))}",
                where=", ".join(source.path for source in config.prompts),
                fix="mend the source or the settings that drop its rows",
            )
        reading = _reading_rate(target, spool, layers)
        answering = None
        if replies and config.server is None:
            answering = _answering_rate(target, spool, config)
        used = len(spool)
    most = given + asked
    size = 0 if config.features == "none" else _bytes(config, target, layers, most)
    seconds = {
        "text": text_seconds,
        "answer": replies * config.max_new_tokens / answering if answering else None,
        "capture": most.tokens / reading if config.features == "stored" else 0.0,
    }
    free = free_bytes(config.store)
    report = {
        "sources": sources,
        "used": used,
        "dropped": dict(sorted(fates.items())),
        "dropped_at": fates.places,
        "given": given.__dict__,
        "at_most": most.__dict__,
        "replies": replies,
        "bytes": size,
        "free_bytes": free,
        "tokens_per_second": {"answer": answering, "capture": reading},
        "seconds": seconds,
    }
    return report | {"estimate": list(_lines(report, config))}


def _given(spool: Spool, target: Target, rules: RowRules, fates: Fates) -> Extent:
    """Rows with given replies, and texts: all of it is known."""
    known = Extent()
    for place, conversation in spool.conversations():
        if conversation.answered:
            for row in rows_of(conversation, place, spool, target, rules, fates):
                known.add(len(row.tokens), row.supervised, row.split)
    return known


def _asked(spool: Spool, target: Target, rules: RowRules, longest: int) -> tuple[Extent, int]:
    """(rows that the target is to answer, each reply as long as it may be; replies)."""
    most, replies = Extent(), 0
    one_row = keeps_history(target.tokenizer)
    for _, name, _, ids, _ in spool.questions():
        conversation = spool.conversation(name)
        turns = conversation.turns
        # What users say later is read by itself, each text with the template's words around it.
        later = sum(
            len(encode(target.tokenizer, message["content"] or "")) + _AROUND
            for message in conversation.messages * (turns > 1)
        )
        tokens = min(len(ids) + later + turns * longest, rules.max_length)
        supervised = min(turns * longest, rules.max_length)
        # A template that shows older turns otherwise makes a row of each; so may a reply that,
        # read again as text, has other tokens.
        if not one_row:
            supervised = min(longest, rules.max_length)
        for _ in range(1 if one_row else turns):
            most.add(tokens, supervised, rules.split(conversation))
        replies += turns
    return most, replies


@torch.inference_mode()
def _reading_rate(target: Target, spool: Spool, layers: tuple[int, ...]) -> float:
    """Tokens per second of the target's forward over text of this kind."""
    lengths = [len(ids) for _, _, _, ids, _ in islice(spool.questions(), 64)] or [256]
    length = max(16, min(sum(lengths) // len(lengths) + 64, target.max_length))
    tokens = torch.ones(max(1, _PROBE_TOKENS // length), length, dtype=torch.int64)
    tokens = tokens.to(target.device)
    target.forward(tokens[:1], aux_layers=layers)
    start = time.perf_counter()
    last = target.forward(tokens, aux_layers=layers).last
    target.logits(last[:, ::2].reshape(-1, last.shape[-1])[:256]).sum().item()
    return tokens.numel() / (time.perf_counter() - start)


def _answering_rate(target: Target, spool: Spool, config: PrepareConfig) -> float:
    """Tokens per second over all replies of one unit, its prompts from the middle by length, as if
    each had config.max_new_tokens: reading the prompts is told apart from the rest."""
    middle = max(0, spool.asked() // 2 - config.reply_batch // 2)
    questions = list(islice(questions_of(spool), middle, middle + config.reply_batch))
    seconds = []
    for longest in (1, _PROBE_REPLY):
        backend = OwnTarget(target, longest, config.top_p)
        unit = next(plan_units(questions, config.reply_batch))
        start = time.perf_counter()
        list(backend.answer([unit]))
        seconds.append(time.perf_counter() - start)
    per_token = (seconds[1] - seconds[0]) / (_PROBE_REPLY - 1)
    whole = seconds[0] + per_token * (config.max_new_tokens - 1)
    return len(unit.questions) * config.max_new_tokens / max(whole, 1e-9)


def _bytes(config: PrepareConfig, target: Target, layers: tuple[int, ...], most: Extent) -> int:
    return bytes_needed(
        most.tokens,
        most.supervised,
        most.rows,
        target.hidden_size,
        len(layers),
        DTYPES[config.dtype],
        config.keeps_last_everywhere,
        config.teacher_top,
    )


def _lines(report: dict, config: PrepareConfig) -> Iterator[str]:
    given, most, rates = report["given"], report["at_most"], report["tokens_per_second"]
    yield "dry run: nothing was written"
    yield f"conversations: {report['used']:,} of {sum(report['sources']):,}"
    dropped = ", ".join(f"{n} {reason}" for reason, n in report["dropped"].items())
    yield f"dropped so far: {dropped or 'nothing'}"
    yield f"{'':<22}{'rows':>10}{'tokens':>14}{'supervised':>14}"
    for name, extent in (("replies given", given), ("with replies, at most", most)):
        yield (f"{name:<22}{extent['rows']:>10,}{extent['tokens']:>14,}{extent['supervised']:>14,}")
    yield f"reading and tokenising: {_clock(report['seconds']['text'])}"
    if report["replies"]:
        tokens = report["replies"] * config.max_new_tokens
        line = f"answer: {report['replies']:,} replies, at most {tokens:,} tokens"
        if rates["answer"]:
            together = min(config.reply_batch, report["replies"])
            line += (
                f"; {rates['answer']:,.0f} tokens/s, {together} prompts together: at most "
                f"{_clock(report['seconds']['answer'])}"
            )
        else:
            line += ", by the server, which was not asked"
        yield line
    if config.features == "none":
        yield "capture: none, training asks the target"
        return
    yield (
        f"capture: {rates['capture']:,.0f} tokens/s: at most {_clock(report['seconds']['capture'])}"
    )
    per_token = report["bytes"] / max(most["tokens"], 1)
    yield (
        f"store: at most {report['bytes'] / 1e6:,.0f} MB ({per_token:,.0f} bytes a token, "
        f"{config.dtype}), {report['free_bytes'] / 1e6:,.0f} MB are free"
    )
    if report["bytes"] > report["free_bytes"]:
        yield "note: that may not fit; --set dtype=int8, --family or --limit make it smaller"


def _clock(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

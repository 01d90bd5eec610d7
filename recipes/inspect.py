"""`spectrain inspect`: what training will see of a source or of a store, and what becomes of the
rest. Of the target only the tokenizer is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import date
from itertools import groupby, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from spectrain.core.config import Config, as_list
from spectrain.core.errors import SpectrainError
from spectrain.core.pretrained import TextSide, text_side
from spectrain.data.conversations import Conversation, Regenerate, split_of
from spectrain.data.dates import dated
from spectrain.data.fates import PLACES, Fates
from spectrain.data.reading import read_into
from spectrain.data.shard import Row
from spectrain.data.sources import Source
from spectrain.data.spool import Spool
from spectrain.data.store import SPLITS, FeatureStore
from spectrain.data.tokenise import (
    Refused,
    given_rows,
    prompt_ids,
    rendering_hash,
    require_template,
    text_row,
)
from spectrain.recipes.inspect_report import render
from spectrain.recipes.prepare_config import TEMPLATE_DATE, TemplateDate

__all__ = ["InspectConfig", "render", "run"]

TARGET = "smollm2-135m"
WHOLE = "whole source"
TO_ANSWER = "to be answered by the target"
T = TypeVar("T")


class InspectConfig(Config):
    """Settings of `inspect`; those that `prepare` has too mean the same there, but for two. `limit`
    is how many conversations are looked at (prepare: how many there are; by default all of them),
    and `on_bad_row` skips by default, since what is bad is what one wants to see (prepare stops).
    """

    target: str | None = Field(
        None, description=f"target, for its tokenizer; default: that of the store, else {TARGET}"
    )
    prompts: Annotated[tuple[Source, ...], BeforeValidator(as_list)] = Field(
        (), description="files or datasets of prompts, conversations or plain texts"
    )
    store: Path | None = Field(None, description="feature store instead")
    limit: int | None = Field(
        1000, ge=1, description="look at so many conversations, the first in order of content hash"
    )
    show: int = Field(3, ge=0, description="rows that are printed, of those that are kept")
    row: str | None = Field(
        None, description="print this one alone: its number, from 1, or the beginning of its id"
    )
    regenerate: Regenerate = Field("auto", description="as prepare is told")
    template_date: TemplateDate = Field(
        None,
        description="YYYY-MM-DD, the date told by chat templates that tell one; default: "
        f"{TEMPLATE_DATE}",
    )
    max_length: int = Field(2048, ge=2, description="tokens at which a row is cut")
    max_new_tokens: int = Field(256, ge=1, description="room that a prompt leaves for its reply")
    heldout: float = Field(0.1, ge=0, le=1, description="fraction of the prompts for evaluation")
    on_bad_row: Literal["stop", "skip"] = Field(
        "skip", description="what to do at a line that is no conversation or text"
    )

    @model_validator(mode="after")
    def _one_source(self) -> InspectConfig:
        if (self.store is None) == (not self.prompts):
            raise ValueError("give either --prompts FILE or --store FOLDER")
        return self


def run(config: InspectConfig) -> dict[str, Any]:
    """The report: `rows` (facts of each, with its text as `parts`), `fates` (how many rows ended
    how, with the first places), and what was read."""
    if config.store:
        return _of_store(config)
    with dated(date.fromisoformat(config.template_date or TEMPLATE_DATE)):
        return _of_prompts(config)


# ── a source ─────────────────────────────────────────────────────────────────


def _of_prompts(config: InspectConfig) -> dict[str, Any]:
    table = _Fates()
    name = config.target or TARGET
    side = text_side(name)
    with TemporaryDirectory() as folder, Spool(Path(folder)) as spool:
        read_into(spool, config.prompts, config.regenerate, config.on_bad_row, None, table.unread)
        total = len(spool)
        chosen = enumerate(spool.conversations(), 1)
        if config.row is None:
            chosen = islice(chosen, config.limit)
        else:
            chosen = _named(config.row, chosen, total, lambda found: found[1].id)
        rows, read = [], 0
        for number, (place, conversation) in chosen:
            read += 1
            if conversation.text is None:
                require_template(side.tokenizer)
            made, reasons = _rows(config, side, conversation)
            for reason in reasons:
                table.dropped.drop(reason, place)
            for row in made:
                table.keep(row, place, asked=not conversation.answered)
                if config.row is not None or len(rows) < config.show:
                    rows.append(_facts(number, row, side.tokenizer) | {"places": [place]})
    return {
        "target": name,
        "source": ", ".join(source.path for source in config.prompts),
        "read": f"{read:,} of {total:,} conversations",
        "note": None,
        "rows": rows,
        "fates": table.rows(f"{read:,} read" if read < total else None),
    }


def _rows(
    config: InspectConfig, side: TextSide, conversation: Conversation
) -> tuple[list[Row], list[str]]:
    """What becomes of a conversation; a prompt is a row in which nothing is supervised yet."""
    import torch

    length = min(config.max_length, side.max_length)
    given = {"split": split_of(conversation.prompt_id, config.heldout), "max_length": length}
    if conversation.text is not None:
        return text_row(side.tokenizer, conversation, **given)
    if conversation.answered:
        return given_rows(side.tokenizer, side.stop_ids, conversation, **given)
    try:
        longest = min(config.max_length - 1, side.max_length - config.max_new_tokens)
        asked = replace(conversation, messages=conversation.prompt([]))  # its first reply
        ids = prompt_ids(side.tokenizer, asked, longest)
    except Refused as refused:
        return [], [refused.reason]
    tokens = torch.tensor(ids, dtype=torch.int32)
    row = Row(
        conversation.id,
        given["split"],
        tokens,
        torch.zeros(len(ids), dtype=torch.int16),
        domain=conversation.domain,
    )
    return [row], []


class _Fates:
    """Rows counted by what becomes of them. unread: dropped while the whole source was read;
    dropped: of those that were looked at."""

    def __init__(self) -> None:
        self.unread, self.dropped = Fates(), Fates()
        self._kept: dict[str, dict[str, Any]] = {}

    def keep(self, row: Row, place: str, asked: bool) -> None:
        """Count a row that training will see, or a prompt that is asked first."""
        self._add(TO_ANSWER if asked else "kept", row, place)
        if row.truncated:
            self._add("of these cut at max_length", row, place)
        if row.finish == "length":
            self._add("of these with a reply cut off", row, place)

    def _add(self, fate: str, row: Row, place: str) -> None:
        counts = self._kept.setdefault(
            fate, {"fate": fate, "rows": 0, "tokens": 0, "supervised": 0, "places": []}
        )
        counts["rows"] += 1
        counts["tokens"] += len(row.tokens)
        counts["supervised"] += row.supervised
        if len(counts["places"]) < PLACES:
            counts["places"].append(place)

    def rows(self, looked_at: str | None) -> list[dict[str, Any]]:
        """Kept ones first, then what is worth knowing of them, then the dropped ones. `of` is what
        each line counts: where only a part was `looked_at`, or the whole source; None: all."""
        order = ("kept", TO_ANSWER, "of these")
        kept = sorted(
            self._kept.values(),
            key=lambda row: next(n for n, word in enumerate(order) if row["fate"].startswith(word)),
        )
        dropped = [
            {
                "fate": f"dropped: {reason}",
                "rows": rows,
                "tokens": 0,
                "supervised": 0,
                "places": fates.places.get(reason, []),
                "of": of,
            }
            for reason, rows, fates, of in sorted(
                (
                    (reason, rows, fates, looked_at and of)
                    for fates, of in ((self.unread, WHOLE), (self.dropped, looked_at))
                    for reason, rows in fates.items()
                ),
                key=lambda found: found[0],
            )
        ]
        return [row | {"of": looked_at} for row in kept] + dropped


# ── a store ──────────────────────────────────────────────────────────────────


def _of_store(config: InspectConfig) -> dict[str, Any]:
    store = FeatureStore.open(config.store)
    name = config.target or store.manifest["about"].get("target")
    if name is None:
        raise SpectrainError(
            "the store does not say which target it is of",
            where=str(config.store),
            fix="give --target",
        )
    side = text_side(name)
    infos = [info for split in SPLITS for info in store.rows(split)]
    if config.row is None:
        chosen = list(enumerate(infos[: config.show], 1))
    else:
        chosen = _named(config.row, enumerate(infos, 1), len(infos), lambda info: info.id)
    rows = []
    for number, info in chosen:
        tokens, reply = store.text(info)
        row = Row(
            info.id,
            info.split,
            tokens,
            reply,
            info.domain,
            info.temperature,
            info.finish,
            info.truncated,
        )
        rows.append(_facts(number, row, side.tokenizer) | {"places": []})
    return {
        "target": name,
        "source": str(config.store),
        "read": f"{len(infos):,} rows",
        "note": _of_another(side.tokenizer, store),
        "rows": rows,
        "fates": _stored_fates(store),
    }


def _of_another(tokenizer, store: FeatureStore) -> str | None:
    if rendering_hash(tokenizer) == store.manifest["settings"].get("template"):
        return None
    return (
        "this is not the tokenizer or not the chat template that the store was made with: its "
        "text may come out wrong"
    )


def _stored_fates(store: FeatureStore) -> list[dict[str, Any]]:
    counts = store.manifest["counts"]
    table = [
        {
            "fate": f"kept, {split}",
            "rows": counts["rows"][split],
            "tokens": counts["tokens"][split],
            "supervised": counts["supervised_tokens"][split],
        }
        for split in SPLITS
    ]
    table.append({"fate": "of these cut at max_length", "rows": counts["truncated"]})
    table.append({"fate": "of these with a reply cut off", "rows": counts["length_stopped"]})
    table.append({"fate": "of these going round in circles", "rows": counts.get("loops", 0)})
    table += [
        {"fate": f"dropped: {reason}", "rows": rows}
        for reason, rows in sorted(counts["dropped"].items())
    ]
    return [{"tokens": 0, "supervised": 0, "places": [], "of": None} | row for row in table]


# ── rows as text ─────────────────────────────────────────────────────────────


def _named(
    row: str, entries: Iterable[tuple[int, T]], total: int, id_of: Callable[[T], str]
) -> list[tuple[int, T]]:
    """The entry of this number, or those whose id begins so. Raises SpectrainError when there is
    none."""
    number = int(row) if row.isdecimal() else 0
    chosen = [
        (place, found)
        for place, found in entries
        if (place == number if 1 <= number <= total else id_of(found).startswith(row))
    ]
    if not chosen:
        raise SpectrainError(
            f"no row {row!r}",
            where="--row",
            fix=f"give a number from 1 to {total} or the beginning of an id",
        )
    return chosen


def _facts(number: int, row: Row, tokenizer) -> dict[str, Any]:
    """A row for the report."""
    return {
        "number": number,
        "id": row.id,
        "split": row.split,
        "domain": row.domain,
        "tokens": len(row.tokens),
        "supervised": row.supervised,
        "temperature": row.temperature,
        "finish": row.finish,
        "truncated": row.truncated,
        "parts": list(_parts(row.tokens.tolist(), row.reply.tolist(), tokenizer)),
    }


def _parts(ids: list[int], reply: list[int], tokenizer) -> Iterator[dict[str, Any]]:
    """The text in stretches of one kind: reply (its number, 0 outside), special (whether it is made
    of added tokens, which the tokenizer never splits), text."""
    added = set(tokenizer.added_tokens_decoder)
    kinds = [(number, token in added) for token, number in zip(ids, reply, strict=True)]
    start, before = 0, ""
    for (number, special), group in groupby(kinds):
        end = start + len(list(group))
        # A stretch that is decoded alone may lose the space that it begins with.
        whole = tokenizer.decode(ids[:end])
        text = whole.removeprefix(before)
        if len(text) == len(whole) and before:
            text = tokenizer.decode(ids[start:end])
        yield {"reply": number, "special": special, "text": text}
        start, before = end, whole

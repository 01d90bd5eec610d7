"""Rows of sources become conversations: checked, each once, and what is dropped is counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from spectrain.core.errors import SpectrainError
from spectrain.core.progress import progress
from spectrain.data.conversations import (
    BadRows,
    Conversation,
    Regenerate,
    conversation_of,
    rank_of,
)
from spectrain.data.fates import Fates
from spectrain.data.shapes import parse
from spectrain.data.sources import Source, file_lines, quotas, read_rows
from spectrain.data.spool import Spool


def read_conversations(
    path: str | Path,
    regenerate: Regenerate = "auto",
    on_bad_row: BadRows = "stop",
    fates: Fates | None = None,
    keep_order: bool = False,
    texts: bool = False,
) -> list[Conversation]:
    """A JSONL file of conversations that fits into memory, ordered by content hash (or as in the
    file), each once; see `checked`.

    Raises SpectrainError for a missing or empty file as well.
    """
    fates = Fates() if fates is None else fates
    chosen: dict[str, Conversation] = {}
    rows = _some(file_lines(Path(path)), str(path))
    for place, found in checked(rows, regenerate, on_bad_row, fates, texts):
        known = chosen.get(found.id)
        if known is not None:
            fates.drop("duplicate", place)
        # Of two equal conversations with unequal facts the choice must not depend on their order.
        if known is None or rank_of(found) < rank_of(known):
            chosen[found.id] = found
    return [chosen[key] for key in (chosen if keep_order else sorted(chosen))]


def read_into(
    spool: Spool,
    sources: Sequence[Source],
    regenerate: Regenerate,
    on_bad_row: BadRows,
    limit: int | None,
    fates: Fates,
) -> list[int]:
    """Fill the spool and choose from it by the sources' weights and the limit; returns how many
    conversations each source has. See `checked`.

    Raises SpectrainError for a source that is missing, empty, or whose weight leaves it nothing.
    """
    with spool.writing(), progress(None, "read", "rows") as bar:
        for number, source in enumerate(sources):
            rows = _counted(read_rows(source), bar)
            for place, found in checked(rows, regenerate, on_bad_row, fates, texts=True):
                if not spool.add(found, number, place):
                    fates.drop("duplicate", place)
    sizes = spool.sizes(len(sources))
    chosen = quotas(sizes, [source.weight for source in sources], limit)
    if chosen is not None and not all(chosen):
        raise SpectrainError(
            f"of its {sizes[chosen.index(0)]} conversations none is taken: the sources have "
            f"{sizes}, and their weights must be kept",
            where=sources[chosen.index(0)].path,
            fix="leave it out, or give weights and a limit that leave each source one",
        )
    spool.choose(chosen, limit)
    return sizes


def checked(
    rows: Iterable[tuple[str, bytes | dict]],
    regenerate: Regenerate,
    on_bad_row: BadRows,
    fates: Fates,
    texts: bool,
) -> Iterator[tuple[str, Conversation]]:
    """(place, conversation) of rows that are one, in their order.

    regenerate: see `conversation_of`. texts: take plain texts, too, whatever `regenerate` is; else
    such a row is a bad one. Raises SpectrainError with its place for a bad row unless `on_bad_row`
    is "skip".
    """
    for place, raw in rows:
        try:
            row = parse(raw, texts)
        except ValueError as error:
            if on_bad_row == "stop":
                raise SpectrainError(
                    str(error), where=place, fix="repair the line, or --on-bad-row skip"
                ) from None
            fates.drop("bad-row", f"{place} ({error})")
            continue
        reason, conversation = conversation_of(row, regenerate)
        if conversation is None:
            fates.drop(reason, place)
        else:
            yield place, conversation


def _some(rows: Iterable[tuple[str, bytes]], path: str) -> Iterator[tuple[str, bytes]]:
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise SpectrainError(
            "the file is empty", where=path, fix='give a JSONL file of {"messages": […]} rows'
        )


def _counted(rows: Iterable, bar) -> Iterator:
    for row in rows:
        bar.update(1)
        yield row

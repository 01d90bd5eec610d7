"""From sources into the spool: rows checked, each conversation once, what is dropped counted."""

from __future__ import annotations

from collections.abc import Sequence

from spectrain.core.errors import SpectrainError
from spectrain.core.progress import progress
from spectrain.data.conversations import BadRows, Regenerate, conversation_of
from spectrain.data.fates import Fates
from spectrain.data.shapes import parse
from spectrain.data.sources import Source, quotas, read_rows
from spectrain.data.spool import Spool


def read_into(
    spool: Spool,
    sources: Sequence[Source],
    regenerate: Regenerate,
    on_bad_row: BadRows,
    limit: int | None,
    fates: Fates,
) -> list[int]:
    """Fill the spool and choose from it by the sources' weights and the limit; returns how many
    conversations each source has.

    Raises SpectrainError for a source that is missing or empty, and with its place for a bad row
    unless `on_bad_row` is "skip".
    """
    with spool.writing(), progress(None, "read", "rows") as bar:
        for number, source in enumerate(sources):
            for place, raw in read_rows(source):
                bar.update(1)
                try:
                    row = parse(raw, texts=True)
                except ValueError as error:
                    if on_bad_row == "stop":
                        raise SpectrainError(
                            str(error), where=place, fix="repair the line, or --on-bad-row skip"
                        ) from None
                    fates.drop("bad-row", place)
                    continue
                reason, conversation = conversation_of(row, regenerate)
                if conversation is None:
                    fates.drop(reason, place)
                elif not spool.add(conversation, number, place):
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

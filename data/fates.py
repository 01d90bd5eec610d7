"""What became of the rows that are not in the store, by reason, and where the first of them are."""

from __future__ import annotations

from collections import Counter

PLACES = 3  # of each reason that are printed; a person looks at a few
_KEPT = 1000  # of each reason, for reports in JSON


class Fates(Counter[str]):
    """Counts by reason; `places` has the first thousand places of each ("file:line")."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, list[str]] = {}

    def drop(self, reason: str, where: str | None = None) -> None:
        """Count a row that was dropped."""
        self[reason] += 1
        if where is not None:
            known = self.places.setdefault(reason, [])
            if len(known) < _KEPT:
                known.append(where)

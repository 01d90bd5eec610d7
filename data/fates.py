"""What became of the rows that are not in the store, by reason, and where the first of them are."""

from __future__ import annotations

from collections import Counter

PLACES = 3  # of each reason; a person looks at a few, not at all


class Fates(Counter[str]):
    """Counts by reason; `places` has the first few places of each ("file:line")."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, list[str]] = {}

    def drop(self, reason: str, where: str | None = None) -> None:
        """Count a row that was dropped."""
        self[reason] += 1
        if where is not None:
            known = self.places.setdefault(reason, [])
            if len(known) < PLACES:
                known.append(where)

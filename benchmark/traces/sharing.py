"""What an endless cache would hit of a trace."""

from __future__ import annotations

from collections.abc import Iterable

from benchmark.traces.record import Record


class EndlessCache:
    """Has seen every block of the records that it was asked about so far."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def hits(self, record: Record) -> int:
        """Leading blocks that earlier records had: behind a miss, a cache of prefixes has none."""
        ids = record.hash_ids
        found = next((i for i, block in enumerate(ids) if block not in self._seen), len(ids))
        self._seen.update(ids[found:])
        return found


def endless_hit_rate(records: Iterable[Record]) -> float:
    """Share of all blocks that one cache without limits would have seen before, with every block
    before them; 0 for no records. No cache of these prompts hits more."""
    cache = EndlessCache()
    found = [(cache.hits(record), len(record.hash_ids)) for record in records]
    return sum(hits for hits, _ in found) / max(1, sum(total for _, total in found))

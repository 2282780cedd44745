"""What a trace holds for a cache, whatever the cache."""

from __future__ import annotations

from collections.abc import Iterable

from benchmark.traces.record import Record


def endless_hit_rate(records: Iterable[Record]) -> float:
    """Share of all blocks that one cache without limits would have seen before, with every block
    before them; 0 for no records. No cache of these prompts hits more."""
    seen: set[int] = set()
    hits = total = 0
    for record in records:
        ids = record.hash_ids
        hits += next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        total += len(ids)
        seen.update(ids)
    return hits / total if total else 0.0

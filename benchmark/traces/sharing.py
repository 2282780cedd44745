"""What a trace holds in a few numbers, and what an endless cache would hit of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmark.traces.record import Record


@dataclass(frozen=True)
class Facts:
    """Of a trace; lengths in tokens."""

    requests: int
    requests_per_s: float
    prompt: float
    output: float
    longest: int
    """Prompt and answer."""
    endless_hit: float
    """Share of blocks that a cache without limits has seen before."""


def facts(records: Sequence[Record]) -> Facts:
    """Means over a trace.

    Raises:
        ValueError: no records.
    """
    if not records:
        raise ValueError("the trace has no records")
    count = len(records)
    seconds = (records[-1].timestamp - records[0].timestamp) / 1000
    return Facts(
        count,
        count / seconds if seconds else float("inf"),
        sum(r.input_length for r in records) / count,
        sum(r.output_length for r in records) / count,
        max(r.input_length + r.output_length for r in records),
        endless_hit_rate(records),
    )


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

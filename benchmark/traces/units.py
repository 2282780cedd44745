"""Times in a unit that is off by a thousand.

Seconds read as milliseconds make everything a thousand times as fast, and a study of a trace of an
hour replays it in four seconds. The rule, for times that are read as one unit:

- **Too short a unit** (it must be a longer one): more than ``MOST_PER_S`` requests a second on
  average, or half of the turns that follow another come within ``SOONEST_S`` of it, before a server
  could have answered. Mooncake's 3.3 requests a second become 3,300; the busiest published trace
  that we know of has 294.
- **Too long a unit**: a span of more than ``LONGEST_S``, which an hour of microseconds has when
  they are read as milliseconds.

Fewer than ``FEWEST`` requests (or following turns) say nothing, nor do times that are all the same,
as of a burst. It is a guess and thus a warning: a trace may well be a year's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmark.traces.record import Record
from benchmark.traces.sessions import REMEMBERED, Recent

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Of each unit; each is a thousand of the next one."""
MOST_PER_S = 1000.0
SOONEST_S = 0.1
LONGEST_S = 30 * 24 * 3600.0
FEWEST = 20


class UnitCheck:
    """Looks at the records of a trace as they pass; the memory does not grow with it."""

    def __init__(self) -> None:
        self._requests = 0
        self._first_ms = self._last_ms = 0.0
        self._followed: Recent[str, float] = Recent(REMEMBERED)  # by session, its last time
        self._follow_ups = self._soon = 0

    def watch(self, records: Iterable[Record]) -> Iterator[Record]:
        """The same records, in order of time."""
        for record in records:
            self._see(record)
            yield record

    def _see(self, record: Record) -> None:
        at = record.timestamp
        if not self._requests:
            self._first_ms = at
        self._requests += 1
        self._last_ms = at
        if record.session_id is not None:
            before = self._followed.use(record.session_id)
            if before is not None:
                self._follow_ups += 1
                self._soon += at - before < SOONEST_S * 1000
            self._followed.note(record.session_id, at)

    def fits(self, read_as: str = "ms") -> str | None:
        """The unit that the times seem to be in; None: ``read_as``, in which they were read."""
        units = list(SECONDS)
        place = units.index(read_as)
        span_s = (self._last_ms - self._first_ms) / 1000
        if self._requests < FEWEST or not span_s:
            return None
        soon = self._follow_ups >= FEWEST and 2 * self._soon > self._follow_ups
        if place and (soon or self._requests / span_s > MOST_PER_S):
            return units[place - 1]
        shorter = place
        while span_s > LONGEST_S and shorter + 1 < len(units):
            shorter, span_s = shorter + 1, span_s / 1000
        return units[shorter] if shorter != place else None

    def told(self, path: object, read_as: str = "ms") -> list[str]:
        """A warning where another unit would fit; it says what the trace looks like."""
        unit = self.fits(read_as)
        if unit is None:
            return []
        span_s = (self._last_ms - self._first_ms) / 1000
        return [
            f"{path}: {self._requests:,} requests within {span_s:,.3f} s, {self._soon:,} of "
            f"{self._follow_ups:,} following turns within {SOONEST_S:g} s of the turn before: the "
            f"times were read as {read_as} and seem to be {unit} (`timestamp` is in ms)"
        ]

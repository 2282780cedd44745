"""What the buffer-only mode reports to Prometheus, under SGLang's storage labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.buffer_only.stage import Direction

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.pipelines import Pipelines

PREFIX = "sglang:hicache_buffer_"

GAUGES = {
    "pages": "Staging pages of this rank",
    "write_pages": "Staging pages in use on the way to the store",
    "read_pages": "Staging pages in use on the way from the store",
    "peak_pages": "Most staging pages in use at one time",
    "pending_intents": "Nodes that wait for staging pages to be written",
    "pending_tokens": "Tokens of these nodes",
}
#: Kept in ``Parts.tally``; the names end in ``_total`` on the wire.
COUNTERS = {
    "store_written_pages": "Pages that became durable in the store, on all ranks",
    "store_read_pages": "Pages read from the store, on all ranks",
    "store_write_failures": "Writes that ended before their last page on some rank",
    "store_query_failures": "Queries that failed on this rank",
    "store_read_failures": "Reads that failed on this rank",
    "prefetch_hit_tokens": "Tokens that the store was found to have for a request",
    "prefetch_loaded_tokens": "Tokens that came from the store into the device tree",
    "prefetch_deferred_tokens": "Tokens of hits that waited for staging pages, once a hit",
    "prefetch_timeouts": "Requests that were computed after waiting too long",
    "prefetch_unfulfilled_tokens": "Tokens of hits that were computed after all",
}
DROPPED = "dropped_tokens"
#: Seconds between two updates.
EVERY_S = 1.0


@cache
def _prometheus(labelnames: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any], Any]:
    # Imported late: SGLang sets PROMETHEUS_MULTIPROC_DIR before the first import.
    from prometheus_client import Counter, Gauge

    gauges = {
        name: Gauge(PREFIX + name, text, labelnames, multiprocess_mode="mostrecent")
        for name, text in GAUGES.items()
    }
    counters = {name: Counter(PREFIX + name, text, labelnames) for name, text in COUNTERS.items()}
    text = "Tokens that were to be written and were not, by reason"
    return gauges, counters, Counter(PREFIX + DROPPED, text, (*labelnames, "reason"))


class BufferMetrics:
    """Mirrors tally, stage and queue to Prometheus; cheap where nobody scrapes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._updated_at: float | None = None
        self._labels: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}
        self._counters: dict[str, Any] = {}
        self._dropped: Any = None
        self._seen: dict[tuple[str, str], int] = {}

    def bind(self, labels: Mapping[str, Any]) -> None:
        """Report under ``labels`` from now on."""
        self._labels = dict(labels)
        gauges, counters, self._dropped = _prometheus(tuple(labels))
        self._gauges = {name: gauge.labels(**labels) for name, gauge in gauges.items()}
        self._counters = {name: counter.labels(**labels) for name, counter in counters.items()}

    def update(self, buffer: Pipelines) -> None:
        """Called in every step; does something once in ``EVERY_S``."""
        if not self._gauges:
            return
        now = self._clock()
        if self._updated_at is not None and now - self._updated_at < EVERY_S:
            return
        self._updated_at = now
        for name, value in readings(buffer).items():
            self._gauges[name].set(value)
        for name, counter in self._counters.items():
            counter.inc(self._since("", name, buffer.parts.tally[name]))
        for reason, tokens in buffer.writes.intents.dropped.items():
            counter = self._dropped.labels(**self._labels, reason=reason)
            counter.inc(self._since(DROPPED, reason, tokens))

    def _since(self, family: str, name: str, total: int) -> int:
        before = self._seen.get((family, name), 0)
        self._seen[family, name] = total
        return total - before


def readings(buffer: Pipelines) -> dict[str, int]:
    """The value of each gauge now."""
    stage, intents = buffer.parts.stage, buffer.writes.intents
    return {
        "pages": stage.pages,
        "write_pages": stage.used(Direction.WRITE),
        "read_pages": stage.used(Direction.READ),
        "peak_pages": stage.peak,
        "pending_intents": len(intents),
        "pending_tokens": intents.tokens,
    }

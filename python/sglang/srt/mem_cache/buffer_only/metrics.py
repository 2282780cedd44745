"""What the buffer-only mode reports to Prometheus, under SGLang's storage labels; where the time of
a request with a prefetch went."""

from __future__ import annotations

import math
import time
from collections import Counter as Counts
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.patchset.metric import Metric, declare

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch
    from sglang.srt.observability.metrics_collector import StorageMetricsCollector

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
#: By the names that this package uses.
_DECLARED = (
    *declare(
        "gauge",
        "every",
        {
            "pages": "Staging pages of this rank",
            "write_pages": "Staging pages in use on the way to the store",
            "read_pages": "Staging pages in use on the way from the store",
            "peak_pages": "Most staging pages in use at one time",
            "stranded_pages": "Staging pages that a call of the store that was given up may still "
            "use",
            "pending_intents": "Nodes that wait for staging pages to be written",
            "pending_tokens": "Tokens of these nodes",
            "store_up": "1 if the store is used; 0 after a call hung until a probe is answered, "
            "while reads are refused, and while all calls that it may "
            "have hang",
            "store_calls": "Calls of the store under way",
            "store_overdue_calls": "Calls of the store that were given up and have not returned",
        },
    ),
    *declare(
        "counter",
        "every",
        {
            "store_written_pages": "Pages that became durable in the store, on all ranks",
            "store_read_pages": "Pages read from the store, on all ranks",
            "store_write_failures": "Writes that ended before their last page on some rank",
            "store_lost_pages": "Pages of this rank, in use on the device, that the store had "
            "lost, to be written again",
            "store_query_failures": "Queries that failed on this rank",
            "store_read_failures": "Reads that failed on this rank",
            "prefetch_hit_tokens": "Tokens that the store was found to have for a request, once a "
            "request",
            "prefetch_loaded_tokens": "Tokens that came from the store into the device tree",
            "prefetch_deferred_tokens": "Tokens of hits that waited for staging pages, once a hit",
            "prefetch_timeouts": "Requests that were computed after waiting too long",
            "prefetch_unfulfilled_tokens": "Tokens of hits that were computed after all",
        },
    ),
    *declare(
        "counter",
        "every",
        {"dropped_tokens": "Tokens that were to be written and were not"},
        labels=("reason",),
    ),
    *declare(
        "counter",
        "every",
        {"store_faults": "What the store did wrong, in calls or pages of this rank"},
        labels=("fault",),
    ),
    *declare(
        "counter",
        "every",
        {"prefetch_choices": "Hits, by whether they were fetched, and why"},
        labels=("choice",),
    ),
    *declare(
        "histogram",
        "every",
        {
            "prefetch_query_seconds": "From a request's arrival until the store has said what it "
            "has of it",
            "prefetch_wait_seconds": "From there until its hit is fetched, as far as the stage was "
            "full",
            "prefetch_fetch_seconds": "Until the hit is in the stage",
            "prefetch_staged_seconds": "From there until the request runs, or is gone",
            "load_back_seconds": "From the admission until the copy to the device was seen to have "
            "ended",
        },
        buckets=BUCKETS,
    ),
)
#: Those that are exported without a prefix: as SGLang 0.5.23 names them.
_NAMES = {"prefetch_hit_tokens": "storage_prefetch_hit_tokens"}
METRICS: dict[str, Metric] = {
    metric.name: replace(metric, name=_NAMES.get(metric.name, f"hicache_buffer_{metric.name}"))
    for metric in _DECLARED
}
#: Kept in ``Context.counters``.
COUNTERS = tuple(
    name for name, metric in METRICS.items() if metric.kind == "counter" and not metric.labels
)
#: Methods of SGLang's collector that count tokens, with the pages that they are told of.
SGLANG = {
    "log_backuped_tokens": "store_written_pages",
    "log_prefetched_tokens": "store_read_pages",
}
#: Histogram of a state, beside WAITING, which counts as part of the query.
STATES = {
    State.QUERYING: "prefetch_query_seconds",
    State.FOUND: "prefetch_wait_seconds",
    State.FETCHING: "prefetch_fetch_seconds",
    State.STAGED: "prefetch_staged_seconds",
}
#: Seconds between two updates.
EVERY_S = 1.0


class BufferMetrics:
    """Mirrors counters, stage and queue to Prometheus.

    Args:
        labels: of all metrics.
        collector: SGLang's, which counts tokens: ``page_size`` in a page.
    """

    def __init__(
        self,
        labels: Mapping[str, object],
        collector: StorageMetricsCollector,
        page_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._labels, self._collector, self._page_size = dict(labels), collector, page_size
        self._clock = clock
        self._updated_at = -math.inf
        #: Of each counter, as of the last update.
        self._seen: Counts[tuple[str, str]] = Counts()

    def observe(self, name: str, seconds: float) -> None:
        """A duration has ended."""
        METRICS[name].child(self._labels).observe(seconds)

    def update(
        self,
        gauges: Callable[[], dict[str, int]],
        totals: Callable[[], dict[tuple[str, str], int]],
    ) -> None:
        """Called in every step; does something once in ``EVERY_S``.

        Args:
            gauges: the value of each now.
            totals: each counter's value, by name and the value of its own label, "" without one.
        """
        at = self._clock()
        if at - self._updated_at < EVERY_S:
            return
        self._updated_at = at
        for name, value in gauges().items():
            METRICS[name].child(self._labels).set(value)
        counted = totals()
        for method, pages in SGLANG.items():
            new = counted[pages, ""] - self._seen[pages, ""]
            getattr(self._collector, method)(new * self._page_size)
        for (name, key), total in counted.items():
            own = dict.fromkeys(METRICS[name].labels, key)
            METRICS[name].child(self._labels, **own).inc(total - self._seen[name, key])
            self._seen[name, key] = total


def ended(prefetch: Prefetch, now_ms: int, observe: Callable[[str, float], None]) -> None:
    """Its request runs, or is gone: how long each state lasted. One that it was never in does not
    count."""
    spent = dict(prefetch.spent_ms)
    spent[prefetch.state] = spent.get(prefetch.state, 0) + now_ms - prefetch.since_ms
    spent[State.QUERYING] = spent.get(State.QUERYING, 0) + spent.pop(State.WAITING, 0)
    for state, name in STATES.items():
        if state in spent:
            observe(name, spent[state] / 1000)

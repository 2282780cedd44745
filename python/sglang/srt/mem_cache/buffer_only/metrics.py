"""Prometheus metrics of the buffer-only mode, under SGLang's storage labels, with the time that a
prefetch spent in each state.

Contract: scheduler thread; each rank reports its own values.
"""

from __future__ import annotations

import math
import time
from collections import Counter as Counts
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.prefetch import PrefetchState
from sglang.srt.patchset.metric import Metric, declare

if TYPE_CHECKING:
    from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch
    from sglang.srt.observability.metrics_collector import StorageMetricsCollector

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
#: Declared under the names that this package uses.
_DECLARED = (
    *declare(
        "gauge",
        "every",
        {
            "pages": "Staging pages of this rank",
            "write_pages": "Staging pages in use on the way to the store",
            "read_pages": "Staging pages in use on the way from the store",
            "peak_pages": "Most staging pages in use at one time",
            "stranded_pages": "Staging pages that an overdue store call may still use",
            "pending_intents": "Nodes queued to be written to the store",
            "pending_tokens": "Tokens of these nodes",
            "store_up": "1 if the store is used; 0 after a hung call until a probe is answered, "
            "while reads are refused, and while the maximum number of calls hang",
            "store_calls": "Store calls in flight",
            "store_overdue_calls": "Store calls that were given up and have not returned",
        },
    ),
    *declare(
        "counter",
        "every",
        {
            "store_written_pages": "Pages that became durable in the store, on all ranks",
            "store_read_pages": "Pages read from the store, on all ranks",
            "store_write_failures": "Writes that ended before their last page on some rank",
            "store_lost_pages": "Pages in use on this rank's device that the store had lost; they "
            "are written again",
            "store_query_failures": "Queries that failed on this rank",
            "store_read_failures": "Reads that failed on this rank",
            "prefetch_hit_tokens": "Tokens of requests that queries found in the store, once per "
            "request",
            "prefetch_loaded_tokens": "Tokens loaded from the store into the device tree",
            "prefetch_deferred_tokens": "Tokens of hits that waited for staging pages, once a hit",
            "prefetch_timeouts": "Requests computed because their prefetch timed out",
            "prefetch_unfulfilled_tokens": "Tokens of hits that were computed and not loaded",
        },
    ),
    *declare(
        "counter",
        "every",
        {"dropped_tokens": "Tokens queued to be written and dropped"},
        labels=("reason",),
    ),
    *declare(
        "counter",
        "every",
        {"store_faults": "Faults of the store, in calls or pages of this rank"},
        labels=("fault",),
    ),
    *declare(
        "counter",
        "every",
        {"prefetch_choices": "Hits by decision to fetch or compute"},
        labels=("choice",),
    ),
    *declare(
        "histogram",
        "every",
        {
            "prefetch_query_seconds": "From a request's arrival until the store has answered the "
            "query for it",
            "prefetch_wait_seconds": "Wait of a hit for staging pages",
            "prefetch_fetch_seconds": "Fetch of a hit into the staging buffer",
            "prefetch_staged_seconds": "From the fetch until the request runs or is gone",
            "load_back_seconds": "From the admission until the copy to the device is known to have "
            "ended",
        },
        buckets=BUCKETS,
    ),
)
#: Metrics exported without the prefix, because SGLang 0.5.23 has them under this name.
_NAMES = {"prefetch_hit_tokens": "storage_prefetch_hit_tokens"}
BUFFER_METRICS: dict[str, Metric] = {
    metric.name: replace(metric, name=_NAMES.get(metric.name, f"hicache_buffer_{metric.name}"))
    for metric in _DECLARED
}
#: Kept in ``Context.counters``.
COUNTERS = tuple(
    name
    for name, metric in BUFFER_METRICS.items()
    if metric.kind == "counter" and not metric.labels
)
#: Methods of SGLang's collector that count tokens -> our counter of pages.
SGLANG = {
    "log_backuped_tokens": "store_written_pages",
    "log_prefetched_tokens": "store_read_pages",
}
#: State -> its histogram. WAITING counts as QUERYING.
STATE_HISTOGRAMS = {
    PrefetchState.QUERYING: "prefetch_query_seconds",
    PrefetchState.FOUND: "prefetch_wait_seconds",
    PrefetchState.FETCHING: "prefetch_fetch_seconds",
    PrefetchState.STAGED: "prefetch_staged_seconds",
}
#: Seconds between two updates.
UPDATE_INTERVAL_S = 1.0


class BufferMetrics:
    """Exports counters and gauges to Prometheus.

    Args:
        labels: labels of all metrics.
        collector: SGLang's, which counts tokens (``page_size`` per page).
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
        #: Value of each counter at the last update.
        self._seen: Counts[tuple[str, str]] = Counts()
        for metric in BUFFER_METRICS.values():
            if metric.kind == "histogram":  # zero before the first value, because a rate needs it
                metric.child(self._labels)

    def observe(self, name: str, seconds: float) -> None:
        """Record a duration."""
        BUFFER_METRICS[name].child(self._labels).observe(seconds)

    def update(
        self,
        gauges: Callable[[], dict[str, int]],
        totals: Callable[[], dict[tuple[str, str], int]],
    ) -> None:
        """Export the metrics, at most once per ``UPDATE_INTERVAL_S``; called in every step.

        Args:
            gauges: returns the current value of each gauge.
            totals: returns each counter's value by name and label value ("" without a label).
        """
        now = self._clock()
        if now - self._updated_at < UPDATE_INTERVAL_S:
            return
        self._updated_at = now
        for name, value in gauges().items():
            BUFFER_METRICS[name].child(self._labels).set(value)
        counted = totals()
        for method, pages in SGLANG.items():
            new = counted[pages, ""] - self._seen[pages, ""]
            getattr(self._collector, method)(new * self._page_size)
        for (name, key), total in counted.items():
            label = dict.fromkeys(BUFFER_METRICS[name].labels, key)
            BUFFER_METRICS[name].child(self._labels, **label).inc(total - self._seen[name, key])
            self._seen[name, key] = total


def observe_states(prefetch: Prefetch, now_ms: int, observe: Callable[[str, float], None]) -> None:
    """Record the time that an ended prefetch spent in each state that it was in."""
    spent = dict(prefetch.spent_ms)
    spent[prefetch.state] = spent.get(prefetch.state, 0) + now_ms - prefetch.since_ms
    spent[PrefetchState.QUERYING] = spent.get(PrefetchState.QUERYING, 0) + spent.pop(
        PrefetchState.WAITING, 0
    )
    for state, name in STATE_HISTOGRAMS.items():
        if state in spent:
            observe(name, spent[state] / 1000)

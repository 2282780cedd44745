"""Gauges of the decode tree and counted refusals, mirrored to Prometheus where metrics are on."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from sglang.srt.disaggregation.decode_radix.quarantine import held_requests
from sglang.srt.disaggregation.delta.pages import page_ceil

#: Gauge name -> what it shows now.
GAUGES = {
    "decode_prefix_leases": "Requests that hold a lock on a prefix in the decode radix tree",
    "decode_protected_tokens": "Tokens in the decode radix tree that requests hold a lock on",
    "decode_evictable_tokens": "Tokens in the decode radix tree that may be evicted",
    "decode_quarantined_tokens": "Tokens of aborted transfers that prefill may still write to",
}
REFUSED = "decode_admission_refused"
#: Seconds between two updates of the gauges.
EVERY_S = 1.0


@cache
def _prometheus_metrics(labelnames: tuple[str, ...]) -> tuple[dict[str, Any], Any]:
    # Imported late: SGLang sets PROMETHEUS_MULTIPROC_DIR before the first import.
    from prometheus_client import Counter, Gauge

    gauges = {
        name: Gauge(f"sglang:{name}", text, labelnames, multiprocess_mode="mostrecent")
        for name, text in GAUGES.items()
    }
    text = "Requests that were not admitted at once, by reason; once a request and reason"
    return gauges, Counter(f"sglang:{REFUSED}", text, (*labelnames, "reason"))


class DecodeMetrics:
    """What one decode rank reports about its tree. Cheap where nobody scrapes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._updated_at: float | None = None
        self._labels: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}
        self._refused: Any = None
        #: Refusals by reason, counted also where metrics are off.
        self.refusals: Counts[str] = Counts()

    def bind(self, labels: Mapping[str, Any]) -> None:
        """Mirror everything to Prometheus under ``labels`` from now on."""
        self._labels = dict(labels)
        gauges, self._refused = _prometheus_metrics(tuple(labels))
        self._gauges = {name: gauge.labels(**labels) for name, gauge in gauges.items()}

    def refused(self, reason: str) -> None:
        """A request did not get in for a reason that it was not refused for before."""
        self.refusals[reason] += 1
        if self._refused is not None:
            self._refused.labels(**self._labels, reason=reason).inc()

    def update(self, scheduler: Any) -> None:
        """Set the gauges, at most once in ``EVERY_S``; called in every scheduling step."""
        if not self._gauges:
            return
        now = self._clock()
        if self._updated_at is not None and now - self._updated_at < EVERY_S:
            return
        self._updated_at = now
        for name, value in readings(scheduler).items():
            self._gauges[name].set(value)


def readings(scheduler: Any) -> dict[str, int]:
    """The value of each gauge now. Every token of the pool is counted in one of them at most."""
    tree, transfers = scheduler.tree_cache, scheduler.disagg_decode_transfer_queue
    held = held_requests(transfers)
    running = [req for req in scheduler.running_batch.reqs if not req.finished()]
    in_transfer = [entry.req for entry in transfers.queue]
    locking = [*in_transfer, *scheduler.waiting_queue, *running, *held]
    page: int = scheduler.token_to_kv_pool_allocator.page_size
    return {
        "decode_prefix_leases": sum(req.cache_protected_len > 0 for req in locking),
        "decode_protected_tokens": tree.protected_size(),
        "decode_evictable_tokens": tree.evictable_size(),
        "decode_quarantined_tokens": sum(
            page_ceil(req.kv_allocated_len, page) - req.cache_protected_len for req in held
        ),
    }

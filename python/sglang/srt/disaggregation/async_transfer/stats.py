"""What the transfer workers do, in numbers: for Prometheus, and one log line now and then.

Workers and backends report here from their threads. Nothing in here may fail a transfer: every
method swallows its own errors, and says so once.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.disaggregation.async_transfer.histogram import (
    BYTES,
    DESCRIPTORS,
    SECONDS,
    Histogram,
)
from sglang.srt.disaggregation.delta.failures import Reason
from sglang.srt.disaggregation.delta.harmless import harmless

logger = logging.getLogger(__name__)

#: Histogram -> what it measures and its buckets. A *transfer* is one chunk to one peer.
HISTOGRAMS = {
    "kv_transfer_queue_seconds": ("From submission until a transfer is posted", SECONDS),
    "kv_transfer_build_seconds": ("Making the descriptors of a transfer", SECONDS),
    "kv_transfer_post_seconds": ("The transport's calls that start a transfer", SECONDS),
    "kv_transfer_wire_seconds": ("From the end of the post until a transfer settled", SECONDS),
    "kv_transfer_transport_seconds": (
        "A transfer as the transport timed it",
        SECONDS,
    ),
    "kv_transfer_descriptors": ("Descriptors of a transfer", DESCRIPTORS),
    "kv_transfer_bytes": ("Bytes of a transfer", BYTES),
}
GAUGES = {
    "kv_transfer_waiting": "Transfers that wait in the queues, the most since the last export",
    "kv_transfer_in_flight": "Transfers under way, the most since the last export",
    "kv_transfer_overdue": "Transfers under way that missed their deadline",
}


@functools.cache
def _histogram(name: str, labelnames: tuple[str, ...]) -> Any:
    # Imported late: SGLang sets PROMETHEUS_MULTIPROC_DIR before the first import.
    from prometheus_client import Histogram as PrometheusHistogram

    text, buckets = HISTOGRAMS[name]
    return PrometheusHistogram(f"sglang:{name}", text, labelnames, buckets=buckets)


@functools.cache
def _gauge(name: str, labelnames: tuple[str, ...]) -> Any:
    from prometheus_client import Gauge

    return Gauge(f"sglang:{name}", GAUGES[name], labelnames, multiprocess_mode="mostrecent")


class AsyncTransferStats:
    """One for each transfer pool, of the time since the last log line. Used from any thread."""

    def __init__(
        self, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``interval_s``: seconds between log lines, 0 for none."""
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._histograms = {name: Histogram(about[1]) for name, about in HISTOGRAMS.items()}
        self._exported: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}
        #: By worker: waiting, in flight, overdue.
        self._levels: dict[int, tuple[int, int, int]] = {}
        self._highest: dict[int, tuple[int, int, int]] = {}
        #: Rooms that ended early, by reason, since the start of the process.
        self.failures: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self._failures_logged = self.failures.copy()
        self._logged_at = clock()

    @harmless
    def bind(self, labels: Mapping[str, Any]) -> None:
        """Mirror everything to Prometheus under ``labels`` from now on. (Failures are counted
        there by the delta layer.)"""
        names = tuple(labels)
        self._gauges = {name: _gauge(name, names).labels(**labels) for name in GAUGES}
        self._exported = {name: _histogram(name, names).labels(**labels) for name in HISTOGRAMS}

    # ---- for the backend ----

    @harmless
    def posted(self, *, build_s: float, post_s: float, descriptors: int, moved: int) -> None:
        """One transfer was posted. ``moved``: its bytes, without those that decode already has."""
        self._add("kv_transfer_build_seconds", build_s)
        self._add("kv_transfer_post_seconds", post_s)
        self._add("kv_transfer_descriptors", descriptors)
        self._add("kv_transfer_bytes", moved)

    @harmless
    def transported(self, seconds: float) -> None:
        """What the transport's own telemetry says of one of its transfers."""
        self._add("kv_transfer_transport_seconds", seconds)

    # ---- for the workers ----

    @harmless
    def queued(self, seconds: float) -> None:
        """A transfer is about to be posted, so long after it was submitted."""
        self._add("kv_transfer_queue_seconds", seconds)

    @harmless
    def settled(self, seconds: float) -> None:
        """A transfer was delivered, so long after its post."""
        self._add("kv_transfer_wire_seconds", seconds)

    @harmless
    def failed(self, reason: Reason) -> None:
        """A room ended early."""
        with self._lock:
            self.failures[reason] += 1

    @harmless
    def level(self, worker: int, waiting: int, in_flight: int, overdue: int) -> None:
        """How many transfers of a worker wait, are under way, and are overdue."""
        level = (waiting, in_flight, overdue)
        if self._levels.get(worker) == level:
            return
        with self._lock:
            self._levels[worker] = level
            highest = zip(level, self._highest.get(worker, level), strict=True)
            self._highest[worker] = tuple(map(max, highest))  # type: ignore[assignment]

    # ---- for whoever has a clock ----

    @harmless
    def tick(self) -> None:
        """Called every second or so, by any one thread: exports the gauges, and logs when it is
        time to and something was moved or failed."""
        with self._lock:
            waiting = sum(level[0] for level in self._highest.values())
            in_flight = sum(level[1] for level in self._highest.values())
            overdue = sum(level[2] for level in self._levels.values())
            self._highest = self._levels.copy()
        values = (waiting, in_flight, overdue)
        for gauge, value in zip(self._gauges.values(), values, strict=False):
            gauge.set(value)
        line = self.take_line()
        if line is not None:
            logger.info(line)

    def take_line(self) -> str | None:
        """The log line of the time since the last one, if it is due and there is anything to say.
        Starts the next interval."""
        now = self._clock()
        passed = now - self._logged_at
        if not self._interval_s or passed < self._interval_s:
            return None
        self._logged_at = now
        with self._lock:
            line = self._line(passed)
            for histogram in self._histograms.values():
                histogram.clear()
            self._failures_logged = self.failures.copy()
        return line

    def _line(self, passed: float) -> str | None:
        names = ("queue", "build", "post", "wire")
        times = [self._histograms[f"kv_transfer_{name}_seconds"] for name in names]
        failed = [
            f"{reason.value} {count - self._failures_logged[reason]}"
            for reason, count in self.failures.items()
            if count > self._failures_logged[reason]
        ]
        # A full prefix hit is queued and posted, but moves nothing that a transport counts.
        if not times[0].count and not failed:
            return None
        waiting, in_flight, overdue = (
            sum(level[place] for level in self._levels.values()) for place in range(3)
        )
        p50_p99 = ", ".join(
            f"{name} {1e3 * of.percentile(0.5):.2f} / {1e3 * of.percentile(0.99):.2f}"
            for name, of in zip(names, times, strict=True)
        )
        moved = self._histograms["kv_transfer_bytes"].total
        return (
            f"KV transfers of the last {passed:.0f} s: {times[0].count} posted, "
            f"{self._histograms['kv_transfer_descriptors'].total:.0f} descriptors, "
            f"{moved / 1e6:.1f} MB, {moved / 1e9 / passed:.3f} GB/s; "
            f"p50 / p99 in ms: {p50_p99}; "
            f"now {waiting} waiting, {in_flight} in flight, {overdue} overdue; "
            f"ended early: {', '.join(failed) or 'none'}"
        )

    def _add(self, name: str, value: float) -> None:
        with self._lock:
            self._histograms[name].add(value)
        exported = self._exported.get(name)
        if exported is not None:
            exported.observe(value)

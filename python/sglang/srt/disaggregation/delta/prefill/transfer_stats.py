"""Durations and sizes of the transfers of one pool of workers.

For Prometheus, and for one log line an interval. Nothing in here can fail a transfer.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang.srt.disaggregation.delta.logs import best_effort
from sglang.srt.disaggregation.delta.metrics import (
    METRICS,
    TRANSFER_GAUGES,
    TRANSFER_HISTOGRAMS,
    Reason,
)

logger = logging.getLogger(__name__)


class Histogram:
    """Values since the last ``clear``."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: upper ends of the buckets, rising; larger values have one of their own."""
        self._bounds = bounds
        self.clear()

    def clear(self) -> None:
        """Forget all values."""
        self._counts = [0] * (len(self._bounds) + 1)
        self.count = 0
        self.total = 0.0
        self.largest = 0.0

    def add(self, value: float) -> None:
        """One more value, of zero or more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.count += 1
        self.total += value
        self.largest = max(self.largest, value)

    def percentile(self, fraction: float) -> float:
        """An upper bound of the value that ``fraction`` of all are not above; 0 without values."""
        wanted, seen = fraction * self.count, 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            seen += count
            if seen >= wanted and seen:
                return min(bound, self.largest)
        return self.largest


class AsyncTransferStats:
    """One for each transfer pool, of the time since the last log line. Used from any thread."""

    def __init__(
        self, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``interval_s``: seconds between log lines, 0 for none."""
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._histograms = {name: Histogram(METRICS[name].buckets) for name in TRANSFER_HISTOGRAMS}
        self._exported: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}
        #: By worker: waiting, in flight, overdue.
        self._levels: dict[int, tuple[int, int, int]] = {}
        self._highest: dict[int, tuple[int, int, int]] = {}
        #: Rooms that ended early, by reason, since the start of the process.
        self.failures: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self._failures_logged = self.failures.copy()
        self._logged_at = clock()

    @best_effort
    def bind(self, labels: Mapping[str, Any]) -> None:
        """Mirror everything to Prometheus under ``labels`` from now on. (Failures are counted
        there by the delta layer.)"""
        self._gauges = {name: METRICS[name].child(labels) for name in TRANSFER_GAUGES}
        self._exported = {name: METRICS[name].child(labels) for name in TRANSFER_HISTOGRAMS}

    # ---- for the backend ----

    @best_effort
    def posted(self, *, build_s: float, post_s: float, descriptors: int, moved: int) -> None:
        """One transfer was posted. ``moved``: its bytes, without those that decode already has."""
        self._add(
            kv_transfer_build_seconds=build_s,
            kv_transfer_post_seconds=post_s,
            kv_transfer_descriptors=descriptors,
            kv_transfer_bytes=moved,
        )

    @best_effort
    def transported(self, seconds: float) -> None:
        """What the transport's own telemetry says of one of its transfers."""
        self._add(kv_transfer_transport_seconds=seconds)

    # ---- for the workers ----

    @best_effort
    def queued(self, seconds: float) -> None:
        """A transfer is about to be posted, so long after it was submitted."""
        self._add(kv_transfer_queue_seconds=seconds)

    @best_effort
    def settled(self, seconds: float) -> None:
        """A transfer was delivered, so long after its post."""
        self._add(kv_transfer_wire_seconds=seconds)

    @best_effort
    def failed(self, reason: Reason) -> None:
        """A room ended early."""
        with self._lock:
            self.failures[reason] += 1

    @best_effort
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

    @best_effort
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

    def _add(self, **values: float) -> None:
        with self._lock:
            for name, value in values.items():
                self._histograms[name].add(value)
        if self._exported:
            for name, value in values.items():
                self._exported[name].observe(value)

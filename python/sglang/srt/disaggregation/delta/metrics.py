"""Why rooms fail: the values of the ``reason`` label of ``sglang:kv_transfer_failed_total``.

Counters beside the connector: plain integers that Prometheus mirrors where metrics are on.

The connector counts without knowing whether anybody scrapes; a scheduler with ``--enable-metrics``
binds its labels once, and from then on every increment reaches ``/metrics`` as well.

Durations and sizes of an interval, in buckets: one addition a value, percentiles when asked.

What the transfer workers do, in numbers: for Prometheus, and one log line now and then.

Workers and backends report here from their threads. Nothing in here may fail a transfer: every
method swallows its own errors, and says so once.
"""

from __future__ import annotations

import enum
import functools
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from sglang.srt.disaggregation.delta.logs import harmless

logger = logging.getLogger(__name__)


class Reason(str, enum.Enum):
    """A failed room has one; the text that goes with it has the details."""

    #: The client went away, here or on the other side.
    ABORTED = "aborted"
    #: A deadline passed; the text names the environment variable.
    TIMEOUT = "timeout"
    #: The peer gave no sign of life, or came back as another process.
    PEER_LOST = "peer_lost"
    #: The other side reported a failure.
    PEER_FAILED = "peer_failed"
    #: What decode announced does not fit.
    MISMATCH = "mismatch"
    #: The transport refused or broke a transfer.
    TRANSPORT = "transport"
    #: Decode and prefill could not be connected.
    HANDSHAKE = "handshake"
    #: A bug here, or a transfer worker that does not go on.
    INTERNAL = "internal"


#: Counter name (without ``_total``) -> what it counts. Units are in the names.
DECODE_COUNTERS = {
    "decode_prefix_prompt_tokens": "Prompt tokens of requests admitted by a decode server",
    "decode_prefix_hit_tokens": "Prompt tokens found in the decode radix tree at admission",
    "kv_transfer_requested_bytes": "KV bytes that decode asked prefill to send",
}
PREFILL_COUNTERS = {
    "kv_transfer_sent_bytes": "KV bytes that prefill posted to decode servers",
    "kv_transfer_skipped_tokens": "Prompt tokens not sent because decode already held them",
    "kv_transfer_stuck_workers": "Transfer workers that were found stuck or dead",
}
COUNTERS = {**DECODE_COUNTERS, **PREFILL_COUNTERS}
FAILURES = "kv_transfer_failed"


@cache
def _prometheus_counter(name: str, labelnames: tuple[str, ...]) -> Any:
    # Imported late: SGLang sets PROMETHEUS_MULTIPROC_DIR before the first import.
    from prometheus_client import Counter

    return Counter(f"sglang:{name}", COUNTERS[name], labelnames)


@cache
def _failure_counter(labelnames: tuple[str, ...]) -> Any:
    from prometheus_client import Counter

    return Counter(f"sglang:{FAILURES}", "Rooms that failed on this server, by reason", labelnames)


class TransferStats:
    """This process's counters, by name. Increments come from any thread: a backend may send from
    several at once."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        #: Rooms that failed, by reason.
        self.failures: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self._exported: dict[str, Any] = {}
        self._failures_exported: dict[Reason, Any] = {}
        self._lock = threading.Lock()

    def bind(self, names: Mapping[str, str], labels: Mapping[str, Any]) -> None:
        """Mirror the counters ``names``, and failures, to Prometheus under ``labels``."""
        for name in names:
            counter = _prometheus_counter(name, tuple(labels))
            self._exported[name] = counter.labels(**labels)
        failures = _failure_counter((*labels, "reason"))
        self._failures_exported = {
            reason: failures.labels(**labels, reason=reason.value) for reason in Reason
        }

    def add(self, name: str, amount: int) -> None:
        """Count ``amount`` more of ``name``."""
        with self._lock:
            self.totals[name] += amount
            exported = self._exported.get(name)
            if exported is not None:
                exported.inc(amount)

    def failed(self, reason: Reason) -> None:
        """Count one failed room."""
        with self._lock:
            self.failures[reason] += 1
            exported = self._failures_exported.get(reason)
            if exported is not None:
                exported.inc()


#: One for each process: a scheduler process has one transfer manager.
STATS = TransferStats()

#: Upper bounds in seconds, 10 microseconds to 50 seconds.
SECONDS = tuple(base * 10.0**power for power in range(-5, 2) for base in (1, 2, 5))
#: Upper bounds in bytes, 4 KiB to 4 GiB.
BYTES = tuple(2.0**power for power in range(12, 33, 2))
#: Upper bounds in descriptors.
DESCRIPTORS = tuple(4.0**power for power in range(10))


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

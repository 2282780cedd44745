"""Every counter, gauge and histogram of disaggregation, and who counts.

``METRICS`` declares them all; docs and dashboards are checked against it. ``STATS`` are this
process's counters, mirrored to Prometheus where metrics are on: who counts does not know whether
anybody scrapes. ``AsyncTransferStats`` are durations and sizes of one pool of transfer workers, for
Prometheus and for one log line an interval; nothing in it can fail a transfer.
"""

from __future__ import annotations

import enum
import functools
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.delta.logs import best_effort

logger = logging.getLogger(__name__)


class Reason(str, enum.Enum):
    """Why a room failed: the values of the label ``reason`` of ``kv_transfer_failed``. A failed
    room has one; the text that goes with it has the details."""

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


# ---- declarations ----


@dataclass(frozen=True)
class Metric:
    """One metric: ``sglang:<name>`` on ``/metrics``; a counter's name ends in ``_total`` there."""

    #: Says the unit.
    name: str
    #: "counter", "gauge" or "histogram".
    kind: str
    #: Which servers have it: "decode", "prefill" or "both".
    side: str
    help: str
    #: Labels beside those that SGLang gives all its metrics.
    labels: tuple[str, ...] = ()
    #: Upper ends of a histogram's buckets, rising.
    buckets: tuple[float, ...] = ()

    @property
    def exported_name(self) -> str:
        """As a scrape shows it."""
        return f"sglang:{self.name}{'_total' if self.kind == 'counter' else ''}"

    def child(self, labels: Mapping[str, Any], **own: str) -> Any:
        """Prometheus' child of this metric (typed by a library without types): ``labels`` are
        SGLang's, ``own`` the values of ``self.labels``. Registered when it is first asked for."""
        return _registered(self, (*labels, *self.labels)).labels(**labels, **own)


@functools.cache
def _registered(metric: Metric, labelnames: tuple[str, ...]) -> Any:
    # Imported late: SGLang sets PROMETHEUS_MULTIPROC_DIR before the first import.
    import prometheus_client

    name = f"sglang:{metric.name}"
    if metric.kind == "counter":
        return prometheus_client.Counter(name, metric.help, labelnames)
    if metric.kind == "gauge":
        return prometheus_client.Gauge(
            name, metric.help, labelnames, multiprocess_mode="mostrecent"
        )
    return prometheus_client.Histogram(name, metric.help, labelnames, buckets=metric.buckets)


#: Upper bounds in seconds, 10 microseconds to 50 seconds.
SECONDS = tuple(base * 10.0**power for power in range(-5, 2) for base in (1, 2, 5))
#: Upper bounds in bytes, 4 KiB to 4 GiB.
BYTES = tuple(2.0**power for power in range(12, 33, 2))
#: Upper bounds in descriptors.
DESCRIPTORS = tuple(4.0**power for power in range(10))


def declare(
    kind: str,
    side: str,
    texts: Mapping[str, str],
    *,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
) -> tuple[Metric, ...]:
    """Metrics of one kind: ``texts`` has the help of each, by name."""
    return tuple(Metric(name, kind, side, text, labels, buckets) for name, text in texts.items())


_DECLARED = (
    *declare(
        "counter",
        "decode",
        {
            "decode_prefix_prompt_tokens": "Prompt tokens of requests admitted by a decode server",
            "decode_prefix_hit_tokens": "Prompt tokens found in the decode radix tree at admission",
            "kv_transfer_requested_bytes": "KV bytes that decode asked prefill to send",
        },
    ),
    *declare(
        "counter",
        "prefill",
        {
            "kv_transfer_sent_bytes": "KV bytes that prefill posted to decode servers",
            "kv_transfer_skipped_tokens": "Prompt tokens not sent because decode already held them",
            "kv_transfer_stuck_workers": "Transfer workers that were found stuck or dead",
        },
    ),
    *declare(
        "counter",
        "both",
        {"kv_transfer_failed": "Rooms that failed on this server, by reason"},
        labels=("reason",),
    ),
    *declare(
        "counter",
        "decode",
        {
            "decode_admission_refused": "Requests that were not admitted at once, by reason; once "
            "a request and reason"
        },
        labels=("reason",),
    ),
    *declare(
        "counter",
        "decode",
        {
            "decode_spec_verify_steps": "Steps in which the target verified a draft, of requests "
            "that ended",
            "decode_spec_accepted_tokens": "Draft tokens that were accepted in them",
        },
        labels=("prefix",),
    ),
    *declare(
        "gauge",
        "decode",
        {
            "decode_prefix_leases": "Requests that hold a lock on a prefix in the decode radix "
            "tree",
            "decode_protected_tokens": "Tokens in the decode radix tree that requests hold a lock "
            "on",
            "decode_evictable_tokens": "Tokens in the decode radix tree that may be evicted",
            "decode_quarantined_tokens": "Tokens of aborted transfers that prefill may still write "
            "to",
        },
    ),
    # With NIXL only, from here on. A *transfer* is one chunk to one peer.
    *declare(
        "gauge",
        "prefill",
        {
            "kv_transfer_waiting": "Transfers that wait in the queues, the most since the last "
            "export",
            "kv_transfer_in_flight": "Transfers under way, the most since the last export",
            "kv_transfer_overdue": "Transfers under way that missed their deadline",
        },
    ),
    *declare(
        "histogram",
        "prefill",
        {
            "kv_transfer_queue_seconds": "From submission until a transfer is posted",
            "kv_transfer_build_seconds": "Making the descriptors of a transfer",
            "kv_transfer_post_seconds": "The transport's calls that start a transfer",
            "kv_transfer_wire_seconds": "From the end of the post until a transfer settled",
            "kv_transfer_transport_seconds": "A transfer as the transport timed it",
        },
        buckets=SECONDS,
    ),
    *declare(
        "histogram",
        "prefill",
        {"kv_transfer_descriptors": "Descriptors of a transfer"},
        buckets=DESCRIPTORS,
    ),
    *declare("histogram", "prefill", {"kv_transfer_bytes": "Bytes of a transfer"}, buckets=BYTES),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}


def _names(kind: str, side: str) -> tuple[str, ...]:
    """Those of one kind and side that have no labels of their own."""
    return tuple(m.name for m in _DECLARED if (m.kind, m.side, m.labels) == (kind, side, ()))


DECODE_COUNTERS = _names("counter", "decode")
PREFILL_COUNTERS = _names("counter", "prefill")
DECODE_GAUGES = _names("gauge", "decode")
_TRANSFER_GAUGES = _names("gauge", "prefill")
_TRANSFER_HISTOGRAMS = _names("histogram", "prefill")


# ---- counting ----


class Counters:
    """This process's counters, by name. Increments come from any thread: a backend may send from
    several at once."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = dict.fromkeys((*DECODE_COUNTERS, *PREFILL_COUNTERS), 0)
        #: Rooms that failed, by reason.
        self.failures: dict[Reason, int] = dict.fromkeys(Reason, 0)
        #: Prometheus' children, whose library has no types.
        self._exported: dict[str, Any] = {}
        self._failures_exported: dict[Reason, Any] = {}
        self._lock = threading.Lock()

    def bind(self, names: Iterable[str], labels: Mapping[str, Any]) -> None:
        """Mirror the counters ``names``, and failures, to Prometheus under ``labels``."""
        for name in names:
            self._exported[name] = METRICS[name].child(labels)
        failed = METRICS["kv_transfer_failed"]
        self._failures_exported = {
            reason: failed.child(labels, reason=reason.value) for reason in Reason
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
STATS = Counters()


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
        self._histograms = {name: Histogram(METRICS[name].buckets) for name in _TRANSFER_HISTOGRAMS}
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
        self._gauges = {name: METRICS[name].child(labels) for name in _TRANSFER_GAUGES}
        self._exported = {name: METRICS[name].child(labels) for name in _TRANSFER_HISTOGRAMS}

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

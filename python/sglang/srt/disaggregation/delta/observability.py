"""What is counted and written down of requests and peers: counters, durations, log lines.

``STATS`` are this process's counters and ``AsyncTransferStats`` the durations and sizes of the
transfers of a pool of workers; both are mirrored to Prometheus where metrics are on: who counts
does not know whether anybody scrapes. ``RateLimitedLog`` writes a line at most once in a while for
each peer (or other key). ``best_effort`` is for counting and logging: the error is logged once, and
the caller goes on. The functions at the end are called where it happens, whether the event log is
on or not; ``count_sent`` also counts.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar  # Any: prometheus_client has no types

from sglang.srt.disaggregation.delta.event_log import (
    Announced,
    Arrived,
    Moved,
    Prefetched,
    Sent,
    event_log,
    now,
)
from sglang.srt.disaggregation.delta.metrics import (
    DECODE_COUNTERS,
    METRICS,
    PREFILL_COUNTERS,
    TRANSFER_GAUGES,
    TRANSFER_HISTOGRAMS,
    Reason,
)
from sglang.srt.disaggregation.delta.pages import Pages

logger = logging.getLogger(__name__)

#: Seconds between two lines with one key.
INTERVAL_S = 5.0
#: Keys told apart at a time. A peer says itself who it is, and a stranger may say so many things.
_REMEMBERED_KEYS = 128
#: Errors quote what a peer sent: a line is cut after so many characters.
_MAX_CHARACTERS = 500


class RateLimitedLog:
    """At most one line per key and interval, so that one peer's noise neither fills the disk nor
    hides another one's trouble. Used by one thread."""

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``interval_s``: seconds between two lines with one key; ``math.inf``: one line ever."""
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._last: dict[str, float] = {}

    def error(self, key: str, message: str, *args: object) -> None:
        """Log ``message % args`` unless a line with ``key`` was just logged."""
        self._log(logging.ERROR, key, message, args)

    def warning(self, key: str, message: str, *args: object) -> None:
        """As ``error``, at the level WARNING."""
        self._log(logging.WARNING, key, message, args)

    def _log(self, level: int, key: str, message: str, args: tuple[object, ...]) -> None:
        now = self._clock()
        if key not in self._last and len(self._last) >= _REMEMBERED_KEYS:
            self._last = {it: at for it, at in self._last.items() if now - at < self._interval_s}
            if len(self._last) >= _REMEMBERED_KEYS:
                key = "one of many"
        last = self._last.get(key)
        if last is not None and now - last < self._interval_s:
            return
        self._last[key] = now
        self._logger.log(level, "%s", (message % args)[:_MAX_CHARACTERS])


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@functools.cache
def _log_once(what: str) -> None:
    logger.exception(
        "%s failed; the transfer continues, and later such errors are not logged", what
    )


def best_effort(
    function: Callable[Parameters, Result],
) -> Callable[Parameters, Result | None]:
    """The function, returning None where it would raise; its first error is logged."""

    @functools.wraps(function)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | None:
        try:
            return function(*args, **kwargs)
        except Exception:
            _log_once(function.__qualname__)
            return None

    return guarded


# ---- counters ----


class Counters:
    """This process's counters, by name. Increments come from any thread: a backend may send from
    several at once."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = dict.fromkeys((*DECODE_COUNTERS, *PREFILL_COUNTERS), 0)
        #: Rooms that failed, by reason.
        self.failures: dict[Reason, int] = dict.fromkeys(Reason, 0)
        #: Prometheus' children.
        self._exported: dict[str, Any] = {}
        self._failures_exported: dict[Reason, Any] = {}
        self._lock = threading.Lock()

    def bind(self, names: Iterable[str], labels: Mapping[str, object]) -> None:
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


# ---- durations and sizes of transfers ----


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
        #: Prometheus' children again.
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
    def bind(self, labels: Mapping[str, object]) -> None:
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


# ---- what the event log is told ----


@best_effort
def count_sent(room: int, peer: str, source: Pages, destination: Pages, moved: int) -> None:
    """``moved`` bytes of KV went from our ``source`` pages to ``destination`` pages of ``peer``."""
    STATS.add("kv_transfer_sent_bytes", moved)
    log = event_log("prefill")
    if log is not None:
        log.write(
            Sent(
                at=now(),
                room=room,
                peer=peer,
                source_pages=source.tolist(),
                destination_pages=destination.tolist(),
                bytes=moved,
            )
        )


@best_effort
def count_moved(
    room: int, peer: str, *, chunk: int, is_last: bool, queue_s: float, build_s: float,
    post_s: float, wire_s: float, descriptors: int, moved: int,
) -> None:  # fmt: skip
    """A chunk is with ``peer``; see ``Moved``."""
    log = event_log("prefill")
    if log is not None:
        log.write(
            Moved(
                at=now(), room=room, peer=peer, chunk=chunk, is_last=is_last, queue_s=queue_s,
                build_s=build_s, post_s=post_s, wire_s=wire_s, descriptors=descriptors, bytes=moved,
            )
        )  # fmt: skip


@best_effort
def log_announced(room: int) -> None:
    """Every decode rank has announced ``room``."""
    log = event_log("prefill")
    if log is not None:
        log.write(Announced(at=now(), room=room))


@best_effort
def log_arrived(room: int) -> None:
    """Everything of ``room`` has arrived on this decode rank."""
    log = event_log("decode")
    if log is not None:
        log.write(Arrived(at=now(), room=room))


@best_effort
def log_prefetched(event: Callable[[], Prefetched]) -> None:
    """A request that asked HiCache's store runs, or is gone; ``event`` is made if the log is on."""
    log = event_log("hicache")
    if log is not None:
        log.write(event())

"""Counters, durations, log lines and events of requests and peers.

``STATS`` has this process's counters and durations (rows of ``metrics.py``), ``TransferGauges`` the
gauges of a pool of transfer workers. ``RateLimitedLog`` limits lines per peer or other key.
``best_effort`` wraps counting and logging: an error is logged once and the caller continues.

``record`` writes to the event log: one JSON line for each step of a room, from its announcement to
its arrival, for the begin and end of a local turn, and for the end of each answer on decode. The
log is off unless ``SGLANG_DISAGGREGATION_EVENT_LOG`` names a folder; each scheduler process appends
to ``<folder>/<side>-<pid>.jsonl``. Times are seconds since the epoch, so that the files of two
servers on one host can be joined by room.

Contract: ``Telemetry`` and ``TransferGauges`` are thread-safe (one lock each, held only for
updates); ``RateLimitedLog`` belongs to one thread.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar  # Any: prometheus_client has no types

import msgspec

from sglang.srt.disaggregation.delta.metrics import METRICS
from sglang.srt.disaggregation.delta.pages import Pages
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)

#: Minimum interval between two lines with one key.
INTERVAL_S = 5.0
#: Maximum keys, because peers choose their names and a hostile one may use many.
_REMEMBERED_KEYS = 128
#: Maximum characters of a line, because errors quote what a peer sent.
_MAX_CHARACTERS = 500


class RateLimitedLog:
    """Logs at most one line per key and interval, so that one peer's errors neither fill the disk
    nor hide those of another peer. Used by one thread."""

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``interval_s``: minimum seconds between lines with one key; ``math.inf``: one line."""
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._last: dict[str, float] = {}

    def error(self, key: str, message: str, *args: object) -> None:
        """Log ``message % args`` unless a line with ``key`` was just logged."""
        now = self._clock()
        if key not in self._last and len(self._last) >= _REMEMBERED_KEYS:
            self._last = {
                seen: last for seen, last in self._last.items() if now - last < self._interval_s
            }
            if len(self._last) >= _REMEMBERED_KEYS:
                key = "one of many"
        last = self._last.get(key)
        if last is not None and now - last < self._interval_s:
            return
        self._last[key] = now
        self._logger.error("%s", (message % args)[:_MAX_CHARACTERS])


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
    """Wrap ``function`` to return None instead of raising; the first error is logged."""

    @functools.wraps(function)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | None:
        try:
            return function(*args, **kwargs)
        except Exception:
            _log_once(function.__qualname__)
            return None

    return guarded


# ---- counters, durations and sizes ----

CounterTotals = defaultdict[tuple[str, ...], float]
#: No label has this value.
COUNT = "(count)"


class Telemetry:
    """This process's counters and histograms by the names in ``METRICS``, exported to Prometheus
    after ``bind``. Thread-safe."""

    def __init__(self) -> None:
        #: (Name, label values) -> total of a counter or sum of a histogram; (name, ``COUNT``) ->
        #: number of values of a histogram.
        self.totals: CounterTotals = defaultdict(float)
        self._labels: dict[str, object] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        self._lock = threading.Lock()

    def bind(self, labels: Mapping[str, object], *sides: str) -> None:
        """Export under ``labels`` from now on, and ``start`` the metrics of ``sides``."""
        self._labels = dict(labels)
        self.start(*sides)

    def start(self, *sides: str) -> None:
        """Export the counters and histograms of ``sides`` (``Metric.side``) as zero, for all known
        label values, because a rate needs the zero. Do nothing before ``bind``."""
        for metric in METRICS.values() if self._labels else ():
            if metric.side in sides and metric.kind != "gauge":
                for value in metric.values or ((),):
                    self._child(metric.name, dict(zip(metric.labels, value, strict=True)))

    def since(self, before: CounterTotals) -> CounterTotals:
        """Return the difference of ``totals`` to ``before``, and update ``before``."""
        with self._lock:
            now = self.totals.copy()
        added = CounterTotals(float, {key: total - before[key] for key, total in now.items()})
        before.update(now)
        return added

    def by(self, name: str) -> CounterTotals:
        """Return the totals of a counter by its label values."""
        return CounterTotals(
            float, {key[1:]: total for key, total in self.totals.items() if key[0] == name}
        )

    @best_effort
    def count(self, name: str, amount: float = 1, **values: str) -> None:
        """Add ``amount`` to a counter; ``values``: its label values."""
        key = (name, *values.values())
        with self._lock:
            self.totals[key] += amount
        if self._labels:
            self._child(name, values).inc(amount)

    @best_effort
    def observe(self, name: str, value: float, **values: str) -> None:
        """Add a value to a histogram; ``values``: its label values."""
        key = (name, *values.values())
        with self._lock:
            self.totals[key] += value
            self.totals[name, COUNT] += 1
        if self._labels:
            self._child(name, values).observe(value)

    @best_effort
    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        if self._labels:
            self._child(name, {}).set(value)

    def _child(self, name: str, values: Mapping[str, str]) -> Any:
        key = (name, *values.values())
        child = self._children.get(key)
        if child is None:
            # Under the lock, because Prometheus refuses a metric that two workers register at once.
            with self._lock:
                child = self._children[key] = METRICS[name].child(self._labels, **values)
        return child


#: One per process, because a scheduler process has one transfer manager.
STATS = Telemetry()


class TransferGauges:
    """Gauges of one transfer pool. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Worker -> transfers waiting, in flight, overdue: now, and maximum since the last tick.
        self._levels: dict[int, tuple[int, int, int]] = {}
        self._highest: dict[int, tuple[int, int, int]] = {}

    @best_effort
    def level(self, worker: int, waiting: int, in_flight: int, overdue: int) -> None:
        """Set a worker's numbers of transfers waiting, in flight and overdue."""
        level = (waiting, in_flight, overdue)
        if self._levels.get(worker) == level:
            return
        with self._lock:
            self._levels[worker] = level
            highest = zip(level, self._highest.get(worker, level), strict=True)
            self._highest[worker] = tuple(map(max, highest))  # type: ignore[assignment]

    @best_effort
    def tick(self) -> None:
        """Set the gauges. Called about once a second by one thread."""
        with self._lock:
            highest, now = (
                [sum(level[index] for level in levels.values()) for index in range(3)]
                for levels in (self._highest, self._levels)
            )
            self._highest = self._levels.copy()
        STATS.set("kv_transfer_waiting", highest[0])
        STATS.set("kv_transfer_in_flight", highest[1])
        STATS.set("kv_transfer_overdue", now[2])


# ---- the event log ----

#: Seconds since the epoch.
now = time.time


class Admitted(msgspec.Struct, frozen=True, tag="admitted", kw_only=True):
    """Decode has reserved destination pages for a room and announced them."""

    at: float
    room: int | None
    rid: str
    prompt_tokens: int
    prefix_tokens: int
    pages: list[int]
    #: Indices of the state moved with the last page.
    state: list[int] = []
    #: Why prefill computes it (``metrics.REASONS``); empty without local turns.
    reason: str = ""


class Sent(msgspec.Struct, frozen=True, tag="sent", kw_only=True):
    """Prefill has posted one chunk of a room to one decode rank."""

    at: float
    room: int
    peer: str
    source_pages: list[int]
    destination_pages: list[int]
    bytes: int


class Announced(msgspec.Struct, frozen=True, tag="announced", kw_only=True):
    """Every decode rank of a room has announced its pages to this prefill rank."""

    at: float
    room: int


class Moved(msgspec.Struct, frozen=True, tag="moved", kw_only=True):
    """One chunk of a room, with the metadata for the last chunk, has reached one decode rank.

    ``queue_s``: from ``send`` until a worker took it; ``build_s``: building of descriptors;
    ``post_s``: start of the transfers; ``wire_s``: wait for their end. Bytes and descriptors
    include state and metadata.
    """

    at: float
    room: int
    peer: str
    chunk: int
    is_last: bool
    queue_s: float
    build_s: float
    post_s: float
    wire_s: float
    descriptors: int
    bytes: int


class Arrived(msgspec.Struct, frozen=True, tag="arrived", kw_only=True):
    """Decode has found a room complete."""

    at: float
    room: int


class TakenLocally(msgspec.Struct, frozen=True, tag="local", kw_only=True):
    """Decode has reserved pages for a turn that it computes itself."""

    at: float
    room: int | None
    rid: str
    prompt_tokens: int
    prefix_tokens: int
    reason: str


class Computed(msgspec.Struct, frozen=True, tag="computed", kw_only=True):
    """Decode has computed the last chunk of a local turn."""

    at: float
    room: int | None
    rid: str


class Ended(msgspec.Struct, frozen=True, tag="ended", kw_only=True):
    """Decode sends the end of an answer. ``finish``: type of SGLang's finish reason; ``error``: its
    message; ``explanation``: see ``request.Explanation``."""

    at: float
    room: int | None
    rid: str
    finish: str
    error: str
    explanation: dict[str, int | str]


RoomEvent = Admitted | Sent | Announced | Moved | Arrived | TakenLocally | Computed | Ended


@functools.cache
def event_log(side: str) -> BinaryIO | None:
    """Open this process's log of ``side`` ("prefill" or "decode"); None if it is off."""
    folder = environment.EVENT_LOG.read()
    if not folder:
        return None
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return open(path / f"{side}-{os.getpid()}.jsonl", "ab", buffering=0)


@best_effort
def record(side: str, event: Callable[[], RoomEvent]) -> None:
    """Write an event to the log of ``side`` (``event_log``). ``event`` is called if it is on."""
    log = event_log(side)
    if log is not None:
        # In one write, so that lines of several threads do not mix.
        log.write(msgspec.json.encode(event()) + b"\n")


@best_effort
def count_sent(room: int, peer: str, source: Pages, destination: Pages, moved: int) -> None:
    """Count and record that ``moved`` bytes were posted from ``source`` pages to ``destination``
    pages of ``peer``."""
    STATS.count("kv_transfer_sent_bytes", moved)
    record(
        "prefill",
        lambda: Sent(
            at=now(),
            room=room,
            peer=peer,
            source_pages=source.tolist(),
            destination_pages=destination.tolist(),
            bytes=moved,
        ),
    )

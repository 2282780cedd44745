"""What is counted and written down of requests and peers: counters, durations, log lines, events.

``STATS`` has this process's counters and durations, by the rows of ``metrics.py``, and
``TransferReport`` the log line of a pool of transfer workers. ``RateLimitedLog`` writes a line at
most once in a while for each peer (or other key). ``best_effort`` is for counting and logging: the
error is logged once, and the caller goes on.

``record`` writes to the event log: one JSON line for each step of a room, from its announcement to
its arrival. It is off unless ``SGLANG_DISAGGREGATION_EVENT_LOG`` names a folder; each scheduler
process appends to ``<folder>/<side>-<pid>.jsonl``. Times are seconds since the epoch, so that the
files of two servers on one host can be joined by room.
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
        now = self._clock()
        if key not in self._last and len(self._last) >= _REMEMBERED_KEYS:
            self._last = {it: at for it, at in self._last.items() if now - at < self._interval_s}
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
    """The function, returning None where it would raise; its first error is logged."""

    @functools.wraps(function)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | None:
        try:
            return function(*args, **kwargs)
        except Exception:
            _log_once(function.__qualname__)
            return None

    return guarded


# ---- counters, durations and sizes ----

Totals = defaultdict[tuple[str, ...], float]
#: No label has this value.
COUNT = "(count)"


class Telemetry:
    """What this process counts and measures, by the names in ``METRICS``; mirrored to Prometheus
    from ``bind`` on: who counts does not know whether anybody scrapes. Used from any thread."""

    def __init__(self) -> None:
        #: Counters, and the sums of histograms, by name and the values of the metric's own labels;
        #: and how many values each histogram was given, by name and ``COUNT``.
        self.totals: Totals = defaultdict(float)
        self._labels: dict[str, object] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        self._lock = threading.Lock()

    def bind(self, labels: Mapping[str, object], side: str = "") -> None:
        """Mirror everything under ``labels`` from now on. The counters of ``side`` ("prefill" or
        "decode") whose label values are known are there from the start: a rate needs their zero."""
        self._labels = dict(labels)
        for metric in METRICS.values():
            known = () if metric.labels and not metric.values else metric.values or ((),)
            if metric.kind == "counter" and side and metric.side in (side, "both"):
                for value in known:
                    self._child(metric.name, dict(zip(metric.labels, value, strict=True)))

    def since(self, before: Totals) -> Totals:
        """What was added to ``totals`` since they were ``before``, which is brought up to date."""
        with self._lock:
            now = self.totals.copy()
        added = Totals(float, {key: total - before[key] for key, total in now.items()})
        before.update(now)
        return added

    def by(self, name: str) -> Totals:
        """A counter with labels of its own, by their values."""
        return Totals(float, {key[1:]: n for key, n in self.totals.items() if key[0] == name})

    @best_effort
    def count(self, name: str, amount: float = 1, **own: str) -> None:
        """``amount`` more of a counter; ``own``: the values of its own labels."""
        key = (name, *own.values())
        with self._lock:
            self.totals[key] += amount
        if self._labels:
            self._child(name, own).inc(amount)

    @best_effort
    def observe(self, name: str, value: float, **own: str) -> None:
        """One more value of a histogram."""
        key = (name, *own.values())
        with self._lock:
            self.totals[key] += value
            self.totals[name, COUNT] += 1
        if self._labels:
            self._child(name, own).observe(value)

    @best_effort
    def set(self, name: str, value: float) -> None:
        """The value of a gauge now."""
        if self._labels:
            self._child(name, {}).set(value)

    def _child(self, name: str, own: Mapping[str, str]) -> Any:
        key = (name, *own.values())
        child = self._children.get(key)
        if child is None:
            # Otherwise two transfer workers register one metric, which Prometheus refuses.
            with self._lock:
                child = self._children[key] = METRICS[name].child(self._labels, **own)
        return child


#: One for each process: a scheduler process has one transfer manager.
STATS = Telemetry()

#: Of the log line: durations by their short names.
_TIMES = {name: f"kv_transfer_{name}_seconds" for name in ("queue", "build", "post", "wire")}


#: Seconds between log lines about transfers: often enough to find a slow minute in a log.
REPORT_INTERVAL_S = 60.0


class TransferReport:
    """Gauges and a log line of one transfer pool. Used from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: By worker: waiting, in flight, overdue.
        self._levels: dict[int, tuple[int, int, int]] = {}
        self._highest: dict[int, tuple[int, int, int]] = {}
        self._logged_at = clock()
        self._logged = STATS.totals.copy()

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

    @best_effort
    def tick(self) -> None:
        """Called every second or so, by any one thread: sets the gauges, and logs when it is time
        to and something was moved or failed."""
        with self._lock:
            highest, now = (
                [sum(level[place] for level in levels.values()) for place in range(3)]
                for levels in (self._highest, self._levels)
            )
            self._highest = self._levels.copy()
        STATS.set("kv_transfer_waiting", highest[0])
        STATS.set("kv_transfer_in_flight", highest[1])
        STATS.set("kv_transfer_overdue", now[2])
        passed = self._clock() - self._logged_at
        if passed < REPORT_INTERVAL_S:
            return
        self._logged_at += passed
        total = STATS.since(self._logged)
        failed = [
            f"{key[1]} {rooms:.0f}"
            for key, rooms in total.items()
            if key[0] == "kv_transfer_failed" and rooms
        ]
        posted, moved = total[_TIMES["queue"], COUNT], total["kv_transfer_bytes",]
        # A full prefix hit is queued and posted, but moves nothing that a transport counts.
        if not posted and not failed:
            return
        means = ", ".join(
            f"{short} {1e3 * total[name,] / max(total[name, COUNT], 1):.2f}"
            for short, name in _TIMES.items()
        )
        logger.info(
            f"KV transfers of the last {passed:.0f} s: {posted:.0f} posted, "
            f"{total['kv_transfer_descriptors',]:.0f} descriptors, "
            f"{moved / 1e6:.1f} MB, {moved / 1e9 / passed:.3f} GB/s; means in ms: {means}; "
            f"now {now[0]} waiting, {now[1]} in flight, {now[2]} overdue; "
            f"ended early: {', '.join(failed) or 'none'}"
        )


# ---- the event log ----

#: Seconds since the epoch.
now = time.time


class Admitted(msgspec.Struct, frozen=True, tag="admitted", kw_only=True):
    """Decode reserved destination pages for a room and announced them."""

    at: float
    room: int | None
    rid: str
    prompt_tokens: int
    prefix_tokens: int
    pages: list[int]
    #: Indices of the state that is moved with the last page.
    state: list[int] = []


class Sent(msgspec.Struct, frozen=True, tag="sent", kw_only=True):
    """Prefill posted one chunk of a room to one decode rank."""

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
    """One chunk of a room, and with the last one the metadata, was seen to be with one decode rank.

    ``queue_s``: from ``send`` until a worker took it; then the descriptors were made (``build_s``),
    the transfers started (``post_s``), and waited for (``wire_s``). Bytes and descriptors are those
    of everything that went along.
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
    """Decode saw that a room is complete."""

    at: float
    room: int


Event = Admitted | Sent | Announced | Moved | Arrived


@functools.cache
def event_log(side: str) -> BinaryIO | None:
    """This process's log; None where the variable is not set. ``side``: prefill or decode."""
    folder = environment.EVENT_LOG.read()
    if not folder:
        return None
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return open(path / f"{side}-{os.getpid()}.jsonl", "ab", buffering=0)


@best_effort
def record(side: str, event: Callable[[], Event]) -> None:
    """Write an event to the log of ``side`` (``event_log``); it is made if the log is on."""
    log = event_log(side)
    if log is not None:
        # One write, so that lines of threads do not mix.
        log.write(msgspec.json.encode(event()) + b"\n")


@best_effort
def count_sent(room: int, peer: str, source: Pages, destination: Pages, moved: int) -> None:
    """``moved`` bytes of KV went from our ``source`` pages to ``destination`` pages of ``peer``."""
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

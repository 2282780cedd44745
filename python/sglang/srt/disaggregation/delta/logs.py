"""What is written down of requests and peers: log lines, and the event log.

``RateLimitedLog`` writes a line at most once in a while for each peer (or other key).
``best_effort`` is for counting and logging: the error is logged once, and the caller goes on.

The event log has one JSON line for each step of a room, from its announcement to its arrival, and
for each request that asked HiCache's store (``hicache-<pid>.jsonl``). It is off unless
``SGLANG_DISAGGREGATION_EVENT_LOG`` names a folder; each scheduler process appends to
``<folder>/<side>-<pid>.jsonl``. Times are seconds since the epoch, so that the files of two servers
on one host can be joined by room. The functions at the end are called where it happens, whether the
log is on or not; ``count_sent`` also counts.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

import msgspec

from sglang.srt.disaggregation.delta.metrics import STATS
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
    logger.exception("%s failed; the transfer goes on, and later such errors are not logged", what)


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


# ---- the event log ----


class Admitted(msgspec.Struct, frozen=True, tag="admitted", kw_only=True):
    """Decode reserved destination pages for a room and announced them."""

    at: float
    room: int | None
    rid: str
    prompt_tokens: int
    prefix_tokens: int
    pages: list[int]


class Sent(msgspec.Struct, frozen=True, tag="sent", kw_only=True):
    """Prefill posted one chunk of a room to one decode rank."""

    at: float
    room: int
    peer: str
    source_pages: list[int]
    destination_pages: list[int]
    bytes: int


class Announced(msgspec.Struct, frozen=True, tag="announced", kw_only=True):
    """Every decode rank of a room has told this prefill rank its pages."""

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


class Prefetched(msgspec.Struct, frozen=True, tag="prefetched", kw_only=True):
    """A request whose prefix was looked for in HiCache's store runs, or is gone.

    Milliseconds until the store had answered, until its pages were fetched, while they were, and
    from then on, in the stage; ``choice`` as in the metric ``prefetch_choices``.
    """

    at: float
    rid: str
    prompt_tokens: int
    hit_pages: int
    loaded_tokens: int
    choice: str | None
    query_ms: int
    wait_ms: int
    fetch_ms: int
    staged_ms: int


Event = Admitted | Sent | Announced | Moved | Arrived | Prefetched


class EventLog:
    """Appends events to one file; one line a write, so that lines of threads do not mix."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def write(self, event: Event) -> None:
        """Append one event."""
        self._file.write(self._encoder.encode(event) + b"\n")


@functools.cache
def event_log(side: str) -> EventLog | None:
    """This process's log; None where the variable is not set. ``side``: prefill or decode."""
    folder = environment.EVENT_LOG.read()
    if not folder:
        return None
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return EventLog(open(path / f"{side}-{os.getpid()}.jsonl", "ab", buffering=0))  # noqa: SIM115


def now() -> float:
    """Seconds since the epoch."""
    return time.time()


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

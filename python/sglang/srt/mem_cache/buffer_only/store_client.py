"""Calls of a store, with a deadline: whatever it does becomes a miss or a failure, never more.

``StoreClient`` stands between HiCache's storage threads and a ``HiCacheStorage``. A call runs on a
thread of the client; the caller waits for it until the deadline and then gives it up. A call cannot
be taken back, so an *overdue* read may still write into the host pages that it was handed, and an
overdue write may still read them, at any later time until it returns (``Outcome.overdue``): the
owner of the staging buffer must not hand them to anyone else before. There is no bound on that
time: memory that a store may write into is better lost than wrong.

After a missed deadline the circuit breaker is open: calls are refused at once, without touching the
store, until a probe is answered. Calls under way, overdue ones among them, are at most
``max_calls``, and probes that hang beside them.
"""

from __future__ import annotations

import concurrent.futures
import enum
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: a store's answers, not looked at yet

import torch

from sglang.srt.mem_cache.buffer_only.call_threads import CallThreads
from sglang.srt.mem_cache.buffer_only.page_parts import leading
from sglang.srt.mem_cache.buffer_only.settings import StoreClientSettings

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

logger = logging.getLogger(__name__)


class CircuitBreaker:
    """Whether a store is asked: CLOSED, it is; OPEN, it is not, after a call that missed its
    deadline; HALF_OPEN, a probe is under way. Times are in seconds of one monotonic clock. Not
    thread-safe."""

    class State(enum.Enum):
        """See the class."""

        CLOSED = enum.auto()
        OPEN = enum.auto()
        HALF_OPEN = enum.auto()

    def __init__(self, first_retry: float, longest_retry: float) -> None:
        """The first probe is due ``first_retry`` after a call timed out, the next after twice that
        and so on, at most ``longest_retry`` apart."""
        self._first, self._longest = first_retry, longest_retry
        self._backoff = first_retry
        self._retry_at = 0.0
        self.state = self.State.CLOSED
        #: The interval before the next probe.
        self.retry_in = first_retry

    @property
    def closed(self) -> bool:
        """Whether the store is asked."""
        return self.state is self.State.CLOSED

    def timed_out(self, now: float) -> bool:
        """A call missed its deadline; returns whether that opened the breaker."""
        if not self.closed:
            return False
        self.state = self.State.OPEN
        self._postpone(now)
        return True

    def succeeded(self) -> None:
        """A call other than a probe was answered, so the next outage is a new one."""
        if self.closed:
            self._backoff = self._first

    def try_probe(self, now: float, hanging: int = 0) -> bool:
        """Whether the caller shall probe now. The next probe is due an interval later, also if this
        one never returns; an interval more for each of the ``hanging`` ones before it, so that a
        long outage does not take a thread an interval."""
        if self.closed or now < self._retry_at:
            return False
        self.state = self.State.HALF_OPEN
        self._postpone(now)
        self._retry_at += hanging * self.retry_in
        return True

    def probe_ended(self, answered: bool) -> None:
        """An answer closes the breaker. Should the next call time out, the interval grows on: the
        store may be one that answers probes and nothing else."""
        if answered:
            self.state = self.State.CLOSED
        elif not self.closed:
            self.state = self.State.OPEN

    def _postpone(self, now: float) -> None:
        self.retry_in = self._backoff
        self._retry_at = now + self.retry_in
        self._backoff = min(2 * self._backoff, self._longest)


#: A key that no page has: a page's key is a SHA-256.
PROBE_KEY = "0" * 64


class Fault(enum.Enum):
    """What a store did; the values are for metrics. The first four count calls."""

    ERROR = "error"
    #: Not answered in time, and given up.
    DEADLINE = "deadline"
    #: Refused here: the store is down, or too many calls are under way.
    DOWN = "down"
    #: An answer that means nothing: another number of results, or none.
    MALFORMED = "malformed"
    #: Pages that a read or a write did not complete.
    MISSING = "missing"
    #: Pages behind the first missing one: complete, and of no use.
    HOLE = "hole"
    #: Values of a page that were shorter than they must be; their pages are missing too.
    SHORT = "short"


@dataclass(frozen=True, eq=False)
class OverdueCall:
    """A call that was given up, and the memory that it may still use."""

    #: Host slots, 1-D.
    host_indices: torch.Tensor
    #: Done when the call has returned. Its callbacks run on a thread of the client.
    returned: Future[Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a call for some pages in a row."""

    #: Leading pages that are there: found, read or durably written.
    pages: int
    #: Why there are no more; None also for a query that found less than all.
    fault: Fault | None = None
    #: Set if the call was given up.
    overdue: OverdueCall | None = None


def _wait(call: Future[Any], seconds: float) -> None:
    concurrent.futures.wait([call], timeout=seconds)


class StoreClient:
    """A store that never raises and never hangs. Thread-safe, as far as the store is."""

    def __init__(
        self,
        store: HiCacheStorage,
        name: str,
        settings: StoreClientSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[Future[Any], float], None] = _wait,
    ) -> None:
        """Over ``store``, a ``HiCacheStorage`` with the ``_v1`` calls.

        Args:
            name: what messages call it.
            clock, wait: for tests; ``wait`` returns when the call is done or its time is over.
        """
        self.store, self.name = store, name
        self.settings = settings or StoreClientSettings.from_env()
        self.faults: Counter[Fault] = Counter()
        self._clock, self._wait = clock, wait
        self._threads = CallThreads(f"hicache-store-{name}")
        self._lock = threading.RLock()  # a future's callback may run on the thread that adds it
        self._breaker = CircuitBreaker(self.settings.first_retry, self.settings.longest_retry)
        self._under_way: set[Future[Any]] = set()
        self._overdue: set[Future[Any]] = set()
        #: Probes that have not returned. They are not bounded with the other calls: those that hang
        #: would keep a store that has recovered from being asked again.
        self._probes: set[Future[Any]] = set()
        self._stats: Future[Any] | None = None
        self._error_logged = False
        if hasattr(store, "on_short"):
            store.on_short = lambda: self._count(Fault.SHORT)

    # ---- what the storage threads call ----

    def query(self, keys: Sequence[str], extra_info: Any = None) -> Outcome:
        """How many leading pages the store has. ``extra_info``: a ``HiCacheStorageExtraInfo``."""
        asked = list(keys)
        found, fault, _ = self._call("batch_exists", lambda: self._query(asked, extra_info))
        return Outcome(0, fault) if fault else Outcome(found)

    def read(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> Outcome:
        """Read pages into host memory. Pages behind the first missing one do not count, whatever
        was written into their memory."""
        return self._move("batch_get_v1", keys, host_indices, extra_info)

    def write(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> Outcome:
        """Write pages from host memory."""
        return self._move("batch_set_v1", keys, host_indices, extra_info)

    def clear(self) -> bool:
        """Remove everything from the store; whether it did."""
        answer, fault, _ = self._call("clear", lambda: self.store.clear())
        return fault is None and answer is not False  # most backends answer nothing

    def close(self, until: float = math.inf) -> bool:
        """Close the store, where it can be closed, and end the threads; False if it is still in
        that call at ``until``, of ``time.monotonic``, or at its deadline."""
        close, given_up = getattr(self.store, "close", None), None
        if close is not None:
            _, _, given_up = self._call("close", close, until - time.monotonic())
        self._threads.close()
        return given_up is None

    def get_stats(self) -> Any:
        """``HiCacheStorage.get_stats``, from a thread: what was found since the last call, or None.
        Nobody waits for it."""
        stats = self._stats
        if stats is not None and not stats.done():
            return None
        self._stats = self._start(lambda: self.store.get_stats())
        if stats is None:
            return None
        if stats.exception() is not None:
            self._count(Fault.ERROR)
            return None
        return stats.result()

    def poll(self) -> bool:
        """Whether the store is asked. Starts the probe that is due, also if nobody calls."""
        if not self._breaker.closed:
            with self._lock:
                self._probe()
        return self._breaker.closed

    # ---- for gauges and tests ----

    @property
    def up(self) -> bool:
        """Whether the store is asked."""
        return self._breaker.closed

    @property
    def overdue(self) -> int:
        """Calls that were given up and have not returned."""
        return len(self._overdue)

    @property
    def under_way(self) -> int:
        """Calls that have not returned, the given-up ones among them."""
        return len(self._under_way)

    # ---- inside ----

    def _query(self, keys: list[str], extra_info: Any) -> int:
        found = self.store.batch_exists(keys, extra_info)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= len(keys):
            raise _Malformed(f"{found!r} pages found of {len(keys)}")
        return found

    def _move(self, method: str, keys: Any, host_indices: torch.Tensor, extra: Any) -> Outcome:
        asked = list(keys)
        if not asked:
            return Outcome(0)
        call = getattr(self.store, method)
        results, fault, given_up = self._call(
            method, lambda: _results(call(asked, host_indices, extra), len(asked))
        )
        if given_up is not None:
            return Outcome(0, fault, OverdueCall(host_indices, given_up))
        if fault is not None:
            return Outcome(0, fault)
        pages, there = leading(results), sum(results)
        self._count(Fault.MISSING, len(asked) - there)
        self._count(Fault.HOLE, there - pages)
        return Outcome(pages, None if pages == len(asked) else Fault.MISSING)

    def _call(
        self, method: str, call: Callable[[], Any], most_s: float = math.inf
    ) -> tuple[Any, Fault | None, Future[Any] | None]:
        """The call's answer, or why there is none; the future of a call that was given up, at its
        deadline or after ``most_s`` seconds."""
        future = self._start(call)
        if future is None:
            self._count(Fault.DOWN)
            return None, Fault.DOWN, None
        seconds = max(0.0, min(self.settings.deadline, most_s))
        self._wait(future, seconds)
        if not future.done():
            self._gave_up(method, future, seconds)
            return None, Fault.DEADLINE, future
        error = future.exception()
        if error is not None:
            return None, self._failed(method, error), None
        with self._lock:
            self._breaker.succeeded()
            self._error_logged = False
        return future.result(), None, None

    def _start(self, call: Callable[[], Any]) -> Future[Any] | None:
        with self._lock:
            if not self._breaker.closed:
                self._probe()  # beside: the call that started it is refused like any other
                return None
            return self._run(call) if self._has_room else None

    @property
    def _has_room(self) -> bool:
        return len(self._under_way) - len(self._probes) < self.settings.max_calls

    def _probe(self) -> None:
        if self._breaker.try_probe(self._clock(), len(self._probes)):
            probe = self._run(lambda: self.store.batch_exists([PROBE_KEY], None))
            self._probes.add(probe)
            probe.add_done_callback(self._probed)

    def _run(self, call: Callable[[], Any]) -> Future[Any]:
        future = self._threads.start(call)
        self._under_way.add(future)
        future.add_done_callback(self._returned)
        return future

    def _returned(self, future: Future[Any]) -> None:
        with self._lock:
            self._under_way.discard(future)

    def _probed(self, future: Future[Any]) -> None:
        answered = future.exception() is None
        with self._lock:
            was_closed = self._breaker.closed
            self._probes.discard(future)
            self._breaker.probe_ended(answered)
        if answered and not was_closed:
            logger.warning("HiCache store %s answers again and is used again", self.name)

    def _gave_up(self, method: str, future: Future[Any], seconds: float) -> None:
        with self._lock:
            self._overdue.add(future)
            self.faults[Fault.DEADLINE] += 1
            first = self._breaker.timed_out(self._clock())
            retry = self._breaker.retry_in
        future.add_done_callback(self._overdue.discard)
        if first:
            logger.error(
                "HiCache store %s: %s did not return within %g s (SGLANG_HICACHE_STORE_DEADLINE); "
                "the store is not used until it answers a probe, the first one in %g s. Until "
                "then, requests compute the tokens that it may have",
                self.name,
                method,
                seconds,
                retry,
            )

    def _failed(self, method: str, error: BaseException) -> Fault:
        fault = Fault.MALFORMED if isinstance(error, _Malformed) else Fault.ERROR
        with self._lock:
            self.faults[fault] += 1
            first, self._error_logged = not self._error_logged, True
        if first:  # once, until a call has worked again; the others are counted
            logger.error(
                "HiCache store %s: %s failed: %s; its pages count as missing (logged once until a "
                "call works again; all are counted in sglang:hicache_buffer_store_faults_total)",
                self.name,
                method,
                error,
                exc_info=error,
            )
        return fault

    def _count(self, fault: Fault, number: int = 1) -> None:
        if number:
            with self._lock:
                self.faults[fault] += number


class _Malformed(Exception):
    """An answer that means nothing."""


def _results(results: Any, count: int) -> list[bool]:
    if not isinstance(results, (list, tuple)) or len(results) != count:
        raise _Malformed(f"{results!r:.100} for {count} pages")
    return [result is True for result in results]

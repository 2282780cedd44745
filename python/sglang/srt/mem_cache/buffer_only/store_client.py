"""Store calls with a deadline: every failure of the store becomes a miss or a failed write.

``StoreClient`` is between the threads that run jobs and a ``HiCacheStorage``. A call runs on a
thread of the client; the caller waits until the deadline and then gives it up. A call cannot be
cancelled: until an *overdue* one returns (``CallOutcome.overdue``), a read may write to its host
pages and a write may read them. So their owner must not reuse them before, for however long.

A missed deadline opens the breaker: calls are refused at once, without reaching the store, until a
probe is answered. Reads have another breaker, because lookups may work while data does not arrive:
a slow read without a page opens it, and then reads are refused, except one per interval, until one
delivers a page. At most ``max_calls`` calls are in flight, overdue ones included; hung probes do
not count.

Contract: ``StoreClient`` is thread-safe as far as the store is; ``_lock`` guards the breakers and
sets of futures, and is not held during a store call. Jobs' threads block in ``query``, ``read`` and
``write``; the scheduler thread calls only ``poll``, ``get_stats`` and the properties, which do not
block, and ``clear`` and ``close``, which do. Ranks do not agree here: ``TransferVote.store_up``
carries ``poll``'s result.
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
from typing import TYPE_CHECKING, Any  # Any: a store's answers before validation

import torch

from sglang.srt.mem_cache.buffer_only.host_pool import leading
from sglang.srt.mem_cache.buffer_only.jobs import BackOff, Threads
from sglang.srt.mem_cache.buffer_only.settings import StoreClientSettings

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

logger = logging.getLogger(__name__)


#: Fraction of the deadline after which a read without a page counts as failed. A store that has
#: only evicted the pages since the lookup answers sooner.
SLOW_READ = 0.1

#: A key that no page has, because a page's key is a SHA-256.
PROBE_KEY = "0" * 64


class Fault(enum.Enum):
    """Faults of a store; the values are metric labels. The first three count calls, the others
    pages."""

    #: Raised, or returned an invalid answer, such as a wrong number of results.
    ERROR = "error"
    #: Missed the deadline and was given up.
    DEADLINE = "deadline"
    #: Refused here: the store is down, or too many calls are in flight.
    DOWN = "down"
    #: Pages that a read or a write did not complete.
    MISSING = "missing"
    #: Complete pages after the first missing one, which are unusable.
    HOLE = "hole"


@dataclass(frozen=True)
class CallOutcome:
    """Result of a call for consecutive pages."""

    #: Number of leading pages found, read or durably written.
    pages: int
    #: Reason that there are no more pages; None also for a query that found fewer than all.
    fault: Fault | None = None
    #: Set if the call was given up: done once it has returned. Until then the call may use its host
    #: memory.
    overdue: Future[Any] | None = None


class StoreClient:
    """Wrapper of a store that never raises and never hangs; see the module's contract.

    Args:
        store: a ``HiCacheStorage`` with the ``_v1`` calls.
        name: the store's name in log lines.
        clock, wait: for tests; ``wait`` returns when the calls are done or the timeout is over.
    """

    def __init__(
        self,
        store: HiCacheStorage,
        name: str,
        settings: StoreClientSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[list[Future[Any]], float], object] = concurrent.futures.wait,
    ) -> None:
        self.store, self.name = store, name
        self.settings = settings or StoreClientSettings()
        self.faults: Counter[Fault] = Counter()
        self._clock, self._wait = clock, wait
        self._threads = Threads(f"store-{name}", None)
        # Reentrant, because a future's callback may run on the thread that adds it.
        self._lock = threading.RLock()
        #: Breaker of all calls, opened by a missed deadline. Each probe is an attempt.
        self._outage = BackOff(self.settings.first_retry, self.settings.longest_retry)
        #: Breaker of reads.
        self._reads = BackOff(self.settings.first_retry, self.settings.longest_retry)
        #: True while a trial of ``_reads`` is in flight.
        self._is_trying = False
        self._under_way: set[Future[Any]] = set()
        self._overdue: set[Future[Any]] = set()
        #: Probes in flight. They do not count for ``max_calls``, because hung probes would keep a
        #: recovered store from being used again.
        self._probes: set[Future[Any]] = set()
        self._stats: Future[Any] | None = None
        self._error_logged = False

    # ---- called by the threads that run jobs ----

    def query(self, keys: Sequence[str], extra_info: Any = None) -> CallOutcome:
        """Return how many leading pages the store has. ``extra_info``: a
        ``HiCacheStorageExtraInfo``."""
        page_keys = list(keys)

        def query() -> int:
            found = self.store.batch_exists(page_keys, extra_info)
            is_number = isinstance(found, int) and not isinstance(found, bool)
            if not (is_number and 0 <= found <= len(page_keys)):
                raise ValueError(f"{found!r} pages found of {len(page_keys)}")
            return found

        found, fault, _ = self._call("batch_exists", query)
        return CallOutcome(0, fault) if fault else CallOutcome(found)

    def read(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> CallOutcome:
        """Read pages into host memory. Pages after the first missing one do not count, whatever was
        written to their memory.

        A slow read without a page delays its request. After one, reads are refused for an interval.
        Then one read at a time is a trial and all other reads are refused, until a trial delivers a
        page. Each slow trial doubles the interval.
        """
        began = self._clock()
        with self._lock:
            failing = self._reads.failing
            refused = failing and (self._is_trying or self._reads.waits(began))
            is_trial = failing and not refused
            self._is_trying |= is_trial
        if refused:
            self._count(Fault.DOWN)
            return CallOutcome(0, Fault.DOWN)
        outcome = self._move("batch_get_v1", keys, host_indices, extra_info)
        with self._lock:
            before, now = self._reads.failing, self._clock()
            is_slow = now - began > SLOW_READ * self.settings.deadline
            self._is_trying &= not is_trial
            if outcome.pages:
                self._reads.worked()
            elif is_slow and (is_trial or not before):
                self._reads.failed(now)
            after = self._reads.failing
        if after and not before:
            logger.warning(
                "HiCache store %s: reads deliver nothing; they are refused for a while, and "
                "requests compute their tokens. Check the store's data transport",
                self.name,
            )
        elif before and not after:
            logger.warning("HiCache store %s: reads deliver again", self.name)
        return outcome

    def write(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> CallOutcome:
        """Write pages from host memory."""
        return self._move("batch_set_v1", keys, host_indices, extra_info)

    def clear(self) -> bool:
        """Remove everything from the store. Return True on success."""
        answer, fault, _ = self._call("clear", lambda: self.store.clear())
        return fault is None and answer is not False  # most backends return None

    def close(self, until: float = math.inf) -> bool:
        """Close the store, if it has a ``close``, and end the threads. Return False if that call
        still runs at ``until`` (``time.monotonic``) or at its deadline."""
        close, given_up = getattr(self.store, "close", None), None
        if close is not None:
            _, _, given_up = self._call("close", close, until - time.monotonic())
        self._threads.close()
        return given_up is None

    def get_stats(self) -> Any:
        """Return the result of the last ``HiCacheStorage.get_stats``, or None, and start the next
        one on a thread. Never blocks."""
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
        """Return True if calls reach the store. Start a probe that is due, because without calls no
        other code would start it."""
        if self._outage.failing:
            with self._lock:
                self._probe()
        return not self._outage.failing

    # ---- for gauges and tests ----

    @property
    def up(self) -> bool:
        """True if calls reach the store, reads included."""
        return not (self._outage.failing or self._is_trying or self._reads.waits(self._clock()))

    @property
    def overdue(self) -> int:
        """Number of calls that were given up and have not returned."""
        return len(self._overdue)

    @property
    def under_way(self) -> int:
        """Number of calls that have not returned, overdue ones and probes included."""
        return len(self._under_way) + len(self._probes)

    # ---- inside ----

    def _move(self, method: str, keys: Any, host_indices: torch.Tensor, extra: Any) -> CallOutcome:
        page_keys = list(keys)
        if not page_keys:
            return CallOutcome(0)
        call = getattr(self.store, method)

        def move() -> list[bool]:
            results = call(page_keys, host_indices, extra)
            if not isinstance(results, (list, tuple)) or len(results) != len(page_keys):
                raise ValueError(f"{results!r:.100} for {len(page_keys)} pages")
            return [result is True for result in results]

        results, fault, given_up = self._call(method, move)
        if fault is not None:
            return CallOutcome(0, fault, given_up)
        pages, complete = leading(results), sum(results)
        self._count(Fault.MISSING, len(page_keys) - complete)
        self._count(Fault.HOLE, complete - pages)
        return CallOutcome(pages, None if pages == len(page_keys) else Fault.MISSING)

    def _call(
        self, method: str, call: Callable[[], Any], max_s: float = math.inf
    ) -> tuple[Any, Fault | None, Future[Any] | None]:
        """Run ``call`` and wait for it, until its deadline or for ``max_s`` seconds. Return its
        answer, the fault if there is none, and the future of a call that was given up."""
        future = self._start(call)
        if future is None:
            self._count(Fault.DOWN)
            return None, Fault.DOWN, None
        seconds = max(0.0, min(self.settings.deadline, max_s))
        self._wait([future], seconds)
        if not future.done():
            with self._lock:
                self._overdue.add(future)
                first = not self._outage.failing
                if first:
                    self._outage.failed(self._clock())
            future.add_done_callback(self._overdue.discard)
            self._count(Fault.DEADLINE)
            if first:
                logger.error(
                    "HiCache store %s: %s did not return within %g s "
                    "(SGLANG_HICACHE_STORE_DEADLINE); the store is not used until it answers a "
                    "probe, the first one in %g s. Until then, requests compute the tokens that it "
                    "may have",
                    *(self.name, method, seconds, self._outage.interval),
                )
            return None, Fault.DEADLINE, future
        error = future.exception()
        with self._lock:
            first, self._error_logged = not self._error_logged, error is not None
            if error is None and not self._outage.failing:  # else the call began before the outage
                self._outage.worked()
        if error is None:
            return future.result(), None, None
        self._count(Fault.ERROR)
        if first:  # logged once until a call works again; all errors are counted
            logger.error(
                "HiCache store %s: %s failed: %s; its pages count as missing (logged once until a "
                "call works again; all are counted in sglang:hicache_buffer_store_faults_total)",
                *(self.name, method, error),
                exc_info=error,
            )
        return None, Fault.ERROR, None

    def _start(self, call: Callable[[], Any]) -> Future[Any] | None:
        with self._lock:
            if self._outage.failing:
                self._probe()
                return None  # also the call that started the probe is refused
            if len(self._under_way) >= self.settings.max_calls:
                return None
            future = self._threads.start(call)
            self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def _probe(self) -> None:
        """Query a key that does not exist, if a probe is due. Each hung probe delays the next one,
        because a long outage would otherwise take one more thread per interval."""
        now = self._clock()
        if self._outage.failing and not self._outage.waits(now):
            self._outage.failed(now, more=len(self._probes))
            probe = self._threads.start(lambda: self.store.batch_exists([PROBE_KEY], None))
            self._probes.add(probe)
            probe.add_done_callback(self._probed)

    def _probed(self, probe: Future[Any]) -> None:
        answered = probe.exception() is None
        with self._lock:
            self._probes.discard(probe)
            is_up_again = answered and self._outage.failing
            if answered:
                # Not ``worked``, because the store may answer probes and nothing else: if the next
                # call times out, the interval keeps growing.
                self._outage.failing = False
        if is_up_again:
            logger.warning("HiCache store %s answers again and is used again", self.name)

    def _count(self, fault: Fault, number: int = 1) -> None:
        if number:
            with self._lock:
                self.faults[fault] += number

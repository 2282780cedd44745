"""Calls of a store, with a deadline: whatever it does becomes a miss or a failure, never more.

``StoreClient`` stands between the threads that run jobs and a ``HiCacheStorage``. A call runs on a
thread of the client; the caller waits for it until the deadline and then gives it up. A call cannot
be taken back, so an *overdue* read may still write into the host pages that it was handed, and an
overdue write may still read them, at any later time until it returns (``Outcome.overdue``): the
owner of the staging buffer must not hand them to anyone else before. There is no bound on that
time: memory that a store may write into is better lost than wrong.

After a missed deadline the calls' breaker is open: calls are refused at once, without touching the
store, until a probe is answered. Reads also have a breaker of their own, because lookups may work
where data does not arrive. A slow read without a page opens it. Reads are then refused, except one
after each interval, until one has brought a page. At most ``max_calls`` calls are under way,
overdue ones included. Probes that hang are not counted among them.
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
from typing import TYPE_CHECKING, Any  # Any: a store's answers, not looked at yet; tokens

import torch

from sglang.srt.mem_cache.buffer_only.host_pool import leading
from sglang.srt.mem_cache.buffer_only.jobs import BackOff, Job, Threads
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace
from sglang.srt.mem_cache.buffer_only.nodes import hashes_of, images_before
from sglang.srt.mem_cache.buffer_only.settings import BATCH_PAGES, StoreClientSettings

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

logger = logging.getLogger(__name__)


#: Part of the deadline after which a read without a page counts as failed. A store that has evicted
#: the pages since its lookup answers sooner.
SLOW_READ = 0.1

#: A key that no page has: a page's key is a SHA-256.
PROBE_KEY = "0" * 64


class Fault(enum.Enum):
    """What a store did; the values are for metrics. The first three count calls."""

    #: Raised, or answered what means nothing: another number of results, or none.
    ERROR = "error"
    #: Not answered in time, and given up.
    DEADLINE = "deadline"
    #: Refused here: the store is down, or too many calls are under way.
    DOWN = "down"
    #: Pages that a read or a write did not complete.
    MISSING = "missing"
    #: Pages behind the first missing one: complete, and of no use.
    HOLE = "hole"


@dataclass(frozen=True)
class Outcome:
    """What became of a call for some pages in a row."""

    #: Leading pages that are there: found, read or durably written.
    pages: int
    #: Why there are no more; None also for a query that found less than all.
    fault: Fault | None = None
    #: Set if the call was given up: done when it has returned, on a thread of the client. Until
    #: then it may use the host memory that it was handed.
    overdue: Future[Any] | None = None


class StoreClient:
    """A store that never raises and never hangs. Thread-safe, as far as the store is.

    Args:
        store: a ``HiCacheStorage`` with the ``_v1`` calls.
        name: what messages call it.
        clock, wait: for tests; ``wait`` returns when the calls are done or their time is over.
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
        self._lock = threading.RLock()  # a future's callback may run on the thread that adds it
        #: The circuit breaker: of calls that missed their deadline. A probe is an attempt.
        self._outage = BackOff(self.settings.first_retry, self.settings.longest_retry)
        #: The circuit breaker of reads: lookups may work where data does not arrive.
        self._reads = BackOff(self.settings.first_retry, self.settings.longest_retry)
        #: Whether a trial of ``_reads`` is under way.
        self._is_trying = False
        self._under_way: set[Future[Any]] = set()
        self._overdue: set[Future[Any]] = set()
        #: Probes that have not returned. They are not bounded with the other calls: those that hang
        #: would keep a store that has recovered from being asked again.
        self._probes: set[Future[Any]] = set()
        self._stats: Future[Any] | None = None
        self._error_logged = False

    # ---- what the threads that run jobs call ----

    def query(self, keys: Sequence[str], extra_info: Any = None) -> Outcome:
        """How many leading pages the store has. ``extra_info``: a ``HiCacheStorageExtraInfo``."""
        asked = list(keys)

        def query() -> int:
            found = self.store.batch_exists(asked, extra_info)
            whole = isinstance(found, int) and not isinstance(found, bool)
            if not (whole and 0 <= found <= len(asked)):
                raise ValueError(f"{found!r} pages found of {len(asked)}")
            return found

        found, fault, _ = self._call("batch_exists", query)
        return Outcome(0, fault) if fault else Outcome(found)

    def read(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> Outcome:
        """Read pages into host memory. Pages behind the first missing one do not count, whatever
        was written into their memory.

        A slow read without a page delays its request. After one, reads are refused for an interval.
        Then one read at a time is the trial, and the others are refused, until a trial brings a
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
            return Outcome(0, Fault.DOWN)
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
        if self._outage.failing:
            with self._lock:
                self._probe()
        return not self._outage.failing

    # ---- for gauges and tests ----

    @property
    def up(self) -> bool:
        """True if the store is asked, for pages too."""
        return not (self._outage.failing or self._is_trying or self._reads.waits(self._clock()))

    @property
    def overdue(self) -> int:
        """Calls that were given up and have not returned."""
        return len(self._overdue)

    @property
    def under_way(self) -> int:
        """Calls that have not returned, the given-up ones among them."""
        return len(self._under_way) + len(self._probes)

    # ---- inside ----

    def _move(self, method: str, keys: Any, host_indices: torch.Tensor, extra: Any) -> Outcome:
        asked = list(keys)
        if not asked:
            return Outcome(0)
        call = getattr(self.store, method)

        def move() -> list[bool]:
            results = call(asked, host_indices, extra)
            if not isinstance(results, (list, tuple)) or len(results) != len(asked):
                raise ValueError(f"{results!r:.100} for {len(asked)} pages")
            return [result is True for result in results]

        results, fault, given_up = self._call(method, move)
        if fault is not None:
            return Outcome(0, fault, given_up)
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
            if error is None and not self._outage.failing:  # else it began before the outage
                self._outage.worked()
        if error is None:
            return future.result(), None, None
        self._count(Fault.ERROR)
        if first:  # once, until a call has worked again; the others are counted
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
                self._probe()  # beside: the call that started it is refused like any other
                return None
            if len(self._under_way) >= self.settings.max_calls:
                return None
            future = self._threads.start(call)
            self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def _probe(self) -> None:
        """Ask for a page that is not there, if that is due: later for each probe that hangs, so
        that a long outage does not take a thread an interval."""
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
            again = answered and self._outage.failing
            if answered:
                # Not ``worked``: should the next call time out, the interval grows on. The store
                # may be one that answers probes and nothing else.
                self._outage.failing = False
        if again:
            logger.warning("HiCache store %s answers again and is used again", self.name)

    def _count(self, fault: Fault, number: int = 1) -> None:
        if number:
            with self._lock:
                self.faults[fault] += number


@dataclass(eq=False)
class PageStore:
    """One store, behind its client, by the pages of prompts: their keys, and calls of at most
    ``batch_pages`` pages.

    ``prefix_keys``, where given, are the keys of all pages before the first one, for backends that
    place a page by them.
    """

    client: StoreClient
    page_size: int
    batch_pages: int = BATCH_PAGES
    #: Of all keys that are made now; requests have parts of it.
    namespace: Namespace = Namespace.of({})  # noqa: RUF009

    def keys(
        self,
        hashes: Sequence[str],
        extra_key: str | None,
        begin: int = 0,
        namespace: Namespace | None = None,
    ) -> list[str]:
        """Keys of pages, given SGLang's page hashes, of a request with ``extra_key``: those from
        page ``begin`` of its prompt on. ``namespace``: the store's when the request came."""
        own, keys = (namespace or self.namespace).within(extra_key), list[str]()
        if not getattr(extra_key, "images", ()):
            return own.keys(hashes)
        for page, page_hash in enumerate(hashes, begin + 1):
            images = images_before(extra_key, page * self.page_size)
            keys += own.within(images, b"images").keys([page_hash])
        return keys

    def call(
        self,
        job: Job,
        call: Callable[..., Outcome],
        keys: Sequence[str],
        prefix_keys: Sequence[str] | None,
        slots: torch.Tensor | None = None,
    ) -> int:
        """Have the client ``query``, ``read`` or ``write`` pages batch by batch, until one is not
        wholly good or nobody wants more; the leading good pages.

        Args:
            slots: host slots of the pages, one page after the other; None for a query.
        """
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

        page, done, most = self.page_size, 0, BATCH_PAGES if slots is None else self.batch_pages
        while done < len(keys) and not job.cancelled:
            batch = list(keys[done : done + most])
            # A list of its own for each call: backends are known to extend what they are given.
            before = None if prefix_keys is None else [*prefix_keys, *keys[:done]]
            part = () if slots is None else (slots[done * page : (done + len(batch)) * page],)
            outcome = call(batch, *part, HiCacheStorageExtraInfo(prefix_keys=before))
            done += outcome.pages
            if outcome.overdue is not None:
                job.overdue_calls.append(outcome.overdue)
            if outcome.pages < len(batch):
                job.fault = None if outcome.fault is None else outcome.fault.value
                break
        return done

    def search(
        self,
        tokens: Sequence[Any],
        last_hash: str | None,
        extra_key: str | None,
        begin: int,
        prefix_keys: Sequence[str] | None,
        first_pages: int = BATCH_PAGES,
    ) -> Callable[[Job], int]:
        """The work of a job that looks for ``tokens``, whole pages, and leaves ``Job.found``.

        Args:
            last_hash: page hash of the page before them; None at the start of a prompt.
            begin: pages of the prompt before them.
            first_pages: that the store is asked for first. Of most prompts it has nothing: the rest
                need not be hashed to know that.
        """
        namespace, page = self.namespace, self.page_size

        def work(job: Job) -> int:
            found_hashes, found_keys = job.found
            last, start, pages = last_hash, 0, min(first_pages, BATCH_PAGES)
            while start < len(tokens):
                stop = start + pages * page
                hashes = hashes_of(tokens[start:stop], last, page)
                keys = self.keys(hashes, extra_key, begin + len(found_keys), namespace)
                before = None if prefix_keys is None else [*prefix_keys, *found_keys]
                good = self.call(job, self.client.query, keys, before)
                found_hashes += hashes[:good]
                found_keys += keys[:good]
                if good < len(hashes):
                    break
                last, start, pages = hashes[-1], stop, BATCH_PAGES
            return len(found_keys)

        return work

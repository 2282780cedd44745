"""Store jobs on other threads, whose calls may never return, and the back-off after failures.

Contract: a ``Job`` is run by one thread and read by the scheduler thread. ``Job.pages`` is written
last and publishes the other fields. ``Threads.start`` may be called from any thread; ``_lock``
guards its counts. ``BackOff`` has no lock: the caller provides one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any  # Any: what a call returns

from sglang.srt.mem_cache.buffer_only.transfer_vote import PENDING

logger = logging.getLogger(__name__)


class Job:
    """Store calls for consecutive pages, on a thread of :class:`Threads`. Only the scheduler thread
    acts on the results."""

    def __init__(self, work: Callable[[Job], int]) -> None:
        self._work = work
        #: Page hashes and keys that a query found; ``pages`` of each.
        self.found: tuple[list[str], list[str]] = ([], [])
        #: The store's fault, if it is the reason that not all pages are good.
        self.fault: str | None = None
        #: Calls that were given up and may still use the staging pages.
        self.overdue_calls: list[Future[object]] = []
        #: Pages marked as stored that the store does not have.
        self.lost = 0
        #: Duration of the work.
        self.seconds = 0.0
        #: Leading good pages; ``PENDING`` until the job has ended.
        self.pages = PENDING
        #: True if the result is no longer needed: the job ends before its next store call.
        self.cancelled = False

    def outcome(self, overdue: bool) -> int:
        """Return this rank's vote: ``pages``, or ``PENDING`` while a call of an ``overdue`` job may
        still use the staging pages."""
        in_use = overdue and not all(call.done() for call in self.overdue_calls)
        return PENDING if in_use else self.pages

    def run(self) -> None:
        """Run the work and publish its result."""
        pages, began = 0, time.monotonic()
        try:
            pages = self._work(self)
        except Exception:
            self.fault = "internal"
            logger.exception(
                "HiCache buffer: unexpected error in a store job (bug; please report); its pages "
                "count as missing, and requests compute them"
            )
        finally:
            self.seconds = time.monotonic() - began
            self.pages = pages  # last, because it publishes the other fields to the scheduler


class Threads:
    """Threads that run calls first in, first out. They are daemons, so that a call that never
    returns does not keep the process alive.

    Args:
        name: suffix of the threads' names, after "hicache-".
        count: number of threads, created at once. None: threads are created on demand and reused;
            the caller bounds the number of calls.
    """

    def __init__(self, name: str, count: int | None = 1) -> None:
        self._name, self._grows = name, count is None
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._under_way = 0
        self._threads: list[threading.Thread] = []
        for _ in range(count or 0):
            self._add_thread()

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue ``call``. Return a future, which is done when the call has returned or raised, or
        could not be started; its callbacks run on the call's thread."""
        future: Future[Any] = Future()
        try:
            with self._lock:
                if self._grows and self._under_way >= len(self._threads):
                    self._add_thread()
                self._under_way += 1
        except RuntimeError as error:  # no more threads, or the interpreter is ending
            future.set_exception(error)
        else:
            self._calls.put((future, call))
        return future

    def submit(self, work: Callable[[Job], int]) -> Job:
        """Queue ``work`` as a job. Return the job."""
        job = Job(work)
        self.start(job.run)
        return job

    def close(self, until: float = 0.0) -> bool:
        """End the threads after the queued calls. Return False if one still runs at ``until``
        (``time.monotonic``)."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"hicache-{self._name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self) -> None:
        while (task := self._calls.get()) is not None:
            future, call = task
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # also SystemExit: it counts as the store's failure
                error = raised
            # Count the thread as idle first, because the future's waiter may start a call at once.
            with self._lock:
                self._under_way -= 1
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
            del task, call, future, result, error  # so that an idle thread holds no tensors


class BackOff:
    """Retry times after failures: the interval starts at ``first`` and doubles up to ``longest``.
    All times are of one clock. Not thread-safe."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._next = first
        self._due = 0.0
        #: The interval before the next attempt.
        self.interval = first
        #: True from a failure until the next success.
        self.failing = False

    def failed(self, now: float, more: int = 0) -> None:
        """Record a failure: the next attempt is due after ``1 + more`` intervals."""
        self.failing, self.interval = True, self._next
        self._due = now + self.interval * (1 + more)
        self._next = min(2 * self._next, self._longest)

    def waits(self, now: float) -> bool:
        """Return True if the next attempt is not due yet."""
        return self.failing and now < self._due

    def worked(self) -> None:
        """Record a success: the next failure starts at the first interval."""
        self.failing, self._next = False, self._first

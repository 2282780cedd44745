"""What the scheduler has other threads do: jobs for the store, whose calls may never return; and
when what has failed is tried again."""

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
    """Pages asked of the store, in a row, on a thread of :class:`Threads`. What it has found out is
    read by the scheduler thread, which alone decides what follows from it."""

    def __init__(self, work: Callable[[Job], int]) -> None:
        self._work = work
        #: Page hashes and keys of what a query found, beside ``pages``.
        self.found: tuple[list[str], list[str]] = ([], [])
        #: Why not all pages are good, where the store was at fault.
        self.fault: str | None = None
        #: Calls that were given up and may still use the staging pages.
        self.overdue_calls: list[Future[object]] = []
        #: Pages noted as stored that the store was found not to have.
        self.lost = 0
        #: How long the work took.
        self.seconds = 0.0
        #: Leading good pages; ``PENDING`` until the job has ended.
        self.pages = PENDING
        #: Nobody waits for it any more: it ends at its next call of the store.
        self.cancelled = False

    def outcome(self, overdue: bool) -> int:
        """What this rank votes: ``pages``; of an ``overdue`` one ``PENDING`` while a call may still
        use its staging pages."""
        used = overdue and not all(call.done() for call in self.overdue_calls)
        return PENDING if used else self.pages

    def run(self) -> None:
        """Do the work."""
        pages, began = 0, time.monotonic()
        try:
            pages = self._work(self)
        except Exception:
            self.fault = "internal"
            logger.exception(
                "HiCache buffer: an unexpected error in a job for the store; its pages count as "
                "missing, and their requests compute them. This is a defect: please report it"
            )
        finally:
            self.seconds = time.monotonic() - began
            self.pages = pages  # last: the scheduler looks at everything else after it


class Threads:
    """Daemon threads that run calls in the order in which they come: one that never returns does
    not keep the process alive.

    Args:
        name: of the threads, behind "hicache-".
        count: of threads, which are made at once. None: they are made when they are needed and used
            again, and how many there may be is for the caller to bound.
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
        """Run ``call`` when a thread has time for it. The future is done when it has returned or
        raised, whatever it raised, or could not be started; its callbacks run on that thread."""
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
        """Do a job for the scheduler when a thread has time for it."""
        job = Job(work)
        self.start(job.run)
        return job

    def close(self, until: float = 0.0) -> bool:
        """End the threads after what they have to do; False if one runs on at ``until``, of
        ``time.monotonic``."""
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
            except BaseException as raised:  # a store that exits the interpreter is one that failed
                error = raised
            # Idle before the future is done: who waits for it may start the next call at once.
            with self._lock:
                self._under_way -= 1
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
            del task, call, future, result, error  # an idle thread holds no tensors


class BackOff:
    """When what has failed is tried again: after ``first``, then after twice that and so on, at
    most ``longest`` apart. Times are numbers of one clock. Not thread-safe."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._next = first
        self._due = 0.0
        #: The interval before the next attempt.
        self.interval = first
        #: Whether it has failed and has not worked since.
        self.failing = False

    def failed(self, now: float, more: int = 0) -> None:
        """The next attempt is due an interval later, and ``more`` times the interval after that."""
        self.failing, self.interval = True, self._next
        self._due = now + self.interval * (1 + more)
        self._next = min(2 * self._next, self._longest)

    def waits(self, now: float) -> bool:
        """Whether it is not to be tried yet."""
        return self.failing and now < self._due

    def worked(self) -> None:
        """The next failure is a new one."""
        self.failing, self._next = False, self._first

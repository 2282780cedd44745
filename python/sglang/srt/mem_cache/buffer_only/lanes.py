"""Threads that wait for the store: one for each kind of call, as SGLang's own storage threads are.

A lane runs jobs one after the other and never ends because of one. What a job has found out is read
by the scheduler thread, which alone decides what follows from it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)


class Job:
    """Pages asked of the store, in a row."""

    def __init__(self, work: Callable[[Job], int]) -> None:
        self._work = work
        #: What a query found, beside ``pages``.
        self.found: Any = None
        #: Why not all pages are good, where the store was at fault.
        self.fault: str | None = None
        #: Calls that were given up and may still use the staging pages.
        self.given_up: list[Future[Any]] = []
        #: Leading good pages; None until the job has ended.
        self.pages: int | None = None
        self._cancelled = threading.Event()

    @property
    def quiet(self) -> bool:
        """Whether the job has ended and nothing of it uses the staging pages any more."""
        return self.pages is not None and all(call.done() for call in self.given_up)

    def cancel(self) -> None:
        """Nobody waits for it any more: it ends at its next call of the store."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether the job should end."""
        return self._cancelled.is_set()

    def run(self) -> None:
        """Do the work; on a lane's thread."""
        pages = 0
        try:
            pages = self._work(self)
        except Exception:
            self.fault = "internal"
            logger.exception("HiCache buffer: a job for the store failed; its pages are missing")
        finally:
            self.pages = pages  # last: the scheduler looks at everything else after it


class Lane:
    """A daemon thread with a queue of jobs."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"hicache-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Job], int]) -> Job:
        """Run ``work`` after all that was submitted before."""
        job = Job(work)
        self._jobs.put(job)
        return job

    def close(self, timeout: float) -> bool:
        """End after the jobs that are queued; False if that takes more than ``timeout`` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()

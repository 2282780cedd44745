"""Threads that do their jobs when a test says so, on the test's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sglang.srt.mem_cache.buffer_only.page_store import Job


class ManualThreads:
    """Like ``IOThreads``, but nothing happens before ``run``."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self.name = name
        self.jobs: deque[Job] = deque()
        #: Whether they do their jobs as soon as somebody waits for some, and how long that may be.
        self.prompt = False
        self.waits: list[float] = []

    def submit(self, work) -> Job:
        job = Job(work)
        self.jobs.append(job)
        return job

    def run(self, jobs: int | None = None) -> int:
        """Do the oldest ``jobs`` jobs, or all that are there; how many that were."""
        count = len(self.jobs) if jobs is None else min(jobs, len(self.jobs))
        for _ in range(count):
            self.jobs.popleft().run()
        return count

    def wait(self, jobs: Iterable[Job], seconds: float) -> bool:
        self.waits.append(seconds)
        if self.prompt:
            self.run()
        return all(job.wait(0) for job in jobs)

    def close(self, until: float) -> bool:
        return True

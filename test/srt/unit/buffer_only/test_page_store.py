"""A job that fails is an answer, not the end of its thread."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from sglang.srt.mem_cache.buffer_only.page_store import IOThreads, Job


def ended(thread: IOThreads) -> None:
    """Wait for all jobs of a thread."""
    last = threading.Event()
    thread.submit(lambda job: last.set() or 0)
    assert last.wait(10)


@pytest.mark.hazard("store-exception")
def test_an_exception_ends_the_job_and_not_the_thread():
    """Or nothing would ever be written or read again, and no staging page come back."""
    thread = IOThreads("test")

    def fail(job: Job) -> int:
        raise KeyError("unexpected")

    jobs = [thread.submit(fail), thread.submit(lambda job: 3)]
    ended(thread)
    assert [job.pages for job in jobs] == [0, 3] and jobs[0].fault and not jobs[1].fault
    assert thread.close(time.monotonic() + 10)


def test_quiet_is_more_than_ended():
    """A call that was given up may still write into the staging pages."""
    call: Future[None] = Future()

    def give_up(job: Job) -> int:
        job.overdue_calls.append(call)
        return 1

    job = Job(give_up)
    assert not job.drained
    job.run()
    assert job.pages == 1 and not job.drained
    call.set_result(None)
    assert job.drained

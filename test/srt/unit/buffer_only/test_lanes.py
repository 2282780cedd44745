"""Lanes: a job that fails is an answer, not the end of the thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from sglang.srt.mem_cache.buffer_only.lanes import Job, Lane


def ended(lane: Lane) -> None:
    """Wait for all jobs of a lane."""
    last = threading.Event()
    lane.submit(lambda job: last.set() or 0)
    assert last.wait(10)


def test_an_exception_ends_the_job_and_not_the_lane():
    """Or nothing would ever be written or read again, and no staging page come back."""
    lane = Lane("test")

    def fail(job: Job) -> int:
        raise KeyError("unexpected")

    jobs = [lane.submit(fail), lane.submit(lambda job: 3)]
    ended(lane)
    assert [job.pages for job in jobs] == [0, 3] and jobs[0].fault and not jobs[1].fault
    assert lane.close(10)


def test_quiet_is_more_than_ended():
    """A call that was given up may still write into the staging pages."""
    call: Future[None] = Future()

    def give_up(job: Job) -> int:
        job.given_up.append(call)
        return 1

    job = Job(give_up)
    assert not job.quiet
    job.run()
    assert job.pages == 1 and not job.quiet
    call.set_result(None)
    assert job.quiet

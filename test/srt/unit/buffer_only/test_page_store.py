"""Keys of pages: one namespace never reads another's, and the empty one keeps SGLang's keys. A job
that fails is an answer, not the end of its thread."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.mem_cache.buffer_only.page_store import IOThread, Job, store_keys

HASHES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]


def test_without_a_namespace_the_keys_are_sglangs():
    """A store that other servers have filled stays useful."""
    assert store_keys(HASHES, None) == store_keys(HASHES, "") == HASHES


@given(st.text(min_size=1), st.text(min_size=1))
def test_namespaces_are_disjoint(one: str, other: str):
    """Tenants, adapters and salts with the same tokens."""
    mine, theirs = set(store_keys(HASHES, one)), set(store_keys(HASHES, other))
    assert len(mine) == len(HASHES) and not mine & set(HASHES)
    assert mine == theirs if one == other else not mine & theirs


def test_keys_do_not_depend_on_who_asks():
    """Another process, and another cut into nodes, must find what this one wrote."""
    keys = store_keys(HASHES, "salt")
    assert keys == store_keys(HASHES[:1], "salt") + store_keys(HASHES[1:], "salt")


def ended(thread: IOThread) -> None:
    """Wait for all jobs of a thread."""
    last = threading.Event()
    thread.submit(lambda job: last.set() or 0)
    assert last.wait(10)


@pytest.mark.hazard("store-exception")
def test_an_exception_ends_the_job_and_not_the_thread():
    """Or nothing would ever be written or read again, and no staging page come back."""
    thread = IOThread("test")

    def fail(job: Job) -> int:
        raise KeyError("unexpected")

    jobs = [thread.submit(fail), thread.submit(lambda job: 3)]
    ended(thread)
    assert [job.pages for job in jobs] == [0, 3] and jobs[0].fault and not jobs[1].fault
    assert thread.close(10)


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

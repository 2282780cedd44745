"""Threads that stand back, and those that must not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang.srt.disaggregation.delta.prefill import transfer_pool

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="threads have numbers of their own on Linux"
)

_PROGRAM = """
import ctypes, os, threading
from sglang.srt.disaggregation.delta.prefill.transfer_pool import (
    batch_scheduling,
    use_batch_scheduling,
)

libc = ctypes.CDLL(None)
def native():  # as a library does: a thread that Python does not know
    asleep = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    number, seconds = ctypes.c_ulong(), ctypes.c_void_p(60)
    start = ctypes.cast(libc.sleep, ctypes.c_void_p)
    assert libc.pthread_create(ctypes.byref(number), None, start, seconds) == 0

def said(threads):
    return [(os.sched_getscheduler(t), os.getpriority(os.PRIO_PROCESS, t)) for t in threads]

def tasks():
    return {int(name) for name in os.listdir("/proc/self/task")}

mine, end = threading.get_native_id(), threading.Event()
native()
before = tasks()
with batch_scheduling(7):
    native()
    python = threading.Thread(target=end.wait)
    python.start()
new = tasks() - before - {python.native_id}
print(said([mine]), sorted(set(said(before - {mine}))), said([python.native_id]), said(new))
end.set()
os._exit(0)
"""


@pytest.mark.hazard("spinning-workers")
def test_native_threads_of_a_library() -> None:
    """Guards against the calling thread, one that was there before, or one of Python's that gives
    its core away: it may hold the interpreter's lock; and against a library's threads that take as
    much of the cores as the scheduler does."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    as_ever = [(os.SCHED_OTHER, nice)]
    expected = [as_ever, as_ever, as_ever, [(os.SCHED_BATCH, min(nice + 7, 19))]]
    assert done.stdout.strip() == " ".join(map(str, expected)), done.stderr


def test_a_worker() -> None:
    """Guards against workers that get less of a core than the scheduler while they hold the
    interpreter's lock, and against the caller's own policy."""
    found = []

    def look() -> None:
        transfer_pool.use_batch_scheduling()
        found.append((os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)))

    thread = threading.Thread(target=look)
    before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    thread.start()
    thread.join()
    assert found == [(os.SCHED_BATCH, before[1])]
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before

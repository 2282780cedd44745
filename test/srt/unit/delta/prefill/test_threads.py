"""Transfer threads: their number, the rooms of each, and their scheduling class."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from sglang.srt.disaggregation.delta.mooncake.backend import Callers
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    TransferSettings,
    use_batch_scheduling,
)
from sglang.srt.patchset.environment import QUEUES


@pytest.mark.hazard("wrong-counts")
@pytest.mark.parametrize(
    ("text", "queues"), [(None, 4), ("3", 3), ("256", 256), ("257", 256), ("2000000000", 256)]
)
def test_number_of_threads(monkeypatch: pytest.MonkeyPatch, text: str | None, queues: int) -> None:
    """Guards against a server that refuses values which SGLang allows under this name, or that
    starts as many threads."""
    monkeypatch.delenv(QUEUES.name, raising=False)
    if text is not None:
        monkeypatch.setenv(QUEUES.name, text)
    assert TransferSettings.read().queues == queues


@pytest.mark.hazard("chunks-overtake")
@pytest.mark.parametrize("stride", [1, 2, 4, 8, 64, 2**32, 2**40])
@pytest.mark.parametrize("workers", [1, 3, 4, 12])
def test_rooms_spread_over_workers(stride: int, workers: int) -> None:
    """Guards against rooms of one remainder (data parallel attention) that all go to one worker,
    and against two workers for one room."""
    from sglang.srt.disaggregation.delta.prefill.transfer_pool import worker_of

    rooms = [3 + stride * index for index in range(2000)]
    shares = Counter(worker_of(room, workers) for room in rooms)
    assert set(shares) == set(range(workers))
    assert max(shares.values()) <= 1.25 * len(rooms) / workers
    assert all(worker_of(room, workers) == worker_of(room, workers) for room in rooms)
    assert worker_of(2**63 + 5, workers) < workers


# ---- threads that yield the core, and threads that must not ----

ON_LINUX = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="only Linux numbers its threads"
)

_PROGRAM = """
import ctypes, os, threading
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
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
with batch_scheduling():
    native()
    python = threading.Thread(target=end.wait)
    python.start()
new = tasks() - before - {python.native_id}
print(said([mine]), sorted(set(said(before - {mine}))), said([python.native_id]), said(new))
end.set()
os._exit(0)
"""


@ON_LINUX
@pytest.mark.hazard("spinning-workers")
def test_native_threads_of_a_library() -> None:
    """Guards against yielding the core of the calling thread, of an older thread or of Python's
    threads, which may hold the interpreter's lock; and against a library's threads that preempt the
    scheduler when they wake up."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    as_ever = [(os.SCHED_OTHER, nice)]
    expected = [as_ever, as_ever, as_ever, [(os.SCHED_BATCH, nice)]]
    assert done.stdout.strip() == " ".join(map(str, expected)), done.stderr


def test_an_exit_does_not_wait_for_a_call() -> None:
    """Guards against a server that cannot exit while a call of Mooncake hangs."""
    program = (
        "import time\n"
        "from sglang.srt.disaggregation.delta.mooncake.backend import Callers\n"
        "callers = Callers(1, 1)\n"
        "assert callers.submit('peer', int, '7').result(60) == 7\n"
        "callers.submit('peer', time.sleep, 3600)\n"
        "time.sleep(0.1)\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True)


@ON_LINUX
def test_a_thread_that_calls_mooncake() -> None:
    """Guards against threads that preempt the scheduler when they are woken."""
    assert Callers(1, 1).submit("peer", os.sched_getscheduler, 0).result(60) == os.SCHED_BATCH


@ON_LINUX
def test_a_worker() -> None:
    """Guards against workers that get less CPU time than the scheduler while they hold the
    interpreter's lock, and against changing the caller's own policy."""
    found = []

    def look() -> None:
        use_batch_scheduling()
        found.append((os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)))

    thread = threading.Thread(target=look)
    before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    thread.start()
    thread.join()
    assert found == [(os.SCHED_BATCH, before[1])]
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before
